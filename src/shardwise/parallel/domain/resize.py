"""Resizing of tiles: interpolation in every mode, adaptive and global pooling, pixel shuffles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.boundary import each
from shardwise.device import on_host
from shardwise.host import to_device
from shardwise.parallel.domain.maps import Sliding
from shardwise.parallel.domain.tables import Table, applied, entries, opened_for, output_size
from shardwise.parallel.domain.tiles import CutDim, answers, cuts, opened, placed, windowed
from shardwise.part import Uncut
from shardwise.part.cuts import repeated

_KINDS = {"linear": "linear", "bilinear": "linear", "trilinear": "linear", "bicubic": "cubic", "nearest": "nearest",
          "nearest-exact": "nearest-exact", "area": "windows"}  # fmt: skip
_DIMS = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}


@answers(F.interpolate)
def interpolate(
    input: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Returns `F.interpolate` of a tensor of which any spatial dim may be cut, one dim after the other."""
    dims = input.dim() - 2
    cut_dims = cuts(input, range(2, input.dim()))
    if not cut_dims:
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    smooth = antialias and mode in ("bilinear", "bicubic")
    if antialias is not smooth or mode not in _KINDS or _DIMS.get(mode, dims) != dims:
        raise Uncut(f"interpolate(mode={mode!r}, antialias={antialias}) of {dims} spatial dims is not known on tiles")
    sizes, scales = _sizes(input.shape[2:], size, scale_factor, not recompute_scale_factor and mode != "area")
    if min(sizes) < 1:
        raise RuntimeError(f"interpolate of {tuple(input.shape)} to {sizes}: sizes must be positive")
    if smooth and sizes[1] == 1 and sizes[0] != input.shape[2] and on_host(input.device):
        raise Uncut(
            f"interpolate(mode={mode!r}, antialias=True) to {sizes}: torch's kernel gives every row of a single column "
            "the first row there, and tiles have the rows; resize to one column by a mean, or without antialias"
        )
    # one rounding at the end for 16-bit fields, not one for each dim
    wide = torch.promote_types(input.dtype, torch.float32) if input.is_floating_point() else input.dtype
    kind, double, host = _KINDS[mode] + "-antialias" * smooth, wide is torch.float64, on_host(input.device)
    tables = [Table(n, m, kind, bool(align_corners), s, double, host)
              for n, m, s in zip(input.shape[2:], sizes, scales, strict=True)]  # fmt: skip
    return along_each(input.to(wide), cut_dims, tables).to(input.dtype)


def _sizes(
    space: Sequence[int], size: Any, scale_factor: Any, by_factor: bool
) -> tuple[list[int], list[float | None]]:  # fmt: skip
    """Returns (the result's size along each spatial dim, the factor by which kernels read it; None: the sizes' ratio).

    by_factor  kernels read by a factor that is given, which is not the sizes' ratio where these are rounded
    """
    if (size is None) == (scale_factor is None):
        raise ValueError("either size or scale_factor should be defined, and not both")
    dims = len(space)
    if size is not None:
        return each(size, dims), [None] * dims
    factors = [float(f) for f in (scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * dims)]
    sizes = [output_size(n, f) for n, f in zip(space, factors, strict=True)]
    return sizes, [f if by_factor else None for f in factors]


def along_each(input: torch.Tensor, cut_dims: list[CutDim], tables: list[Table]) -> torch.Tensor:
    """Returns the tensor with each of the last dims resized by its table; ranks fetch what they read of a cut dim."""
    first, after, todo = input.dim() - len(tables), [], {}
    for cut in cut_dims:  # all are fetched before any is resized, so that what is computed below is plain
        table = tables[cut.dim - first]
        input, then, todo[cut.dim] = opened_for(input, cut, table)
        after.append(then)
    for dim, table in enumerate(tables, first):
        if not table.same:
            input = applied(input, dim, *todo.get(dim, entries(table)))
    return placed(input, after)


def _adaptive_avg(plain: Callable, dims: int) -> None:
    """Register adaptive average pooling over `dims` dims."""

    def adaptive_avg_pool(input: torch.Tensor, output_size: Any) -> torch.Tensor:
        """Means over windows that divide each spatial dim, of which any may be cut."""
        first = input.dim() - dims
        cut_dims = cuts(input, range(first, input.dim()))
        if not cut_dims:
            return plain(input, output_size)
        asked = list(output_size) if isinstance(output_size, Sequence) else [output_size] * dims
        sizes = [n if m is None else m for n, m in zip(input.shape[first:], asked, strict=True)]
        alone = [first + d for d, m in enumerate(sizes) if m == 1]
        if alone:  # a single window takes in every tile: a mean over ranks moves numbers, where a fetch moves the field
            input = input.mean(alone, keepdim=True)
            cut_dims = cuts(input, range(first, input.dim()))
        tables = [Table(n, m, "windows") for n, m in zip(input.shape[first:], sizes, strict=True)]
        return along_each(input, cut_dims, tables)

    answers(plain)(adaptive_avg_pool)


