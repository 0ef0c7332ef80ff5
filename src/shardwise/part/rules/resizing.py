"""Resizing of tiles: interpolation (bicubic and antialiased ones on the gathered field), pixel and channel shuffles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.boundary import each
from shardwise.device import on_host
from shardwise.part.cuts import repeated
from shardwise.part.rules.resize_tables import Table, applied, entries, opened_for
from shardwise.part.tiles.entire import apart, in_front, of_all
from shardwise.part.tiles.maps import Sliding
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import answers, cuts, opened, placed, windowed

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}  # by the number of spatial dims
_interpolated_whole = of_all(F.interpolate)


@answers(F.interpolate)
def interpolate(
    input: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Returns `F.interpolate` of a tensor of which any spatial dim may be cut, computed one dim after the other."""
    dims = input.dim() - 2
    cut_dims = cuts(input, range(2, input.dim()))
    if not cut_dims:
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    options = size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    linear = mode != "nearest"
    # on the gathered field: filters that read many inputs for each output, modes that round indices in other ways, and
    # bytes, which torch interpolates with integer weights
    if antialias or (linear and not input.is_floating_point()) or mode not in ("nearest", _LINEAR.get(dims)):
        return _interpolated_whole(input, *options)
    sizes, scales = _sizes(input.shape[2:], size, scale_factor, not recompute_scale_factor)
    if min(sizes) < 1:
        raise RuntimeError(f"interpolate of {tuple(input.shape)} to {sizes}: sizes must be positive")
    # one rounding at the end for 16-bit fields, not one for each dim
    wide = torch.promote_types(input.dtype, torch.float32) if input.is_floating_point() else input.dtype
    double, host = wide is torch.float64, on_host(input.device)
    # linear kernels copy what keeps its size, whatever the factor: a CPU's by dim, others where all dims keep theirs
    copied = linear and (host or sizes == list(input.shape[2:]))
    tables = [Table(n, m, linear, bool(align_corners), None if copied and n == m else s, double, host)
              for n, m, s in zip(input.shape[2:], sizes, scales, strict=True)]  # fmt: skip
    # "nearest" rounds otherwise in backward: its gradient would go to inputs that this rank did not fetch
    if not all(table.one_way for table in tables):
        return _interpolated_whole(input, *options)
    return _along_each(input.to(wide), cut_dims, tables).to(input.dtype)


def _sizes(
    space: Sequence[int], size: Any, scale_factor: Any, by_factor: bool
) -> tuple[list[int], list[float | None]]:  # fmt: skip
    """Returns (size of the result along each spatial dim, for each the factor by which kernels compute indices).

    A factor None is the ratio of the sizes.

    by_factor  Whether kernels use the factor that the user gave, which is not the ratio if sizes were rounded
    """
    # torch says the same of both at once
    if (size is None) == (scale_factor is None):
        raise ValueError("either size or scale_factor should be defined, and not both")
    dims = len(space)
    if size is not None:
        return each(size, dims), [None] * dims
    factors = [float(f) for f in (scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * dims)]
    sizes = [math.floor(n * f) for n, f in zip(space, factors, strict=True)]
    # kernels that take a factor read by it, which the rounded sizes do not give
    return sizes, [f if by_factor else None for f in factors]


def _along_each(input: torch.Tensor, cut_dims: list[CutDim], tables: list[Table]) -> torch.Tensor:
    """Returns the tensor with the last len(tables) dims resized, each by its table; halos of cut dims are fetched."""
    first, after, todo = input.dim() - len(tables), [], {}
    for cut in cut_dims:  # all are fetched before any is resized, so that what is computed below is plain
        table = tables[cut.dim - first]
        input, then, todo[cut.dim] = opened_for(input, cut, table)
        after.append(then)
    for dim, table in enumerate(tables, first):
        if not table.same:
            input = applied(input, dim, *todo.get(dim, entries(table)))
    return placed(input, after)


@answers(F.pixel_shuffle)
def pixel_shuffle(input: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    """Returns `F.pixel_shuffle(x, r)`: channels become (r, r) blocks of the last two dims, on each tile by itself."""
    cut_dims, r = cuts(input, (-2, -1)), upscale_factor
    if not cut_dims:
        return F.pixel_shuffle(input, r)
    if input.shape[-3] % (r * r):  # torch's own check is passed by: the reshape below would name a tile's sizes
        raise RuntimeError(f"pixel_shuffle by {r} of {tuple(input.shape)}: channels must be divisible by {r * r}")
    after = [CutDim(cut.axis, cut.dim, repeated(cut.owners, r)) for cut in cut_dims]
    tile = opened(input, cut_dims)
    *lead, channels, rows, columns = tile.shape
    blocks = tile.reshape(math.prod(lead), channels // (r * r), r, r, rows, columns)
    return placed(blocks.permute(0, 1, 4, 2, 5, 3).reshape(*lead, channels // (r * r), rows * r, columns * r), after)


@answers(F.pixel_unshuffle)
def pixel_unshuffle(input: torch.Tensor, downscale_factor: int) -> torch.Tensor:
    """Returns `F.pixel_unshuffle(x, r)`: (r, r) blocks become channels; rest of a block on other ranks is fetched."""
    cut_dims, r = cuts(input, (-2, -1)), downscale_factor
    if not cut_dims:
        return F.pixel_unshuffle(input, r)
    if any(input.shape[d] % r for d in (-2, -1)):
        raise RuntimeError(f"pixel_unshuffle by {r} of {tuple(input.shape)}: its last two dims must be divisible")
    along = {cut.dim: Sliding(cut.owners.size // r, r, r) for cut in cut_dims}
    return windowed(input, along, cut_dims, lambda window: F.pixel_unshuffle(window, r))


apart(F.interpolate, lambda x: 2)


apart(F.pixel_shuffle, in_front(3))
apart(F.pixel_unshuffle, in_front(3))


@answers(F.channel_shuffle, cut_once=False)
def channel_shuffle(input: torch.Tensor, groups: int) -> torch.Tensor:
    """Returns `F.channel_shuffle(x, groups)`: channels taken from each group in turn, of a tensor cut along any dim."""
    return input.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
