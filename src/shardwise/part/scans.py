"""Running sums along cut positions, of exponentials too: each run of positions by itself, and what went before added.

    positions   0 1 2 | 3 4 | 5 6 7          runs, each on one rank
    local       running sums of each run
    sent        the total of each run, to all ranks (one all-reduce of (runs, ...))
    result      + the totals of all runs before

Every gated linear recurrence h_t = a_t h_(t-1) + b_t that is written with running sums (of log a, and of b divided by
the running product) goes this way; its state crosses ranks as a total. Backward is made of the same operations, on
tensors turned round. Source: Blelloch, "Prefix sums and their applications" (1990).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardwise.part.gathering import all_sum
from shardwise.part.levels import Distributed
from shardwise.part.tensor import Part

MOST_RUNS = 256  # totals of all are sent to all


class Scan(NamedTuple):
    """A running sum: within a run, the total of one or of several (of none: what adds nothing), and two added."""

    within: Callable[..., torch.Tensor]
    total: Callable[..., torch.Tensor]
    added: Callable[..., torch.Tensor]


SCANS = {
    "aten::cumsum": Scan(torch.cumsum, torch.sum, torch.add),
    "aten::logcumsumexp": Scan(torch.logcumsumexp, torch.logsumexp, torch.logaddexp),
}


def summed_along(func: Any, part: Part, args: tuple, kwargs: dict) -> bool:
    """Whether an operation is a running sum of floating-point positions that `cumulated` gives."""
    few = len(part.owners.who) <= MOST_RUNS
    return func._schema.name in SCANS and part.axis.positions and part.is_floating_point() and few and not kwargs


def run_lengths(part: Part) -> list[tuple[int, int]]:
    """Returns (rank, length) of each run of the cut dim, in order."""
    stops = part.owners.stops.tolist()
    return [(int(who), stop - start) for who, start, stop in zip(part.owners.who, [0, *stops], stops, strict=False)]


def cumulated(func: Any, part: Part) -> Part:
    """Returns the running sum of a part along the dim that is cut. Collective."""
    scan = SCANS[func._schema.name]
    dim, me, runs = part.dim_cut, part.axis.index, run_lengths(part)
    local = part.local.settled() if isinstance(part.local, Distributed) else part.local
    if not runs:  # of nothing, as a mask may have selected
        return part.with_local(local.clone())
    pieces, totals, place = [], [], 0
    nothing = local.narrow(dim, 0, 0).sum(dim, keepdim=True)  # zeros, of a total's shape
    for rank, length in runs:
        mine = local.narrow(dim, place, length) if rank == me else None
        place += length if mine is not None else 0
        totals.append(nothing if mine is None else scan.total(mine, dim, keepdim=True))
        pieces.append(mine)
    table = all_sum(torch.cat(totals, dim), part.axis)
    found = [
        scan.added(scan.within(mine, dim), scan.total(table.narrow(dim, 0, run), dim, keepdim=True))
        for run, mine in enumerate(pieces)
        if mine is not None
    ]
    return part.with_local(torch.cat(found, dim) if found else local.clone())
