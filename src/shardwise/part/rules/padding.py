"""Padding, flips, rolls: each rank fetches the indices that its share of the result shows. Boundaries: boundary.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.host import to_device
from shardwise.part.cuts import REMEMBERED, Uncut
from shardwise.part.dimwise import over
from shardwise.part.exchanges import fetch, shown
from shardwise.part.moves import whole_inside
from shardwise.part.tensor import Part, no_rule
from shardwise.part.tiles.entire import whole_without_rule
from shardwise.part.tiles.maps import owners_after
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import answers, cuts, fetched, opened, placed

# widths come in pairs, the last dim's first; a dim that is not padded keeps its indices apart
over("constant_pad_nd", dims=lambda x, given: [x.dim() - 1 - at // 2 for at, width in enumerate(given["pad"]) if width])


@answers(F.pad, torch._C._nn.pad)
def pad(
    input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns `F.pad` of a tensor of which any dim may be cut, in any of torch's modes."""
    # by dim, (front, behind): torch counts pairs from the last dim; what is popped below is padded by a fetch
    widths = {input.dim() - 1 - place: (pad[2 * place], pad[2 * place + 1]) for place in range(len(pad) // 2)}
    found = cuts(input, range(input.dim()))
    if not found:
        return F.pad(input, list(pad), mode, value)
    after, fill = [], float(value or 0.0)
    for cut in found:
        n, (front, behind) = cut.owners.size, widths.pop(cut.dim, (0, 0))
        if not front and not behind:  # nothing is padded along this dim: its tile stays as it is
            input = opened(input, [cut])
            after.append(cut)
            continue
        owners = owners_after(cut.owners, n + front + behind, np.arange(-front, n + behind))
        input = fetched(input, cut, shown(owners, _source(n, front, behind, mode)), fill)
        after.append(CutDim(cut.axis, cut.dim, owners))
    return placed(_locally(input, widths, len(pad), mode, value), after)


def _locally(
    tile: torch.Tensor, widths: dict[int, tuple[int, int]], length: int, mode: str, value: float | None
) -> torch.Tensor:  # fmt: skip
    """Returns a tile padded along dims that are not cut.

    widths  dim -> (front, behind);  length  of the list that the user gave `F.pad`
    """
    if not any(map(any, widths.values())):
        return tile
    if tile.numel() or mode == "constant":  # a list as long as the user's: modes take only as many pairs as they know
        return F.pad(tile, [n for dim in reversed(range(tile.dim())) for n in widths.get(dim, (0, 0))][:length],
                     mode, value)  # fmt: skip
    for dim, width in widths.items():  # kernels take no empty tiles
        source = to_device(torch.tensor(_source(tile.shape[dim], *width, mode)), tile.device)
        tile = tile.index_select(dim, source)
    return tile


@lru_cache(REMEMBERED)
def _source(n: int, before: int, after: int, mode: str) -> tuple[int, ...]:
    """Returns, for each of the n + before + after padded indices, the index that it shows.

    An index outside 0..n-1 stands for the constant. Raises `RuntimeError` for widths that torch refuses.
    """
    places = np.arange(-before, n + after)
    # negative padding cuts off: torch refuses less than nothing, and so must this
    if n + before + after < 0:
        raise RuntimeError(f"padding {n} indices by ({before}, {after}) leaves less than nothing")
    most = {"circular": n, "reflect": n - 1}.get(mode)
    # torch's own limit: a mirrored index would fall outside the field again
    if most is not None and max(before, after) > most:
        raise RuntimeError(f"{mode} padding by ({before}, {after}) of a dim of {n}: at most {most} on either side")
    if mode == "circular":
        # what is cut off is gone before the rest is wrapped around
        kept = np.arange(max(0, -before), n - max(0, -after))
        places = kept[np.arange(-max(before, 0), len(kept) + max(after, 0)) % max(len(kept), 1)]
    elif mode == "reflect":
        # first the front, then the back, each mirrored at the edge without repeating it
        places = np.where(places < 0, -places, places)
        places = np.where(places >= n, 2 * (n - 1) - places, places)
    elif mode == "replicate":
        places = np.clip(places, 0, n - 1)
    # for "constant" indices outside stay as they are: they show the fill value
    elif mode != "constant":
        raise Uncut(f"F.pad(mode={mode!r}) is not known on tiles: constant, circular, reflect or replicate")
    return tuple(int(place) for place in places)


def reordered(func: Any, part: Part, dims: set[int], keepdim: bool, arguments: dict[str, Any]) -> Part:
    """Returns `flip(x, dims)` or `roll(x, shifts, dims)` of cut positions, cut as x is. Collective.

    Raises `Uncut` for a cut over weights, and for a roll of the flattened tensor.
    """
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
