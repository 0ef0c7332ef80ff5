"""What attention around a ring of cp sends, and what it moves beside its kernels, by the software's ring.

even      keys and values travel around the ring beside the kernels; a fused kernel joins each block's output
passed    keys and values travel as above; each block's output is merged into a float32 one by elementwise ops, and
          sums of keys' and values' gradients travel in float32 (this package's: parallel/sequence)
merged    PyTorch's `context_parallel` (torch/distributed/tensor/experimental): keys and values of all ranks are
          gathered beside the first block, and again for backward; each block's output is merged into a float32
          one by elementwise ops; sums of keys' and values' gradients are passed on in float32, block by block
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.costs.layout import Layout
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software

ACT_BYTES = 2  # activations in bf16 or fp16
# Bytes of one element of a rank's queries that `context_parallel` moves in each block after the first: (forward,
# backward) of compiled blocks, and op by op. Half of the blocks have all of a rank's queries, half the second half of
# them, which is joined to the first by a copy. Forward: the output is widened (6), subtracted (12), weighed (8) and
# subtracted again (12). Backward: gradients of queries are added (10), those of keys and values each (10), and both
# copied to be passed on (16). Op by op both are copied to be gathered too (8), though they were
MERGED = ((11.5, 31.5), (40.5, 58.5))
# The same of this package's ring, in each pair of runs, op by op. Forward: widened (6), subtracted (12), weighed (8)
# and added (12). Backward: gradients of queries are added (10), those of keys and values each (10), and rows of the
# output and of its gradient are copied for the kernel (8)
PASSED = (38.0, 38.0)
LAUNCHES = {"merged": (6, 6), "passed": (24, 8)}  # of small kernels in each block: (forward, backward)
# What to say of each
RINGS = {
    "even": "a fused kernel for each block, causal work dealt evenly",
    "passed": "a fused kernel for each block, causal work dealt evenly (zigzag), outputs merged in float32, as this "
    "version does",
    "merged": "a fused kernel for each block, causal work dealt evenly, outputs merged in float32 (PyTorch's)",
}


@dataclass(frozen=True)
class Message:
    """One collective of a layer: op, axis, bytes of the whole tensor, and whether it can run beside compute.

    share  of that compute, in which it must be over
    """

    op: str
    axis: str
    size_bytes: float
    hidden: bool = False
    share: float = 1.0


def gathered_keys(shape: Shape, layout: Layout, software: Software) -> float:
    """Returns bytes of the keys and values of all positions that a rank computes with in one layer."""
    s, ranks = shape, layout.tp * layout.ulysses
    wide = max(s.kv_width / ranks, s.kv_width / s.kv_heads)
    if software.repeats_keys:
        wide = s.heads_of(ranks) * (s.head_dim + s.value_width)
    return layout.micro_batch * layout.seq * wide * ACT_BYTES


def ring_messages(shape: Shape, layout: Layout, software: Software) -> tuple[list[Message], list[Message]]:
    """Returns the messages that a layer's (forward, backward) sends around the ring."""
    kv = gathered_keys(shape, layout, software)
    if software.ring == "merged":
        hidden, share = not software.waits, 1 / layout.cp
        gather = Message("all_gather", "cp", kv, hidden, share)
        passed = Message("pass", "cp", 4 / ACT_BYTES * kv / layout.cp, hidden, share)
        # nothing is left to compute while the last sums come home
        return [gather], [gather, *[passed] * (layout.cp - 1), Message("pass", "cp", passed.size_bytes)]
    # keys and values pass by again, and sums of their gradients: in float32, or as a fused kernel makes them
    sums = 4 if software.ring == "passed" else ACT_BYTES
    return [Message("ring", "cp", kv, True)], [Message("ring", "cp", (1 + sums / ACT_BYTES) * kv, True)]


def merged_bytes(shape: Shape, layout: Layout, software: Software) -> tuple[float, float]:
    """Returns the bytes that merging a ring's blocks moves in a layer: (forward, backward)."""
    if software.ring == "passed":  # pairs of runs, of which a rank has two: half of its queries in each
        blocks, (forward, backward) = layout.cp + 0.5, PASSED
    else:
        blocks, (forward, backward) = layout.cp - 1, MERGED[0 if software.fused else 1]
    elements = blocks * layout.tokens * shape.output_width / layout.tp
    return forward * elements, backward * elements


def merged_block(shape: Shape, layout: Layout, software: Software) -> float:
    """Returns the bytes alive in the backward of a ring that merges.

    Keys and values (gathered; or a rank's, twice: those that it has and those that it is sent), float32 sums of their
    gradients twice (its own, and those that it is sent), and of the queries' gradients. Where they are passed on, one
    pair of runs beside it: keys and values with a head for each query's, and gradients of all three.
    """
    kv = gathered_keys(shape, layout, software)
    if software.ring == "passed":
        pair = ACT_BYTES * layout.tokens / 2 * 5 * shape.query_width / layout.tp
        return kv / layout.cp * (2 + 2 * 4 / ACT_BYTES) + 4 * layout.tokens * shape.query_width / layout.tp + pair
    return kv * (1 + 2 * 4 / ACT_BYTES / layout.cp) + 4 * layout.tokens * shape.query_width / layout.tp
