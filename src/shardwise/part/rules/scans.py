"""Scans, along a cut dim too (`SUMS`, `EXTREMES`: cumsum, cummax): a new one is a row there.

    positions   0 1 2 | 3 4 | 5 6 7          runs, each on one rank
    local       the scan of each run
    sent        the last of each run, to all ranks (one all-reduce of (runs, ...), two of extremes: values and places)
    result      the scan of what all runs before came to, put to each

Every gated linear recurrence h_t = a_t h_(t-1) + b_t that is written with running sums (of log a, and of b divided by
the running product) goes this way; its state crosses ranks as a total. Backward of sums is made of the same operations,
on tensors turned round, and of extremes it adds each gradient where its value was found. Of products it is written
here, since torch's own is a loop over positions where a tensor is none of its own:

    y_j = x_0 ... x_j            dx_k = sum of dy_j y_j / x_k for j >= k             before the first zero
                                 dx_k = sum of dy_j y'_j for j >= k                  at it: y' with a 1 in its place
                                 dx_k = 0                                            behind it

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
from shardwise.part.sums import all_sum
from shardwise.part.tensor import FUNCTIONS, Part, facts, is_part, no_rule, rule

MOST_RUNS = 256  # what each comes to is sent to all
Scanned = tuple[torch.Tensor, ...]  # values; of extremes, and their places
SUMS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {  # a scan, and two put together
    "aten::cumsum": (torch.cumsum, torch.add),
    "aten::cumprod": (torch.cumprod, torch.mul),
    "aten::logcumsumexp": (torch.logcumsumexp, torch.logaddexp),
}
EXTREMES = {"aten::cummax": (torch.cummax, torch.ge), "aten::cummin": (torch.cummin, torch.le)}


def along_cut(func: Any, part: Part, dims: set[int], keepdim: bool, arguments: dict[str, Any]) -> Any:
    """Returns the scan of floating-point positions along the dim that is cut. Collective."""
    if not part.axis.positions or not part.is_floating_point() or len(part.owners.who) > MOST_RUNS:
        raise Uncut(no_rule(func, [part]))
    return scanned(func, whole_inside(part), arguments.get("dtype"))


def run_lengths(part: Part) -> list[tuple[int, int]]:
    """Returns (rank, length) of each run of the cut dim, in order."""
    stops = part.owners.stops.tolist()
    return [(int(who), stop - start) for who, start, stop in zip(part.owners.who, [0, *stops], stops, strict=False)]


def scanned(func: Any, part: Part, dtype: torch.dtype | None) -> Part | tuple[Part, ...]:
    """Returns the scan of a part along the dim that is cut. Collective."""
    dim, me, runs = part.dim_cut, part.axis.index, run_lengths(part)
    local = part.local.settled() if isinstance(part.local, Distributed) else part.local
    local = local if dtype is None else local.to(dtype)
    name = func._schema.name
    nothing = _within(name, local.narrow(dim, 0, 0), dim, 0)
    pieces: list[Scanned | None] = []
    lasts, place, start = [], 0, 0
    absent = tuple(empty.sum(dim, keepdim=True, dtype=empty.dtype) for empty in nothing)  # zeros, shaped as a last
    for rank, length in runs:
        piece = _within(name, local.narrow(dim, place, length), dim, start) if rank == me else None
        place, start = place + (length if rank == me else 0), start + length
        lasts.append(absent if piece is None else tuple(scan.narrow(dim, length - 1, 1) for scan in piece))
        pieces.append(piece)
    # each run's last from its owner, zeros from the others: their sum over ranks is what all runs came to
    if len(runs) > 1:
        totals = [all_sum(torch.cat(tensors, dim), part.axis) for tensors in zip(*lasts, strict=True)]
        carried = _carried(name, totals, dim)
        pieces = [
            piece
            if piece is None or not run
            else _put_to(name, tuple(c.narrow(dim, run - 1, 1) for c in carried), piece)
            for run, piece in enumerate(pieces)
        ]
    own_pieces = [piece for piece in pieces if piece is not None] or [nothing]
    output = tuple(part.with_local(torch.cat(tensors, dim)) for tensors in zip(*own_pieces, strict=True))
    return output if name in EXTREMES else output[0]


def _within(name: str, run: torch.Tensor, dim: int, start: int) -> Scanned:
    """Returns the scan of one run, whose first position is index `start` of the whole dim."""
    if name in SUMS:
        return (SUMS[name][0](run, dim),)
    values, places = EXTREMES[name][0](run, dim)
    return values, places + start


def _carried(name: str, lasts: list[torch.Tensor], dim: int) -> Scanned:
    """Returns the scan over runs of each run's last entry."""
    if name in SUMS:
        return (SUMS[name][0](lasts[0], dim),)
    values, run = EXTREMES[name][0](lasts[0], dim)
    return values, lasts[1].gather(dim, run)


def _put_to(name: str, before: Scanned, run: Scanned) -> Scanned:
    """Returns the scan of a run, with the total of the runs before put in."""
    if name in SUMS:
        return (SUMS[name][1](before[0], run[0]),)
    own = EXTREMES[name][1](run[0], before[0]) | run[0].isnan()  # as torch has it: the later of equal ones, any NaN
    return torch.where(own, run[0], before[0]), torch.where(own, run[1], before[1])


class _Product(torch.autograd.Function):
    """A running product, whose gradient is made of running sums and one more running product."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, dim: int) -> torch.Tensor:
        y = torch.ops.aten.cumprod.default(x.detach(), dim)
        ctx.save_for_backward(x, y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        (x, y), dim = ctx.saved_tensors, ctx.dim
        zero = x == 0
        zeros = zero.to(x.dtype).cumsum(dim)
        # where no zero has been met, and the first one itself; behind it everything is a product with a zero
        before, first = zeros == 0, zero & (zeros == 1)
        quotients = _from_here(gradient * y, dim) / x.masked_fill(~before, 1)
        others = _from_here(gradient * x.masked_fill(first, 1).cumprod(dim), dim)
        nothing = torch.zeros_like(x)
        return torch.where(before, quotients, torch.where(first, others, nothing)), None


def _from_here(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns, at each position, the sum of it and all behind it."""
    return x.flip(dim).cumsum(dim).flip(dim)


def running_product(input: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    """Returns `input.cumprod(dim)` of a part."""
    if not is_part(input) or not input.dim() or kwargs or input.is_complex():
        return torch.cumprod(input, dim, dtype=dtype, **kwargs)
    x = input if dtype is None else input.to(dtype)
    # integers have no gradient
    if not x.is_floating_point():
        return torch.cumprod(input, dim, dtype=dtype)
    return _Product.apply(x, dim % x.dim())


FUNCTIONS[torch.cumprod] = FUNCTIONS[torch.Tensor.cumprod] = running_product
over(*(name.removeprefix("aten::") for name in (*SUMS, *EXTREMES)), along=along_cut)


@rule("cumsum_", "cumprod_")
def scan_in_place(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns x, into which its scan is written."""
    return args[0].copy_(facts(func).apart(*args, **kwargs))
