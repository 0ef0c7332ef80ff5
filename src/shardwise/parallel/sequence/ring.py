"""Ring attention, in which queries stay on their rank and keys and values are passed from rank to rank.

    step 0     rank r has keys r       q_r K_r     -> o, lse          meanwhile K_r goes on to r+1
    step 1     rank r has keys r-1     q_r K_{r-1} -> merged          ...
    backward   the blocks pass by again, and with them the sums of their gradients, which end at their owners

Blocks are merged in float32 (float64 for float64), with lse the log of the sum of exp of each row's scores:

    lse = log(exp(lse_a) + exp(lse_b))      o = o_a exp(lse_a - lse) + o_b exp(lse_b - lse)

A block is split along the runs of consecutive positions that its rank owns, so any distribution of positions is right.
A pair of runs is empty by the mask (nothing is computed), full, on the causal diagonal, or masked. A block is passed
only to ranks that read any of it, and so is the sum of its gradients, which ends at the block's owner.

Elements received by a rank in forward, if every rank reads of every block: 2 B S H_kv D (p-1)/p; in backward the same
again, and as many for the gradients of keys and values (p-1 hops), in the dtype in which they are summed (float32, or
float64 for float64). For a block that h other ranks read, h stands in place of p-1.
Source: Liu et al., "Ring Attention" (2023); Milakov and Gimelshein, "Online normalizer calculation" (2018).

In a compiled program a ring is one operation (`shardwise::ring`), and its backward another (operators).

What this does not do: dropout, for which attention goes by heads instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.comm import Axis, is_written_down
from shardwise.parallel.sequence.operators import backward_written, forward_written
from shardwise.parallel.sequence.pair_mask import PairMask
from shardwise.parallel.sequence.ring_plan import (
    POSITIONS,
    Call,
    HeadsHere,
    from_axis,
    key_heads_read,
    kinds_of,
    refuse_other_samples,
    tile_of,
)
from shardwise.parallel.sequence.rounds import Rounds, backward_around, forward_around
from shardwise.part import Owners
from shardwise.trace.functional import differentiable_once

NO_SECOND = (
    "the gradient of attention whose keys go around ranks is differentiated again: write the attention out "
    "(softmax(q @ k.mT / sqrt(d)) @ v), or leave its positions whole"
)


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, axis: Axis, *,
    is_causal: bool, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Returns attention of queries (B, H, S, D), whose positions `axis` cuts, and keys and values, cut so or uncut.

    mask   plain, broadcast to (B, H, S, T), True where a key may be read, or values added to scores; a `PairMask`; None
    scale  of the scores; None: 1 / sqrt(D)
    An axis of one rank cuts nothing, and serves to read a `PairMask` in tiles. Collective; differentiable once.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _Ring.apply(query, key, value, mask, axis, is_causal, factor)


class _Ring(torch.autograd.Function):
    """Attention around a ring as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, axis: Axis, is_causal: bool, scale: float):
        """Returns the output, cut as the queries are; arguments as of `ring_attention`."""
        q, k, v = (from_axis(t, axis) for t in (query, key, value))
        refuse_other_samples(q, k, v)
        keys = k.part.owners if k.part is not None else None
        queries = q.part.owners if q.part is not None else Owners.blocks(query.shape[POSITIONS], 1)
        tile = tile_of(queries.size, key.shape[POSITIONS]) if isinstance(mask, PairMask) else 0
        heads = HeadsHere.of(q)
        mask_here = heads.mask(mask)
        call = Call(axis, queries, keys, key.shape[POSITIONS], is_causal, scale,
                    (tuple(k.payload.shape), tuple(v.payload.shape)), mask is not None,
                    kinds_of(mask, mask_here, queries, keys, key.shape[POSITIONS], is_causal), tile)  # fmt: skip
        # a `PairMask` has no memory of its own, so `save_for_backward` cannot save it
        pairs = mask_here if isinstance(mask_here, PairMask) else None
        kept = mask_here if pairs is None else None
        around = forward_written if is_written_down(axis, q.payload) else forward_around
        ring = Rounds(call, key_heads_read(q, k))
        output, lse = around(ring, q.payload, k.payload, v.payload, mask_here)
        # shells describe the cuts without memory, since recompute frees saved tensors, but not what the context holds
        shells = tuple(layers.shell() for layers in (q, k, v))
        ctx.ring, ctx.kinds, ctx.pairs = ring, shells, pairs
        ctx.heads, ctx.mask_shape = HeadsHere.of(shells[0]), None if mask is None else mask.shape
        ctx.save_for_backward(q.payload, k.payload, v.payload, kept, output, lse)
        return q.like(output)

    @staticmethod
    @differentiable_once(NO_SECOND)
    def backward(ctx: Any, gradient: Any):
        """Returns the gradients of queries, keys, values and mask (or None), and None for the others. Collective."""
        q, k, v = ctx.kinds
        payload = q.share(gradient)
        query, key, value, mask, output, lse = ctx.saved_tensors
        mask = mask if ctx.pairs is None else ctx.pairs
        wants = mask is not None and ctx.needs_input_grad[3]
        around = backward_written if is_written_down(ctx.ring.call.axis, query) else backward_around
        dq, dk, dv, dmask = around(ctx.ring, payload, query, key, value, mask, output, lse, wants)
        if dmask is not None:
            dmask = ctx.heads.mask_gradient(dmask, ctx.mask_shape, ctx.ring.call.axis)
        return q.like(dq), k.gradient(dk, q), v.gradient(dv, q), dmask, None, None, None
