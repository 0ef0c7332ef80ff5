"""Send rows to the ranks that hold their experts, and back, by all-to-alls (all rows at once; overlap would lie here).

    rank 0   pairs by expert |e0 e1|e2 e3|  --counts, then rows-->  rank 0: e0, e1 of all   rank 1: e2, e3 of all

A *pair* is a token and one of the experts chosen for it. Every rank issues the same collectives in the same order
whatever its counts are, a rank without rows too.
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
    """Returns the rows that arrive here by an all-to-all of `sent` rows to, and `received` rows from, each rank."""
    arrived = tensor.new_empty((sum(received), *tensor.shape[1:]))
    if axis.rehearsal is None:
        all_to_all(arrived, tensor.contiguous(), received, sent, axis, tag)
        return arrived
    axis.note(tag, "all_to_all", tensor)
    # in a rehearsal rows may hold anything, but integers are counts: they say how many rows come
    return arrived if tensor.is_floating_point() else _of_all(tensor.split(sent)[axis.index], axis)


def _of_all(counts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Returns, in a rehearsal, the counts that all ranks would send this one: its own, scaled by the ranks' loads."""
    assert axis.rehearsal is not None
    loads = axis.rehearsal.loads or (1,) * axis.size
    mine = loads[axis.index]
    return torch.cat([(2 * counts * load + mine) // (2 * mine) for load in loads])  # rounded to the nearest


class _Exchange(torch.autograd.Function):
    """All-to-all of several tensors at once, so that all ranks come to their gradients in one order."""

    @staticmethod
    def forward(ctx, axis: Axis, sent: list[int], received: list[int], *tensors: torch.Tensor):
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return tuple(_move(tensor, sent, received, axis) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        needed = ctx.needs_input_grad[3:]
        back = [
            _move(plain(gradient), ctx.received, ctx.sent, ctx.axis) if need else None
            for gradient, need in zip(gradients, needed, strict=True)
        ]
        return (None, None, None, *back)


def exchanged(axis: Axis, sent: list[int], received: list[int], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the rows that arrive of each tensor: so many go to (`sent`), come from (`received`), each rank.

    Collective over the axis; differentiable.
    """
    return list(_Exchange.apply(axis, sent, received, *tensors))


def of_own_rows(run: Callable[..., Any], rows: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
    """Returns `run(rows, *beside)` on this rank's share of cut rows, as a part cut as they are.

    Right for whatever treats rows apart. Over other axes (tensor parallelism) all are whole in `run`.
    """
    rows = settled(rows)
    cuts, axes = cuts_of(rows), axes_of(rows)
    with own_rows(axes):  # weights that are read in here get gradients of these rows: summands over the axes
        done = run(apart(rows, cuts, axes), *(
            (apart if tensor.is_floating_point() else share_under)(tensor, cuts, axes) for tensor in beside
        ))  # fmt: skip
    return joined(settled(done), cuts, axes)


def through_owners(
    rows: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, experts: int, axis: Axis, compute: Compute
) -> torch.Tensor:
    """Returns the sum over each token's pairs, every pair computed by the rank that holds its expert.

    rows (T, H), index (T, k) of `experts` in all, weight (T, k) -> (T, H). `compute` gets rows, local experts and
    weights of pairs, one to a row. The three are plain. Collective over the axis; differentiable. Raises
    `RunError` for an expert number outside of [0, experts).
    """
    tokens, k = index.shape
    per_rank = experts // axis.size
    flat = index.reshape(-1).long()
    order = flat.argsort(stable=True)  # by expert, and so by owner
    _require_known(flat, experts)
    counts = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))  # bincount would read the largest
    even = [per_rank] * axis.size
    theirs = _move(counts, even, even, axis, "control")  # by sender, then by expert of this rank
    sums = torch.cat([counts, theirs]).view(2, axis.size, per_rank).sum(-1)
    sent, received = read(sums, "rows for experts")  # both at once: the host waits for the device once
    by_pair = rows.unsqueeze(1).expand(tokens, k, rows.shape[1]).reshape(tokens * k, -1)
    arrived, weights = _Exchange.apply(axis, sent, received, by_pair[order], weight.reshape(-1)[order])
    # of each row that came: its expert, counted from this rank's first; `output_size` spares a wait for the device
    here = torch.arange(per_rank, device=flat.device).repeat(axis.size)
    local = here.repeat_interleave(theirs, output_size=sum(received))
    done = whole(_of_rows(compute, arrived, local.to(index.dtype), weights))  # tp may have cut it
    (back,) = _Exchange.apply(axis, received, sent, done)
    return back[order.argsort()].view(tokens, k, -1).sum(1)  # weighted already: experts were given the weights


def _require_known(chosen: torch.Tensor, experts: int) -> None:
    """Raises `RunError` for a token routed to an expert number outside [0, experts)."""
    exists = (chosen >= 0) & (chosen < experts)

    def error() -> RunError:
        return RunError(f"a token is sent to expert {int(chosen[~exists][0])}, and there are {experts} (from 0)")

    require(exists.all(), error)


def _of_rows(compute: Compute, rows: torch.Tensor, local: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns `compute` of the rows, also where no row came."""
    count = rows.shape[0]
    # on a row of ones of which nothing is kept: backward comes to the same collectives as on the other ranks, and the
    # weights have gradients of zeros
    if count == 0:
        rows = torch.cat([rows, rows.new_ones((1, rows.shape[1]))])
        weights = torch.cat([weights, weights.new_ones(1)])
        local = local.new_zeros(1)
    return compute(rows, local[:, None], weights[:, None])[:count]
