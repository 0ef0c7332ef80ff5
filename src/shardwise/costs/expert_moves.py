"""What a layer of experts moves and starts beside its products: copies of rows, casts, biases, routing.

Source of all of them: Megatron-Core 0.15, transformer/moe (token_dispatcher, router, experts) and
fusions/fused_bias_geglu. What is sent is in costs/block, how long the host takes in costs/host_seconds.
"""

from __future__ import annotations

from shardwise.costs.fp8 import FP8
from shardwise.costs.layout import Layout
from shardwise.costs.rings import ACT_BYTES
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software

# Kernels of Megatron's router and exchange in forward and in backward, views apart: what its modules call on two ranks
# with 8 of 32 experts for each row, as a dispatch mode counts them; each takes a launch at least
ROUTING = (52, 37)


def routed_rows(shape: Shape, layout: Layout) -> float:
    """Returns the rows of experts that a rank sends, and takes under a balanced load."""
    return layout.tokens / (layout.tp if layout.sp else 1) * shape.top_k


def routed_bytes(shape: Shape, layout: Layout, software: Software) -> float:
    """Returns the bytes that copies of rows move on their way to the experts and back, in forward or in backward.

    Each is written for each of its experts and summed again: two passes and two of the stream. Where copies travel by
    themselves and a rank has several experts, they are sorted by expert and back, four more; DeepEP hands rows over
    once for each rank, so what is written for each expert comes after it: four in all. For FP8 they are padded and
    back (`Fp8Padding`), four more, but where a capacity makes them as many as that takes, and where HybridEP pads.
    """
    if not shape.experts:
        return 0.0
    passes = 2 + 2 / shape.top_k
    if shape.experts > layout.ep > 1:
        passes = passes + 4 if software.dispatch == "each" else 4
    if software.fp8 and not software.drops and software.dispatch != "hybridep":
        passes += 4
    return passes * routed_rows(shape, layout) * shape.hidden * ACT_BYTES


def bias_bytes(shape: Shape, layout: Layout, software: Software) -> tuple[float, float]:
    """Returns the bytes that experts' biases move in (forward, backward).

    Megatron adds the last product's bias, times a row's float32 weight, expert by expert in float32 (`_apply_bias`):
    weighted 4 bytes an element, added 10, joined 8, narrowed 6; backward widened 6, narrowed 6, by weight 12, by bias
    12.
    """
    if not (shape.expert_bias and software.megatron):
        return 0.0, 0.0
    elements = routed_rows(shape, layout) * shape.hidden
    return 28 * elements, 36 * elements


def clamp_bytes(shape: Shape, layout: Layout, software: Software) -> tuple[float, float]:
    """Returns the bytes that a clamped activation of experts moves beside it in (forward, backward).

    Both halves of the first product's output are clamped by ops of their own: clamped 8 bytes an element, joined 8;
    backward split 8, by one bound 8, by two 14.
    """
    if not (shape.expert_bias and software.megatron):
        return 0.0, 0.0
    elements = routed_rows(shape, layout) * shape.ffn
    return 16 * elements, 30 * elements


def cast_elements(shape: Shape, layout: Layout, software: Software) -> tuple[float, float]:
    """Returns the elements of routed rows that are cast to FP8: of products' inputs, of gradients of their outputs.

    Where the products join them (Transformer Engine's `NVTE_CUTEDSL_FUSED_GROUPED_MLP`), what the activation leaves and
    its gradient are written as FP8 at once.
    """
    if not shape.experts:
        return 0.0, 0.0
    rows = routed_rows(shape, layout) if layout.ep > 1 else layout.tokens * shape.top_k
    inner = 0.0 if software.joins_experts else shape.ffn / (1 if layout.ep > 1 else layout.tp)
    return rows * (shape.hidden + inner), rows * ((2 if shape.gated else 1) * inner + shape.hidden)


def routing_kernels(shape: Shape, software: Software) -> tuple[int, int]:
    """Returns the kernels of routing and exchange in (forward, backward) of a layer; none where not known."""
    return ROUTING if shape.experts and software.megatron else (0, 0)


def cast_kernels(shape: Shape, layout: Layout, software: Software) -> int:
    """Returns the number of cast kernels in each direction beyond one expert's: each expert's rows are scaled apart."""
    if not (software.fp8 and shape.experts) or software.joins_experts:
        return 0
    products = 2
    return round(products * FP8[software.fp8].cast_kernels * (max(1.0, shape.experts / layout.ep) - 1))
