"""Flips, rolls and quarter turns: along the cut dim each rank fetches the indices that its own ones show."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.dimwise import over
from shardwise.part.exchanges import fetch, shown
from shardwise.part.moves import whole_inside
from shardwise.part.tensor import Part, no_rule
from shardwise.part.tiles.entire import whole_without_rule


def reordered(func: Any, part: Part, dims: set[int], keepdim: bool, arguments: dict[str, Any]) -> Part:
    """Returns `flip(x, dims)` or `roll(x, shifts, dims)` of positions, dealt as x. Collective."""
    listed, rolls = [d % part.dim() for d in arguments["dims"]], func._schema.name == "aten::roll"
    shifts = arguments["shifts"] if rolls else [0] * len(listed)
    if not part.axis.positions or len(listed) != len(shifts):  # without dims torch rolls the flattened tensor
        raise Uncut(f"{no_rule(func, [part])}{' flattened' * (not listed)}")
    part = whole_inside(part)  # indices are fetched over one axis
    n, local = part.shape[part.dim_cut], part.local
    for dim, shift in zip(listed, shifts, strict=True):
        if dim == part.dim_cut:
            source = tuple((j - shift) % n if rolls else n - 1 - j for j in range(n))
            local = fetch(part.with_local(local), shown(part.owners, source))
        else:
            local = torch.roll(local, shift, dim) if rolls else local.flip(dim)
    return part.with_local(local)


over("flip", "roll", along=reordered)
whole_without_rule("rot90")
