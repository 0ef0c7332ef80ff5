"""Tell whether a script that goes over its samples one by one, or by pieces, goes over all of them. Part of more's.

    for e in errors: ...               all rows, of a rank's part as of all
    for e in errors.unbind()[:k]: ...  all that a rank has, where it has k; in an uneven part of k + 1 one is left out

Such operations are as many as there are samples, so they cannot be computed again on more of them. But the rows or
pieces that the loss takes no part of are known, and a number of them that no value was read for is a fixed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.scripts.repeated import Repeated
from shardwise.scripts.tape import SELECTS, Operation, tensors_in


@dataclass(frozen=True)
class Gone:
    """Whether rows or pieces of samples were taken one by one; and whether some were left out."""

    over: bool = False
    left: bool = False


def gone_over(way: Repeated, wanted: list[Any], values: dict[int, torch.Tensor]) -> Gone:
    """Returns how `wanted` takes rows of samples.

    values  by id, what it is computed from, with as many samples as `way` repeats them to
    """
    needed = way.tape.needed(wanted, set(values))
    used = {id(one) for operation in needed for one in tensors_in((operation.args, operation.kwargs))}
    used |= {id(one) for one in tensors_in(wanted)}
    taken: dict[int, tuple[torch.Tensor, int, set[int]]] = {}
    for one in needed:
        found = _taken(one, way.samples, used)
        if found is not None:
            tensor, pieces, places = found
            taken.setdefault(id(tensor), (tensor, pieces, set()))[2].update(places)
    grown = [(pieces, places) for tensor, pieces, places in taken.values() if _grows(way, tensor, values)]
    return Gone(bool(grown), any(len(places) < pieces for pieces, places in grown))


def _taken(one: Operation, samples: int, used: set[int]) -> tuple[torch.Tensor, int, set[int]] | None:
    """The tensor that an operation takes rows or pieces of, how many those are, and which are used."""
    of = one.args[0] if one.args else None
    if not (isinstance(of, torch.Tensor) and of.dim() and of.shape[0] == samples):
        return None
    output = one.output
    if isinstance(output, tuple | list):
        pieces = tensors_in(output)
        if len(pieces) != len(output) or sum(1 if one.dim() < of.dim() else one.shape[0] for one in pieces) != samples:
            return None
        if any(one.shape[one.dim() - of.dim() + 1 :] != of.shape[1:] for one in pieces):
            return None
        return of, len(pieces), {at for at, piece in enumerate(pieces) if id(piece) in used}
    at = one.args[1] if len(one.args) > 1 and getattr(one.function, "__name__", "") in SELECTS else None
    at = at[0] if isinstance(at, tuple) and at else at
    if type(at) is int and isinstance(output, torch.Tensor) and output.dim() < of.dim():
        return of, samples, {at % samples}
    return None


def _grows(way: Repeated, tensor: torch.Tensor, values: dict[int, torch.Tensor]) -> bool:
    """Whether there are more of a tensor's rows where there are more samples."""
    try:
        (again,) = way.again([tensor], values)
    except (RuntimeError, IndexError, ValueError):
        return False
    return again.dim() > 0 and again.shape[0] * way.samples == tensor.shape[0] * way.total
