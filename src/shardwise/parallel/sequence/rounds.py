"""Compute one rank's part of a ring, its queries with each block that arrives, and the gradients.

`ring` explains how blocks are merged and what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.host import to_device
from shardwise.parallel.sequence.block_attention import attended, finite, gradients, wide
from shardwise.parallel.sequence.passing import blocks_passing, gradients_around
from shardwise.parallel.sequence.ring_plan import HEADS, Call, add_to_mask, bias_of, pairs


@dataclass(frozen=True)
class Rounds:
    """One attention around a ring, without its tensors. `reads`: the key head of each query head (`key_heads_read`)."""

    call: Call
    reads: torch.Tensor | None


def _expanded(tensor: torch.Tensor, queries: int, reads: torch.Tensor | None) -> torch.Tensor:
    """Returns keys or values repeated to a head for each of `queries` query heads.

    reads  (H,) the head that each query head reads; None: equal runs of query heads share one
    """
    if reads is not None:
        return tensor.index_select(HEADS, to_device(reads, tensor.device))
    queries_per_key = queries // tensor.shape[HEADS]
    return tensor if queries_per_key == 1 else tensor.repeat_interleave(queries_per_key, HEADS)


def _collapsed(gradient: torch.Tensor, heads: int, reads: torch.Tensor | None) -> torch.Tensor:
    """Returns the gradient of keys or values with `heads` heads, summed over query heads (adjoint of `_expanded`)."""
    if reads is not None:
        shape = [gradient.shape[0], heads, *gradient.shape[2:]]
        return gradient.new_zeros(shape).index_add_(HEADS, to_device(reads, gradient.device), gradient)
    queries_per_key = gradient.shape[HEADS] // heads
    return gradient if queries_per_key == 1 else gradient.unflatten(HEADS, (heads, queries_per_key)).sum(HEADS + 1)


def forward_around(
    ring: Rounds, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (output (B, H, s, D) in q's dtype, log-sum-exp (B, H, s) in `wide(q.dtype)`) of this rank's queries.

    q, k, v  this rank's plain shares;  mask  of this rank's heads, all positions, as of `HeadsHere.mask`. Collective.
    """
    call, reads, dtype, heads = ring.call, ring.reads, wide(q.dtype), q.shape[HEADS]
    output = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    # float64, so that rounding does not add up over blocks
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float64, device=q.device)
    for source, (key, value) in blocks_passing(call, (k, v)):
        for q_at, k_at, q_here, k_here, kind in pairs(call, source):
            rows, columns = slice(*q_here), slice(*k_here)
            bias = bias_of(call, mask, q_at, k_at, kind, q.device)
            # heads are repeated for one pair of runs at a time, so that blocks that are passed stay small
            keys, values = (_expanded(t[:, :, columns], heads, reads) for t in (key, value))
            out_here, lse_here = attended(q[:, :, rows], keys, values, bias, kind == "diagonal", call.scale)
            lse_here = lse_here.double()
            # exp(lse_here) / (exp(lse_here) + exp(lse)); set to 1 for rows that read nothing before, and to 0 for rows
            # that read nothing in this pair, where the difference is of infinities
            weight = torch.sigmoid(lse_here - finite(lse[:, :, rows])).masked_fill(lse[:, :, rows].isinf(), 1.0)
            weight = weight.masked_fill(lse_here.isinf(), 0.0).unsqueeze(-1)
            output[:, :, rows] += weight.to(dtype) * (out_here - output[:, :, rows])
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], lse_here)
    # `copy_` and not `to`, since a proof in float64 skips casts to narrower dtypes
    kept = torch.empty(lse.shape, dtype=dtype, device=lse.device).copy_(lse)
    return output.to(q.dtype), kept


def backward_around(
    ring: Rounds, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    output: torch.Tensor, lse: torch.Tensor, wants_mask: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Returns the gradients of q, k, v, and of an added mask if `wants_mask` (else None). Collective.

    gradient  of the output; other arguments as of `forward_around`, and its results
    The mask's has the shape of `mask`, with this rank's rows filled and zeros elsewhere.
    """
    call, reads, dtype, heads = ring.call, ring.reads, wide(q.dtype), q.shape[HEADS]
    dq = torch.zeros_like(q, dtype=dtype)
    dmask = torch.zeros_like(mask, dtype=dtype) if wants_mask and mask is not None else None

    def block(source: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns this rank's summands of the gradients of keys and values of rank `source`; adds to `dq`, `dmask`."""
        # in the wide dtype around the whole ring, so that the error does not grow with the number of ranks
        # (`test_the_error_of_a_ring_does_not_grow_with_its_ranks`)
        dk, dv = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for q_at, k_at, q_here, k_here, kind in pairs(call, source):
            rows, columns = slice(*q_here), slice(*k_here)
            bias = bias_of(call, mask, q_at, k_at, kind, q.device)
            keys, values = (_expanded(t[:, :, columns], heads, reads) for t in (key, value))
            of_q, of_k, of_v, of_scores = gradients(
                gradient[:, :, rows], q[:, :, rows], keys, values, output[:, :, rows], lse[:, :, rows], bias,
                kind == "diagonal", call.scale, dmask is not None,
            )  # fmt: skip
            dq[:, :, rows] += of_q
            dk[:, :, columns] += _collapsed(of_k, dk.shape[HEADS], reads)
            dv[:, :, columns] += _collapsed(of_v, dv.shape[HEADS], reads)
            if dmask is not None and of_scores is not None:
                add_to_mask(dmask, of_scores, q_at, k_at)
            del of_q, of_k, of_v, of_scores  # frees their memory before the next pair
        return dk, dv

    dk, dv = gradients_around(call, (k, v), block)
    dmask = dmask.to(mask.dtype) if dmask is not None and mask is not None else None
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask
