"""Attention of one block of queries and keys, for a ring. Forecasts: costs/software, rehearsal/gpu_kernels.

A fused kernel does it where there is one that returns that sum (`fused_kernels`), for blocks without a mask and for
those on the diagonal of a causal one. Otherwise the block's scores (B, H, s, t) are written, of as many rows at a time
as `MOST_SCORES` allows, and written again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.parallel.sequence.fused_kernels import Kernel, kernel_for
from shardwise.parallel.sequence.pair_mask import MaskBlock

MOST_SCORES = 2**26  # that are written at a time: 256 MiB in float32, where several rows are no more


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which blocks are computed and merged: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Returns the log-sum-exp with 0 in place of -inf (of rows that may read nothing), for differences."""
    return torch.where(lse.isinf(), torch.zeros_like(lse), lse)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, causal: bool, scale: float) -> Kernel | None:
    """Returns the fused kernel of a block, or None where its scores are written."""
    return kernel_for(q, k, v, causal, scale) if bias is None else None


def _rows(q: torch.Tensor, k: torch.Tensor) -> Iterator[slice]:
    """Yields runs of a block's rows whose scores are written at a time; a block without rows has one, without any."""
    s, step = q.shape[-2], max(1, MOST_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[-2]))
    for first in range(0, s, step) if s else [0]:
        yield slice(first, min(s, first + step))


def _of_rows(bias: Any, rows: slice) -> torch.Tensor | None:
    if isinstance(bias, MaskBlock):
        return bias.of_rows(rows)
    return bias if bias is None or bias.dim() < 2 or bias.shape[-2] == 1 else bias[..., rows, :]


def _scores(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float, first: int
) -> torch.Tensor:  # fmt: skip
    """Returns the scores (B, H, s, t) of rows of a block, the first of which is its row `first`, masked with -inf."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if causal:
        s, t = scores.shape[-2:]
        # row `first + i` of the block reads columns up to itself
        below = torch.ones(s, t, dtype=torch.bool, device=q.device).tril(first)
        scores = scores.masked_fill(~below, -torch.inf)
    if bias is None:
        return scores
    return scores.masked_fill(~bias, -torch.inf) if bias.dtype is torch.bool else scores + bias


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (output (B, H, s, D), log-sum-exp (B, H, s)), both wide, of queries (B, H, s, D) and keys (B, H, t, D).

    bias    True where a key may be read, or what is added to scores; broadcast to (B, H, s, t), or a `MaskBlock` of it
    causal  the block lies on the diagonal: row i reads columns up to i
    """
    dtype, kernel = wide(q.dtype), _fused(q, k, v, bias, causal, scale)
    if kernel is None or kernel.widens:  # scores are written in the dtype in which blocks are merged
        q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    if kernel is not None:
        output, lse = kernel.forward(q, k, v, causal, scale)
        return output.to(dtype), lse
    outputs, sums = [], []
    for rows in _rows(q, k):
        scores = _scores(q[:, :, rows], k, _of_rows(bias, rows), causal, scale, rows.start)
        sums.append(torch.logsumexp(scores, -1))
        # of a row that may read nothing the difference would be -inf + inf, which is NaN; this way its weights are 0
        outputs.append(torch.matmul((scores - finite(sums[-1]).unsqueeze(-1)).exp(), v))
        del scores  # not kept while the next rows' are written
    return (outputs[0], sums[0]) if len(outputs) == 1 else (torch.cat(outputs, -2), torch.cat(sums, -1))


def gradients(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, lse: torch.Tensor,
    bias: Any, causal: bool, scale: float, of_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Returns gradients of a block's queries, keys and values, and of its scores where that of the bias is wanted.

    gradient, output, lse  those of the whole row, merged over all blocks; the last is wide
    """
    kernel = _fused(q, k, v, bias, causal, scale)
    dtype = wide(q.dtype) if kernel is None or kernel.widens else q.dtype
    gradient, q, k, v, output = (tensor.to(dtype) for tensor in (gradient, q, k, v, output))
    if kernel is not None:
        return *kernel.backward(gradient, q, k, v, output, lse.contiguous(), causal, scale), None
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kept = []
    for rows in _rows(q, k):
        q_rows, g_rows = q[:, :, rows], gradient[:, :, rows]
        scores = _scores(q_rows, k, _of_rows(bias, rows), causal, scale, rows.start)
        # by the whole row's sum, so these are the weights of one softmax over all blocks, computed again
        weights = (scores - finite(lse[:, :, rows]).unsqueeze(-1)).exp()
        del scores
        delta = (g_rows * output[:, :, rows]).sum(-1, keepdim=True)
        of_scores = weights * (torch.matmul(g_rows, v.transpose(-1, -2)) - delta)
        dq[:, :, rows] = torch.matmul(of_scores, k) * scale
        dk += torch.matmul(of_scores.transpose(-1, -2), q_rows) * scale
        dv += torch.matmul(weights.transpose(-1, -2), g_rows)
        kept += [of_scores] if of_bias else []
        del weights, of_scores
    return dq, dk, dv, torch.cat(kept, -2) if kept else None
