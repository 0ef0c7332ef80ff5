"""Attention of one block of queries and keys, for a ring. Forecast in costs/software and rehearsal/gpu_kernels.

It also returns the log-sum-exp of each row's scores, by which blocks are merged. A fused kernel is used if one returns
it (`fused_kernels`), for blocks without a mask and blocks on the diagonal of causal attention. Otherwise the block's
scores (B, H, s, t) are materialised, for as many rows at a time as `MOST_SCORES` allows, and again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.parallel.sequence.fused_kernels import Kernel, kernel_for
from shardwise.parallel.sequence.pair_mask import MaskBlock

MOST_SCORES = 2**26  # elements of scores at a time (256 MiB in float32), unless a single row has more


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which blocks are computed and merged: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Returns the log-sum-exp with 0 in place of infinities (rows that may read nothing), so differences are finite."""
    return torch.where(lse.isinf(), torch.zeros_like(lse), lse)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, causal: bool, scale: float) -> Kernel | None:
    """Returns the fused kernel for a block; None if its scores must be materialised. Arguments as of `attended`."""
    return kernel_for(q, k, v, causal, scale) if bias is None else None


def _rows(q: torch.Tensor, k: torch.Tensor) -> Iterator[slice]:
    """Yields slices of a block's rows whose scores are materialised together; one empty slice for a block of 0 rows."""
    s, step = q.shape[-2], max(1, MOST_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[-2]))
    for first in range(0, s, step) if s else [0]:
        yield slice(first, min(s, first + step))


def _of_rows(bias: Any, rows: slice) -> torch.Tensor | None:
    """Returns the rows of a block's mask or bias, which stays as it is if it is broadcast over rows; None for None."""
    if isinstance(bias, MaskBlock):
        return bias.of_rows(rows)
    return bias if bias is None or bias.dim() < 2 or bias.shape[-2] == 1 else bias[..., rows, :]


def _scores(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float, first: int
) -> torch.Tensor:  # fmt: skip
    """Returns the scores (B, H, s, t) of some rows of a block, with -inf where a key may not be read.

    bias    of these rows, as of `attended`, or None;  causal  as of `attended`
    first   index in the block of the first of these rows
    """
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
    """Returns (output (B, H, s, D), log-sum-exp (B, H, s)) for queries (B, H, s, D), keys and values (B, H, t, D).

    Both are in the dtype `wide(q.dtype)`; the log-sum-exp of a row without keys is infinite.
    bias    bool mask (True: a key may be read) or values added to scores, broadcast to (B, H, s, t); or a `MaskBlock`;
            None: neither
    causal  whether the block lies on the diagonal, so that row i reads columns up to i
    """
    dtype, kernel = wide(q.dtype), _fused(q, k, v, bias, causal, scale)
    if kernel is None or kernel.widens:  # computed in the dtype in which blocks are merged
        q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    if kernel is not None:
        output, lse = kernel.forward(q, k, v, causal, scale)
        return output.to(dtype), lse
    outputs, sums = [], []
    for rows in _rows(q, k):
        scores = _scores(q[:, :, rows], k, _of_rows(bias, rows), causal, scale, rows.start)
        sums.append(torch.logsumexp(scores, -1))
        # `finite`, since a row that may read nothing would have -inf + inf = NaN; so its weights are 0
        outputs.append(torch.matmul((scores - finite(sums[-1]).unsqueeze(-1)).exp(), v))
        del scores  # frees its memory before the next rows' scores
    return (outputs[0], sums[0]) if len(outputs) == 1 else (torch.cat(outputs, -2), torch.cat(sums, -1))


def gradients(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, lse: torch.Tensor,
    bias: Any, causal: bool, scale: float, of_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Returns the gradients of a block's q, k and v, and of its scores (B, H, s, t) if `of_bias`; else None.

    gradient, output, lse   gradient of the output, output, and log-sum-exp of the block's queries over all their blocks
    q, k, v, bias, causal   as of `attended`
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
        # with the log-sum-exp over all blocks, these are the weights of one softmax over all of them
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
