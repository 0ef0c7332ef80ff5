"""Numbers of whole tensors from this rank's pieces of them, for a script that asks `optimizer.param_groups`.

    p.grad.norm()     sum over ranks of |piece|^2, then its root
    unscale_          of a GradScaler: pieces are divided, and what is not finite on one rank is so on all

Every rank comes to them in one order: groups list a piece of each parameter, on some ranks without elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Gather = Callable[[Sequence[float]], list[list[float]]]  # a row of numbers -> the rows of all ranks. Collective
_UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
_NORMS = {"norm": "p", "vector_norm": "ord", "linalg_vector_norm": "ord"}


def answered(name: str, args: tuple, kwargs: dict, gather: Gather) -> Any:
    """Returns what a function of pieces is of the whole tensors; `NotImplemented` where it is no such number."""
    if name == _UNSCALES:
        pieces, found, inverse = (*args, *kwargs.values())
        return _unscaled(pieces, found, inverse, gather)
    if name == "_foreach_norm":
        tensors, order = list(args[0]), _order(args[1] if len(args) > 1 else kwargs.get("ord", 2))
        return NotImplemented if order is None else _norms(tensors, order, gather)
    if name in _NORMS:
        order = _order(args[1] if len(args) > 1 else kwargs.get(_NORMS[name], 2))
        more = any(value not in (None, False) for value in (*args[2:], kwargs.get("dim"), kwargs.get("keepdim")))
        return NotImplemented if order is None or more else _norms([args[0]], order, gather)[0]
    if name in ("dot", "vdot", "inner") and len(args) == 2:
        return _number(args[0], _column(gather([_sum(args[0] * args[1])]), sum))
    if len(args) != 1 or kwargs:
        return NotImplemented
    piece: torch.Tensor = args[0]
    if name == "sum":
        return _number(piece, _column(gather([_sum(piece)]), sum))
    if name == "mean":
        rows = gather([_sum(piece), float(piece.numel())])
        return _number(piece, _column(rows, sum) / _column(rows, sum, 1))
    if name in ("any", "max", "amax"):
        return _number(piece, _column(gather([float(piece.max()) if piece.numel() else -math.inf]), max))
    if name in ("all", "min", "amin"):
        return _number(piece, _column(gather([float(piece.min()) if piece.numel() else math.inf]), min))
    return NotImplemented


def _order(given: Any) -> float | None:
    given = 2.0 if given in (None, "fro") else given
    return float(given) if isinstance(given, int | float) and given > 0 else None


def _norms(pieces: list[torch.Tensor], order: float, gather: Gather) -> list[torch.Tensor]:
    """The norms of several tensors; one exchange."""
    whole = math.isinf(order)

    def part(piece: torch.Tensor) -> float:
        sizes = piece.detach().abs().double()
        return 0.0 if not piece.numel() else float(sizes.max() if whole else sizes.pow(order).sum())

    rows = gather([part(piece) for piece in pieces])
    totals = [_column(rows, max if whole else sum, at) for at in range(len(pieces))]
    return [
        _number(piece, total if whole else total ** (1 / order)) for piece, total in zip(pieces, totals, strict=True)
    ]


def _unscaled(pieces: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor, gather: Gather) -> None:
    mine = [piece for piece in pieces if piece.numel()]
    if mine:
        torch._amp_foreach_non_finite_check_and_unscale_(mine, found, inverse)
    found.fill_(_column(gather([float(found)]), max))


def _sum(piece: torch.Tensor) -> float:
    return float(piece.detach().double().sum())


def _column(rows: list[list[float]], merge: Callable[[list[float]], float], at: int = 0) -> float:
    values = [row[at] for row in rows]
    return math.nan if any(map(math.isnan, values)) else float(merge(values))  # Python's max may pass over one


def _number(like: torch.Tensor, value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=like.dtype, device=like.device)
