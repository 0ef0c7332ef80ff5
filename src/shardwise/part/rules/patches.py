"""`Tensor.unfold`, which makes windows a dim. `F.unfold` and `F.fold` of tiles: rare. Boundaries: boundary.py.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.labels import label, rearranged
from shardwise.part.tensor import Part, no_rule, rule
from shardwise.part.tiles.maps import Sliding
from shardwise.part.tiles.windows import answers, cuts, windowed

label("unfold")(rearranged)


@rule("unfold")
def windows(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `x.unfold(dim, size, step)` along a dim that is not cut."""
    part, dim = args[0], args[1] % args[0].dim()
    if dim == part.dim_cut:
        raise Uncut(no_rule(func, [part]))
    return part.with_local(func(part.local, dim, *args[2:]))


@rule("unfold_backward")
def windows_backward(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the gradient of x of `x.unfold(...)`, for each index the sum over the windows that contain it."""
    part, sizes, *rest = args
    own = [part.local.shape[d] if d == part.dim_cut else n for d, n in enumerate(sizes)]
    return part.with_local(func(part.local, own, *rest))


@answers(torch.Tensor.unfold)
def sliding(input: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """Returns (…, windows, …, size), `input.unfold(dimension, size, step)` of a tensor of which any dim may be cut."""
    dim = dimension % input.dim()
    cut_dims = cuts(input, range(input.dim()))
    if not cut_dims:
        return input.unfold(dim, size, step)
    if size > input.shape[dim]:
        raise RuntimeError(f"unfold: windows of {size} along dim {dim} of {tuple(input.shape)}")
    along = {dim: Sliding((input.shape[dim] - size) // step + 1, size, step)}
    # windows are views: what is written into one is written into a copy, not into the tile
    return windowed(input, along, cut_dims, lambda window: window.unfold(dim, size, step), views=True)
