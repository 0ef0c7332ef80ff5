"""Scans along a cut dim: running sums on shares (to add one: an entry of `SUMS`), others on the gathered tensor.

    positions   0 1 2 | 3 4 | 5 6 7          runs, each on one rank
    local       the scan of each run
    sent        the last value of each run, to all ranks (one all-reduce of (runs, ...))
    result      the scan of the last values of all runs in front, combined with each run's own scan

Every gated linear recurrence h_t = a_t h_(t-1) + b_t that is written with running sums (of log a, and of b divided by
the running product) goes this way; its state crosses ranks as a run's last value. Backward is made of the same
operations, on flipped tensors.
Source: Blelloch, "Prefix sums and their applications" (1990).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.dimwise import over
from shardwise.part.levels import Distributed
from shardwise.part.moves import whole_inside
from shardwise.part.rules.reductions import _wide
from shardwise.part.sums import all_sum
from shardwise.part.tensor import Part, facts, no_rule, rule
from shardwise.part.tiles.entire import whole_without_rule

MOST_RUNS = 256  # runs of a cut dim, since the last value of each is sent to all ranks
# ATen name -> (the scan, the operation that combines two of its values)
SUMS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "cumsum": (torch.cumsum, torch.add),
    "logcumsumexp": (torch.logcumsumexp, torch.logaddexp),
}
_OTHERS = ("cumprod", "cummax", "cummin")


def along_cut(func: Any, part: Part, dims: set[int], keepdim: bool, arguments: dict[str, Any]) -> Any:
    """Returns the scan of floating-point positions along the dim that is cut. Collective.

    Raises `Uncut` for other dtypes, for an axis of weights, and if the cut dim consists of more than `MOST_RUNS` runs.
    """
    if not part.axis.positions or not part.is_floating_point() or len(part.owners.who) > MOST_RUNS:
        raise Uncut(no_rule(func, [part]))
    return scanned(func, whole_inside(part), arguments.get("dtype"))


def run_lengths(part: Part) -> list[tuple[int, int]]:
    """Returns (rank, length) of each run of the cut dim, in order."""
    stops = part.owners.stops.tolist()
    return [(int(who), stop - start) for who, start, stop in zip(part.owners.who, [0, *stops], stops, strict=False)]


def scanned(func: Any, part: Part, dtype: torch.dtype | None) -> Part:
    """Returns the scan `func` (of `SUMS`) of a part along its cut dim, in `dtype` (None: its own). Collective."""
    asked = dtype or part.dtype
    dim, me, runs, (scan, together) = part.dim_cut, part.axis.index, run_lengths(part), SUMS[facts(func).name]
    local = part.local.settled() if isinstance(part.local, Distributed) else part.local
    local = local.to(_wide(asked))  # of 16 bits in 32, as torch does: a run may overflow where the next takes it back
    nothing = scan(local.narrow(dim, 0, 0), dim)
    absent = nothing.sum(dim, keepdim=True, dtype=nothing.dtype)  # zeros, shaped as a last
    pieces: list[torch.Tensor | None] = []
    lasts, place = [], 0
    for rank, length in runs:
        piece = scan(local.narrow(dim, place, length), dim) if rank == me else None
        place += length if rank == me else 0
        lasts.append(absent if piece is None else piece.narrow(dim, length - 1, 1))
        pieces.append(piece)
    # each run's last from its owner, zeros from the others: their sum over ranks is what all runs came to
    if len(runs) > 1:
        carried = scan(all_sum(torch.cat(lasts, dim), part.axis), dim)
        pieces = [
            piece if piece is None or not run else together(carried.narrow(dim, run - 1, 1), piece)
            for run, piece in enumerate(pieces)
        ]
    return part.with_local(torch.cat([piece for piece in pieces if piece is not None] or [nothing], dim).to(asked))


over(*SUMS, along=along_cut)
over(*_OTHERS)
whole_without_rule(*_OTHERS)  # above autograd, whose backward of a product is a loop over positions


@rule("cumsum_", "cumprod_")
def scan_in_place(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns x after an in-place scan (`cumsum_`)."""
    return args[0].copy_(facts(func).apart(*args, **kwargs))
