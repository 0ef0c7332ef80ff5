"""Bytes and kernels of a layer of experts beside its matrix products: copies of tokens, casts, biases, routing.

Source of all of them: Megatron-Core 0.15, transformer/moe (token_dispatcher, router, experts) and
fusions/fused_bias_geglu. Messages are in costs/block, the host's seconds in costs/host_seconds. A row is one token's
vector of `hidden` elements for one of its `top_k` experts.
"""

from __future__ import annotations

from shardwise.costs.fp8 import FP8
from shardwise.costs.layout import Layout
from shardwise.costs.rings import ACT_BYTES
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software

# Kernels of Megatron's router and token exchange in (forward, backward), without views, as a dispatch mode counts them
# on two ranks with 8 of 32 experts for each token; each takes a launch at least
ROUTING = (52, 37)


def routed_rows(shape: Shape, layout: Layout) -> float:
    """Returns the rows that a rank sends to experts in a layer, and receives under a balanced load."""
    return layout.tokens / (layout.tp if layout.sp else 1) * shape.top_k


def routed_bytes(shape: Shape, layout: Layout, software: Software) -> float:
    """Returns the bytes of device memory that copies of rows move in forward, or as many in backward.

    A pass reads or writes all rows once. Writing a token for each of its experts and summing the results takes two
    passes over rows and two over the tokens. If each copy is sent by itself (dispatch="each") and a rank has several
    experts, sorting rows by expert and back takes four more. DeepEP sends a token once to each rank, and copies it
    after that, so that there are four in all. FP8 pads rows and removes the padding (`Fp8Padding`), four more, unless
    a capacity fixes their number or HybridEP pads them.
    """
    if not shape.experts:
        return 0.0
    passes = 2 + 2 / shape.top_k
    if shape.experts > layout.ep > 1:
        # "deepep" and "hybridep" copy tokens only after the exchange
        passes = passes + 4 if software.dispatch == "each" else 4
    if software.fp8 and not software.drops and software.dispatch != "hybridep":
        passes += 4
    return passes * routed_rows(shape, layout) * shape.hidden * ACT_BYTES


def bias_bytes(shape: Shape, layout: Layout, software: Software) -> tuple[float, float]:
    """Returns the bytes that experts' biases move in (forward, backward) of a layer; zeros without biases.

    Megatron adds the last product's bias, times a row's float32 weight, expert by expert in float32 (`_apply_bias`).
    Bytes for each element, forward: multiply 4, add 10, concatenate 8, cast 6; backward: cast to float32 6, cast back
    6, gradient of the weight 12, of the bias 12.
    """
    if not (shape.expert_bias and software.megatron):
        return 0.0, 0.0
    elements = routed_rows(shape, layout) * shape.hidden
    return 28 * elements, 36 * elements


def clamp_bytes(shape: Shape, layout: Layout, software: Software) -> tuple[float, float]:
    """Returns the bytes that clamping experts' activations adds in (forward, backward) of a layer; zeros without.

    Both halves of the first product's output are clamped by ops of their own. Bytes for each element, forward: clamp
    8, concatenate 8; backward: split 8, gradient of a clamp with one bound 8, with two 14.
    """
    if not (shape.expert_bias and software.megatron):
        return 0.0, 0.0
    elements = routed_rows(shape, layout) * shape.ffn
    return 16 * elements, 30 * elements


def cast_elements(shape: Shape, layout: Layout, software: Software) -> tuple[float, float]:
    """Returns the elements of rows cast to FP8 in a layer: (of inputs of products, of gradients of their outputs).

    With `software.joins_experts` (Transformer Engine's `NVTE_CUTEDSL_FUSED_GROUPED_MLP`) the activation's output and
    its gradient need no cast, since the grouped product writes them as FP8.
    """
    if not shape.experts:
        return 0.0, 0.0
    rows = routed_rows(shape, layout) if layout.ep > 1 else layout.tokens * shape.top_k
    inner = 0.0 if software.joins_experts else shape.ffn / (1 if layout.ep > 1 else layout.tp)
    return rows * (shape.hidden + inner), rows * ((2 if shape.gated else 1) * inner + shape.hidden)


def routing_kernels(shape: Shape, software: Software) -> tuple[int, int]:
    """Returns the number of kernels of routing and exchange in a layer's (forward, backward); (0, 0) if not known."""
    return ROUTING if shape.experts and software.megatron else (0, 0)


def cast_kernels(shape: Shape, layout: Layout, software: Software) -> int:
    """Returns the cast kernels of a layer in forward, or as many in backward, for the local experts after the first.

    Each expert's rows are scaled by themselves, so that each expert has casts of its own.
    """
    if not (software.fp8 and shape.experts) or software.joins_experts:
        return 0
    products = 2
    return round(products * FP8[software.fp8].cast_kernels * (max(1.0, shape.experts / layout.ep) - 1))
