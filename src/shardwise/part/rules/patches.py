"""Windows as dims: `Tensor.unfold`, and `F.unfold` of tiles (`F.fold`: whole). Paddings by a boundary: boundary.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.boundary import Sizes, each
from shardwise.part.cuts import Uncut
from shardwise.part.labels import label, rearranged
from shardwise.part.tensor import Part, no_rule, rule
from shardwise.part.tiles.apart import apart, in_front
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
    """Returns the gradient of what was seen as windows: those of each index added up."""
    part, sizes, *rest = args
    own = [part.local.shape[d] if d == part.dim_cut else n for d, n in enumerate(sizes)]
    return part.with_local(func(part.local, own, *rest))


@answers(torch.Tensor.unfold)
def sliding(input: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """Returns (…, windows, …, size): the windows along one dim, which may be cut, in a dim behind all others."""
    dim = dimension % input.dim()
    cut_dims = cuts(input, range(input.dim()))
    if not cut_dims:
        return input.unfold(dim, size, step)
    if size > input.shape[dim]:
        raise RuntimeError(f"unfold: windows of {size} along dim {dim} of {tuple(input.shape)}")
    along = {dim: Sliding((input.shape[dim] - size) // step + 1, size, step)}
    # windows are views: what is written into one is written into a copy, not into the tile
    return windowed(input, along, cut_dims, lambda window: window.unfold(dim, size, step), views=True)


@answers(F.unfold)
def unfold(
    input: torch.Tensor, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
) -> torch.Tensor:  # fmt: skip
    """Returns (B, C * kernel, patches) of (B, C, H, W), of which H and W may be cut."""
    cut_dims, first = cuts(input, (-2, -1)), input.dim() - 2
    if not cut_dims:
        return F.unfold(input, kernel_size, dilation, padding, stride)
    kernel, step, pads, gaps = (each(value, 2) for value in (kernel_size, stride, padding, dilation))
    maps = []
    for d, n in enumerate(input.shape[-2:]):
        count = (n + 2 * pads[d] - gaps[d] * (kernel[d] - 1) - 1) // step[d] + 1
        if count < 1:
            raise RuntimeError(f"unfold: windows of {kernel} in {tuple(input.shape)}")
        maps.append(Sliding(count, kernel[d], step[d], pads[d], gaps[d]))
    tiled = {cut.dim for cut in cut_dims}
    local_pads = [0 if first + d in tiled else pads[d] for d in range(2)]

    def local(window: torch.Tensor) -> torch.Tensor:
        counts = [(n + 2 * pad - m.extent) // m.stride + 1
                  for n, pad, m in zip(window.shape[-2:], local_pads, maps, strict=True)]  # fmt: skip
        return F.unfold(window, kernel, gaps, local_pads, step).unflatten(-1, counts)

    # rows and columns of patches are dims of their own until each has its owners; joined, they are a view of both
    columns = windowed(input, {cut.dim: maps[cut.dim - first] for cut in cut_dims}, cut_dims, local)
    return columns.flatten(-2)


apart(F.unfold, in_front(3))
