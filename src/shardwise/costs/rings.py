"""Messages of attention around a ring of cp, and bytes it moves besides its kernels, by `Software.ring`.

even      keys and values travel around the ring during the kernels; a fused kernel adds each block's output to the sum
passed    keys and values travel as above; each block's output is merged into a float32 one by elementwise ops, and
          sums of keys' and values' gradients travel in float32 (this package's ring: parallel/sequence)
merged    PyTorch's `context_parallel` (torch/distributed/tensor/experimental): keys and values of all ranks are
          all-gathered during the first block, and again for backward; each block's output is merged into a float32
          one by elementwise ops; sums of keys' and values' gradients are passed on in float32, block by block
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.costs.layout import Layout
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software

ACT_BYTES = 2  # activations in bf16 or fp16
# Bytes that `context_parallel` moves for each element of a rank's queries in each block after the first: (forward,
# backward) compiled, (forward, backward) op by op. Half of the blocks have all of a rank's queries, the others the
# second half of them, which a copy joins to the first. Forward: the output is cast to float32 (6), subtracted (12),
# multiplied (8) and subtracted again (12). Backward: gradients of queries are added (10), those of keys and values each
# (10), and both copied to be passed on (16). Op by op both are copied once more to be gathered (8)
MERGED = ((11.5, 31.5), (40.5, 58.5))
# The same of this package's ring, for each pair (run of a rank's queries, run of keys), op by op. Forward: cast to
# float32 (6), subtracted (12), multiplied (8) and added (12). Backward: gradients of queries are added (10), those of
# keys and values each (10), and tokens of the output and of its gradient are copied for the kernel (8)
PASSED = (38.0, 38.0)
LAUNCHES = {"merged": (6, 6), "passed": (24, 8)}  # of small kernels in each block: (forward, backward)
# ring -> its description for people
RINGS = {
    "even": "a fused kernel for each block, causal work dealt evenly",
    "passed": "a fused kernel for each block, causal work dealt evenly (zigzag), outputs merged in float32, as this "
    "version does",
    "merged": "a fused kernel for each block, causal work dealt evenly, outputs merged in float32 (PyTorch's)",
}


@dataclass(frozen=True)
class Message:
    """One collective of a layer on one micro-batch."""

    op: str
    axis: str
    size_bytes: float  # of the full tensor
    hidden: bool = False  # whether it runs beside compute of the layer
    share: float = 1.0  # fraction of that compute by whose end it must be complete


def gathered_keys(shape: Shape, layout: Layout, software: Software) -> float:
    """Returns bytes of one layer's keys and values of all positions, for the heads of one rank."""
    s, ranks = shape, layout.tp * layout.ulysses
    wide = max(s.kv_width / ranks, s.kv_width / s.kv_heads)
    if software.repeats_keys:
        wide = s.heads_of(ranks) * (s.head_dim + s.value_width)
    return layout.micro_batch * layout.seq * wide * ACT_BYTES


def ring_messages(shape: Shape, layout: Layout, software: Software) -> tuple[list[Message], list[Message]]:
    """Returns the messages of the ring in a layer: (those of its forward, those of its backward)."""
    kv = gathered_keys(shape, layout, software)
    if software.ring == "merged":
        hidden, share = not software.waits, 1 / layout.cp
        gather = Message("all_gather", "cp", kv, hidden, share)
        passed = Message("pass", "cp", 4 / ACT_BYTES * kv / layout.cp, hidden, share)
        # the last sums travel when nothing is left to compute
        return [gather], [gather, *[passed] * (layout.cp - 1), Message("pass", "cp", passed.size_bytes)]
    # in backward keys and values travel again, and with them the sums of their gradients
    sums = 4 if software.ring == "passed" else ACT_BYTES
    return [Message("ring", "cp", kv, True)], [Message("ring", "cp", (1 + sums / ACT_BYTES) * kv, True)]


def merged_bytes(shape: Shape, layout: Layout, software: Software) -> tuple[float, float]:
    """Returns the bytes of device memory that merging a ring's blocks moves in a layer's (forward, backward)."""
    # with zigzag a rank has two runs of positions, so 2 cp + 1 causal pairs of runs, each of half of its queries
    if software.ring == "passed":
        blocks, (forward, backward) = layout.cp + 0.5, PASSED
    else:
        blocks, (forward, backward) = layout.cp - 1, MERGED[0 if software.fused else 1]
    elements = blocks * layout.tokens * shape.output_width / layout.tp
    return forward * elements, backward * elements


def merged_block(shape: Shape, layout: Layout, software: Software) -> float:
    """Returns the bytes that live in one layer's backward for a ring "merged" or "passed".

    These are keys and values (gathered, or this rank's and those that it receives), float32 sums of their gradients
    (this rank's and those that it receives), and the float32 sum of the queries' gradients. "passed" also has tensors
    of one pair of runs: keys and values repeated for each query head, and gradients of all three.
    """
    kv = gathered_keys(shape, layout, software)
    if software.ring == "passed":
        pair = ACT_BYTES * layout.tokens / 2 * 5 * shape.query_width / layout.tp
        return kv / layout.cp * (2 + 2 * 4 / ACT_BYTES) + 4 * layout.tokens * shape.query_width / layout.tp + pair
    return kv * (1 + 2 * 4 / ACT_BYTES / layout.cp) + 4 * layout.tokens * shape.query_width / layout.tp