def _adaptive_max(plain: Callable, with_places: Callable, slide: Callable, dims: int) -> None:
    """Register adaptive max pooling over `dims` dims, with indices and without; `slide` is plain max pooling."""

    def adaptive_max_pool(input: torch.Tensor, output_size: Any, return_indices: bool = False):
        """The largest over windows that divide each spatial dim, of which any may be cut."""
        first = input.dim() - dims
        cut_dims = cuts(input, range(first, input.dim()))
        if not cut_dims:
            return plain(input, output_size, return_indices)
        asked = list(output_size) if isinstance(output_size, Sequence) else [output_size] * dims
        after, rows, field = [], {}, input.shape[first:]
        tables = [Table(n, n if m is None else m, "windows")
                  for n, m in zip(field, asked, strict=True)]  # fmt: skip
        read = [entries(table)[0] for table in tables]  # by each output, in the field
        for cut in cut_dims:
            input, then, rows[cut.dim] = opened_for(input, cut, tables[cut.dim - first])
            read[cut.dim - first] = read[cut.dim - first][then.owners.indices(cut.axis.index)]
            after.append(then)
        # windows differ in size and overlap: laid out one behind the other, filled up, they are those of plain pooling
        kernel = []
        for dim, table in enumerate(tables, first):
            places, weights = rows.get(dim, entries(table))
            assert weights is not None
            if not table.same:
                input = _apart(input, dim, places, weights)
            kernel.append(places.shape[1])
        if input.numel():
            output, at = slide(input, kernel, return_indices=True) if return_indices else (slide(input, kernel), None)
            at = None if at is None else _in_field(at, input.shape[first:], read, field)
        else:  # kernels take no empty tile: an empty output, by operations that have a backward
            output = input
            for dim, n in enumerate(kernel, first):
                output = output.narrow(dim, 0, output.shape[dim] // n)
            at = output.to(torch.int64) if return_indices else None
        return placed(output, after) if at is None else (placed(output, after), placed(at, after))

    answers(plain)(adaptive_max_pool)
    answers(with_places)(lambda input, output_size, return_indices=True: adaptive_max_pool(input, output_size, True))


def _in_field(
    at: torch.Tensor, windows: Sequence[int], read: list[np.ndarray], field: Sequence[int]
) -> torch.Tensor:  # fmt: skip
    """Returns places counted in the whole field, of places counted in windows that lie behind each other."""
    in_field, left = torch.zeros_like(at), at
    for d, n in enumerate(field):
        behind = math.prod(windows[d + 1 :])
        places = to_device(np.ascontiguousarray(read[d].reshape(-1)).astype(np.int64), at.device)
        in_field, left = in_field * n + places[left // behind], left % behind
    return in_field


def _apart(tile: torch.Tensor, dim: int, places: np.ndarray, weights: np.ndarray) -> torch.Tensor:
    """Returns each output's window behind the other along `dim`, filled up with what is never the largest."""
    around = [0, 0] * (tile.dim() - 1 - dim) + [0, 1]
    none = tile.shape[dim]  # the place of the -inf that is put behind the tile
    tile = F.pad(tile, around, value=-torch.inf)
    return tile.index_select(dim, to_device(np.where(weights > 0, places, none).reshape(-1), tile.device))


for _dims, _max, _with_places, _slide in (
    (1, F.adaptive_max_pool1d, F.adaptive_max_pool1d_with_indices, F.max_pool1d),
    (2, F.adaptive_max_pool2d, F.adaptive_max_pool2d_with_indices, F.max_pool2d),
    (3, F.adaptive_max_pool3d, F.adaptive_max_pool3d_with_indices, F.max_pool3d),
):
    _adaptive_max(_max, _with_places, _slide, _dims)

for _dims, _plain in ((1, F.adaptive_avg_pool1d), (2, F.adaptive_avg_pool2d), (3, F.adaptive_avg_pool3d)):
    _adaptive_avg(_plain, _dims)


@answers(F.pixel_shuffle)
def pixel_shuffle(input: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    """Returns channels as (r, r) blocks of the last two dims: each rank's own."""
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
    """Returns (r, r) blocks of the last two dims as channels; what a tile lacks of its blocks is fetched."""
    cut_dims, r = cuts(input, (-2, -1)), downscale_factor
    if not cut_dims:
        return F.pixel_unshuffle(input, r)
    if any(input.shape[d] % r for d in (-2, -1)):
        raise RuntimeError(f"pixel_unshuffle by {r} of {tuple(input.shape)}: its last two dims must be divisible")
    along = {cut.dim: Sliding(cut.owners.size // r, r, r) for cut in cut_dims}
    return windowed(input, along, cut_dims, lambda window: F.pixel_unshuffle(window, r))


__all__ = ["interpolate", "pixel_shuffle", "pixel_unshuffle"]
