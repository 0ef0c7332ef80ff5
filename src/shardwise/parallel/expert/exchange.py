"""Send token rows to the ranks that hold their experts, and results back, by all-to-alls, all rows at once.

    rank 0   pairs by expert |e0 e1|e2 e3|  --counts, then rows-->  rank 0: all pairs of e0, e1   rank 1: of e2, e3

A *pair* is a token and one of the experts chosen for it. Every rank issues the same collectives in the same order,
whatever its counts are, even without rows.

What this does not do: overlap the exchange with computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm import Axis, all_to_all
from shardwise.errors import RunError
from shardwise.host import read, require
from shardwise.part import plain, whole
from shardwise.part.crossing import apart, axes_of, cuts_of, joined, settled, share_under
from shardwise.part.parameters import own_rows

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]  # rows (R, H), experts and weights (R, 1) -> (R, H)


def _move(tensor: torch.Tensor, sent: list[int], received: list[int], axis: Axis, tag: str = "experts") -> torch.Tensor:
    """Returns the rows (sum(received), ...) that an all-to-all brings to this rank.

    sent, received  number of rows to and from each rank of `axis`;  tag  its name in records of messages
    """
    arrived = tensor.new_empty((sum(received), *tensor.shape[1:]))
    if axis.rehearsal is None:
        all_to_all(arrived, tensor.contiguous(), received, sent, axis, tag)
        return arrived
    axis.note(tag, "all_to_all", tensor)
    # in a rehearsal the values of rows do not matter, but integers are counts that decide how many rows arrive
    return arrived if tensor.is_floating_point() else _of_all(tensor.split(sent)[axis.index], axis)


def _of_all(counts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Returns, in a rehearsal, the counts (ranks * n,) that all ranks would send this one.

    counts  (n,) what this rank sends to itself; each rank's are these, scaled by that rank's load over this one's
    """
    assert axis.rehearsal is not None
    loads = axis.rehearsal.loads or (1,) * axis.size
    mine = loads[axis.index]
    return torch.cat([(2 * counts * load + mine) // (2 * mine) for load in loads])  # rounded to the nearest


class _Exchange(torch.autograd.Function):
    """All-to-alls of several tensors as one node, so that all ranks exchange the gradients in the same order."""

    @staticmethod
    def forward(ctx, axis: Axis, sent: list[int], received: list[int], *tensors: torch.Tensor):
        """Returns the rows of each tensor that arrive here; see `exchanged`."""
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return tuple(_move(tensor, sent, received, axis) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        """Returns None for the three first arguments, and each tensor's gradient, sent back; None if not needed."""
        needed = ctx.needs_input_grad[3:]
        back = [
            _move(plain(gradient), ctx.received, ctx.sent, ctx.axis) if need else None
            for gradient, need in zip(gradients, needed, strict=True)
        ]
        return (None, None, None, *back)


def exchanged(axis: Axis, sent: list[int], received: list[int], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns, for each tensor (sum(sent), ...), the rows (sum(received), ...) that arrive on this rank.

    sent, received  number of rows to and from each rank
    Collective over the axis; differentiable.
    """
    return list(_Exchange.apply(axis, sent, received, *tensors))


def of_own_rows(run: Callable[..., Any], rows: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
    """Returns `run(rows, *beside)`, computed on this rank's share of the rows, as a tensor cut as `rows` is.

    beside  other tensors with one entry for each row
    Correct for any `run` that treats rows independently. If positions are not cut, `run` gets the whole tensors.
    """
    rows = settled(rows)
    cuts, axes = cuts_of(rows), axes_of(rows)
    with own_rows(axes):  # gradients of weights read in here are of these rows alone, so summands over the axes
        done = run(apart(rows, cuts, axes), *(
            (apart if tensor.is_floating_point() else share_under)(tensor, cuts, axes) for tensor in beside
        ))  # fmt: skip
    return joined(settled(done), cuts, axes)


def through_owners(
    rows: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, experts: int, axis: Axis, compute: Compute
) -> torch.Tensor:
    """Returns (T, H), for each token the sum over its pairs, each computed by the rank that holds the pair's expert.

    rows     (T, H) this rank's tokens;  index, weight  (T, k) each token's experts in [0, experts), and their weights
    compute  called with (rows (R, H), experts (R, 1) counted from this rank's first, weights (R, 1)) -> (R, H) weighted
    The tensors are plain. Collective over the axis; differentiable. Raises `RunError` for an index out of range.
    """
    tokens, k = index.shape
    per_rank = experts // axis.size
    flat = index.reshape(-1).long()
    order = flat.argsort(stable=True)  # by expert, and so by owner
    _require_known(flat, experts)
    # pairs of each expert; `bincount` would make the host wait, to read the largest index
    counts = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
    even = [per_rank] * axis.size
    theirs = _move(counts, even, even, axis, "control")  # by sender, then by expert of this rank
    sums = torch.cat([counts, theirs]).view(2, axis.size, per_rank).sum(-1)
    sent, received = read(sums, "rows for experts")  # in one read, so that the host waits for the device once
    by_pair = rows.unsqueeze(1).expand(tokens, k, rows.shape[1]).reshape(tokens * k, -1)
    arrived, weights = _Exchange.apply(axis, sent, received, by_pair[order], weight.reshape(-1)[order])
    # each arrived row's expert, counted from this rank's first; `output_size` spares a wait for the device
    here = torch.arange(per_rank, device=flat.device).repeat(axis.size)
    local = here.repeat_interleave(theirs, output_size=sum(received))
    done = whole(_of_rows(compute, arrived, local.to(index.dtype), weights))  # under tp the result may be sharded
    (back,) = _Exchange.apply(axis, received, sent, done)
    return back[order.argsort()].view(tokens, k, -1).sum(1)  # `compute` has applied the weights


def _require_known(chosen: torch.Tensor, experts: int) -> None:
    """Raises `RunError` if an expert index in `chosen` is outside [0, experts); a GPU asserts it later instead."""
    exists = (chosen >= 0) & (chosen < experts)

    def error() -> RunError:
        return RunError(f"a token is sent to expert {int(chosen[~exists][0])}, and there are {experts} (from 0)")

    require(exists.all(), error)


def _of_rows(compute: Compute, rows: torch.Tensor, local: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns `compute` of rows (R, H), local experts (R,) and weights (R,); without rows it runs on a dummy row."""
    count = rows.shape[0]
    # a row of ones, of which the result is dropped, so that backward reaches the same collectives as on other ranks
    # and the experts' weights get gradients of zeros
    if count == 0:
        rows = torch.cat([rows, rows.new_ones((1, rows.shape[1]))])
        weights = torch.cat([weights, weights.new_ones(1)])
        local = local.new_zeros(1)
    return compute(rows, local[:, None], weights[:, None])[:count]
