"""Rule of `torch.cdist`: each rank has the distances of its own points, or of its own samples.

x1 (..., P, M)  x2 (..., R, M)   d (..., P, R)          cut along P: a rank's own rows;  along R: its own columns
both P and R cut over positions                         x2 is gathered, and the run says what that costs
gradient of x1 where R alone is cut                     a sum over ranks
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gathered
from shardwise.part.moves import dealt_as
from shardwise.part.sums import Sum
from shardwise.part.tensor import GATHERS, Part, is_part, no_rule, parts_in, rule


def _led(func: Any, x1: Any, x2: Any) -> tuple[Any, Any, Part, int]:
    """Returns (x1, x2, the part whose points or samples are cut, the distances' cut dim, counted from the end)."""
    lead, place = (x1, 0) if is_part(x1) else (x2, 1)
    dim = lead.dim_cut - lead.dim()  # -1 coordinates, -2 points, others samples
    if is_part(x1) and is_part(x2) and dim == -2 == x2.dim_cut - x2.dim() and x2.axis.positions:
        for tell in GATHERS:
            tell("points of which distances are computed", x2)
        x2 = gathered(x2)
    if dim == -1 or (is_part(x1) and is_part(x2) and (dim == -2 or dim != x2.dim_cut - x2.dim())):
        raise Uncut(no_rule(func, parts_in([x1, x2])))
    # of the distances: -2 rows (points of x1), -1 columns (points of x2)
    return x1, x2, lead, dim if dim < -2 else place - 2


def _mine(func: Any, tensor: torch.Tensor, lead: Part, dim: int) -> torch.Tensor:
    """Returns this rank's share along `dim` (< 0), where the tensor has that dim and more than one index of it."""
    if tensor.dim() < -dim or tensor.shape[dim] == 1:
        return tensor
    if is_part(tensor):
        return dealt_as(tensor, lead, tensor.dim() + dim, str(func)).local
    return lead.share(tensor, tensor.dim() + dim)


def _points(func: Any, x1: Any, x2: Any, lead: Part, dim: int) -> list[torch.Tensor]:
    """Returns both sets of points as this rank's kernel reads them."""
    samples = dim < -2
    return [_mine(func, x, lead, dim if samples else -2) if samples or x is lead else x for x in (x1, x2)]


@rule("_cdist_forward", "_euclidean_dist")
def distances(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the distance of each point of the first set to each of the second."""
    x1, x2, *rest = args
    x1, x2, lead, dim = _led(func, x1, x2)
    local = func(*_points(func, x1, x2, lead, dim), *rest)
    return lead.with_local(local, local.dim() + dim)


@rule("_cdist_backward", "_euclidean_dist_backward")
def distances_backward(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns the gradient of the first set."""
    gradient, x1, x2, order, lengths = args
    x1, x2, lead, dim = _led(func, x1, x2)
    mine = [_mine(func, each, lead, dim) for each in (gradient, lengths)]
    x1, x2 = _points(func, x1, x2, lead, dim)
    local = func(mine[0], x1, x2, order, mine[1])
    # each rank has what its own points of x2 add to all of x1
    return Sum.of(local, lead.axis, lead.origin) if dim == -1 else lead.with_local(local, local.dim() + dim)
