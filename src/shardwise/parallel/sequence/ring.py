"""`ring_attention`: attention of queries that stay where they are, to keys and values that go from rank to rank.

    step 0     rank r has keys r       q_r K_r     -> o, lse          meanwhile K_r goes on to r+1
    step 1     rank r has keys r-1     q_r K_{r-1} -> merged          ...
    backward   the blocks pass by again, and with them the sums of their gradients, which end at their owners

Merging, in float32 (float64 for float64), with lse the log of the sum of exponents of each row's scores:

    lse = log(exp(lse_a) + exp(lse_b))      o = o_a exp(lse_a - lse) + o_b exp(lse_b - lse)

A block is split along the runs of indices that its rank owns, so that any dealing of positions is right: a pair of
runs is empty by the mask (nothing is computed), full, on the causal diagonal, or masked. A block goes from one rank
that reads any of it to the next, past those that do not, and the sum of its gradients likewise, then to its owner.

Bytes received by a rank in a forward, where every rank reads of every block: 2 B S H_kv D (p-1)/p elements; in
backward the same again, and as much for the gradients of keys and values (p-1 hops), in the dtype that they are summed
in: float32, or float64 for float64. Of a block that h other ranks read, h in the place of p-1.
Source: Liu et al., "Ring Attention" (2023); Milakov and Gimelshein, "Online normalizer calculation" (2018).

What this does not do: dropout, which goes by heads instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwise.comm import Axis
from shardwise.host import to_device
from shardwise.parallel.sequence.kernels import attended, finite, gradients, wide
from shardwise.parallel.sequence.layers import (
    HEADS,
    POSITIONS,
    HeadsHere,
    from_axis,
    key_heads_read,
    refuse_other_samples,
)
from shardwise.parallel.sequence.pair_mask import PairMask
from shardwise.parallel.sequence.pairs import Call, add_to_mask, bias_of, kinds_of, pairs, tile_of
from shardwise.parallel.sequence.passing import blocks_passing, gradients_around
from shardwise.part import Owners


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, axis: Axis, *,
    is_causal: bool, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of queries (B, H, S, D) whose positions are cut over `axis`; keys and values are cut too, or whole.

    Over an axis of one rank nothing is cut: a mask that is a function of indices is read in tiles.

    mask  plain, broadcast to (B, H, S, T): True where a key may be read, or what is added to scores
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _Ring.apply(query, key, value, mask, axis, is_causal, factor)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, axis: Axis, is_causal: bool, scale: float):
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
        reads = key_heads_read(q, k)
        output, lse = _forward(call, q.payload, k.payload, v.payload, mask_here, reads)
        shells = tuple(each.shell() for each in (q, k, v))
        ctx.call, ctx.kinds, ctx.reads = call, shells, reads
        ctx.heads, ctx.mask_shape = HeadsHere.of(shells[0]), None if mask is None else mask.shape
        ctx.pairs = mask_here if isinstance(mask_here, PairMask) else None  # has no memory of its own
        kept = mask_here if ctx.pairs is None else None
        ctx.save_for_backward(q.payload, k.payload, v.payload, kept, output, lse)
        return q.like(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any):
        q, k, v = ctx.kinds
        payload = q.share(gradient)
        query, key, value, mask, output, lse = ctx.saved_tensors
        mask = mask if ctx.pairs is None else ctx.pairs
        wants = mask is not None and ctx.needs_input_grad[3]
        dq, dk, dv, dmask = _backward(ctx.call, payload, query, key, value, mask, output, lse, ctx.reads, wants)
        mask_gradient = ctx.heads.mask_gradient(dmask, ctx.mask_shape, ctx.call.axis) if dmask is not None else None
        return q.like(dq), k.gradient(dk, q), v.gradient(dv, q), mask_gradient, None, None, None


def _expanded(tensor: torch.Tensor, queries: int, reads: torch.Tensor | None) -> torch.Tensor:
    """Keys or values with a head for each query head."""
    if reads is not None:
        return tensor.index_select(HEADS, to_device(reads, tensor.device))
    each = queries // tensor.shape[HEADS]
    return tensor if each == 1 else tensor.repeat_interleave(each, HEADS)


def _collapsed(gradient: torch.Tensor, heads: int, reads: torch.Tensor | None) -> torch.Tensor:
    """The adjoint of `_expanded`."""
    if reads is not None:
        shape = [gradient.shape[0], heads, *gradient.shape[2:]]
        return gradient.new_zeros(shape).index_add_(HEADS, to_device(reads, gradient.device), gradient)
    each = gradient.shape[HEADS] // heads
    return gradient if each == 1 else gradient.unflatten(HEADS, (heads, each)).sum(HEADS + 1)


def _forward(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    reads: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(output (B, H, s, D) in q's dtype, log-sum-exp (B, H, s) in the wide one) of this rank's queries."""
    dtype, heads = wide(q.dtype), q.shape[HEADS]
    output = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float64, device=q.device)  # one rounding, not one a block
    for source, (key, value) in blocks_passing(call, (k, v)):
        for at, of, here, there, kind in pairs(call, source):
            rows, columns = slice(*here), slice(*there)
            bias = bias_of(call, mask, at, of, kind, q.device)
            keys, values = (_expanded(t[:, :, columns], heads, reads).to(dtype) for t in (key, value))
            mine, found = attended(q[:, :, rows].to(dtype), keys, values, bias, kind == "diagonal", call.scale)
            found = found.double()
            weight = torch.sigmoid(found - finite(lse[:, :, rows])).masked_fill(lse[:, :, rows].isinf(), 1.0)
            weight = weight.masked_fill(found.isinf(), 0.0).unsqueeze(-1)  # of what this block found
            output[:, :, rows] += weight.to(dtype) * (mine - output[:, :, rows])
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], found)
    return output.to(q.dtype), lse.to(dtype)


def _backward(
    call: Call, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    output: torch.Tensor, lse: torch.Tensor, reads: torch.Tensor | None, wants_mask: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Gradients of queries, keys, values and of a mask that is added, whose rows are this rank's."""
    dtype, heads = wide(q.dtype), q.shape[HEADS]
    dq = torch.zeros_like(q, dtype=dtype)
    dmask = torch.zeros_like(mask, dtype=dtype) if wants_mask and mask is not None else None
    dout, output = gradient.to(dtype), output.to(dtype)

    def block(source: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dk, dv = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for at, of, here, there, kind in pairs(call, source):
            rows, columns = slice(*here), slice(*there)
            bias = bias_of(call, mask, at, of, kind, q.device)
            keys, values = (_expanded(t[:, :, columns], heads, reads).to(dtype) for t in (key, value))
            of_q, of_k, of_v, of_scores = gradients(
                dout[:, :, rows], q[:, :, rows].to(dtype), keys, values, output[:, :, rows], lse[:, :, rows], bias,
                kind == "diagonal", call.scale, dmask is not None,
            )  # fmt: skip
            dq[:, :, rows] += of_q
            dk[:, :, columns] += _collapsed(of_k, dk.shape[HEADS], reads)
            dv[:, :, columns] += _collapsed(of_v, dv.shape[HEADS], reads)
            if dmask is not None and of_scores is not None:
                add_to_mask(dmask, of_scores, at, of)
            del of_q, of_k, of_v, of_scores  # not kept while the next pair is computed
        return dk, dv

    dk, dv = gradients_around(call, (k, v), block)
    dmask = dmask.to(mask.dtype) if dmask is not None and mask is not None else None
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask
