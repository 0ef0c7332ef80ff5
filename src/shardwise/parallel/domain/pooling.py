"""Pooling of tiles over one to three spatial dims: sliding windows, and windows that divide a dim (adaptive)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.host import to_device
from shardwise.parallel.domain.convolve import Sizes, each
from shardwise.parallel.domain.maps import Sliding
from shardwise.parallel.domain.tiles import CutDim, answers, cuts, windowed
from shardwise.part.cuts import REMEMBERED, Uncut


def _outputs(n: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Outputs along one dim; a last window that would begin in the padding behind it is dropped."""
    reach = dilation * (kernel - 1) + 1
    if padding > kernel // 2 or padding < 0:
        raise RuntimeError(f"pad should be at most half of the kernel size, got {padding} and {kernel}")
    size = (n + 2 * padding - reach + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (size - 1) * stride >= n + padding:
        size -= 1
    if size < 1:
        raise RuntimeError(f"a window of {reach} is larger than {n} padded by {padding}")
    return size


def _slides(
    input: torch.Tensor, dims: int, kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil: bool
) -> tuple[list[int], list[int], list[int], list[Sliding]]:  # fmt: skip
    """(kernel, stride, dilation) and the windows of each dim, from a pooling function's arguments."""
    kernels = each(kernel, dims)
    strides = each(stride, dims) if stride not in (None, [], ()) else kernels
    paddings, dilations = each(padding, dims), each(dilation, dims)
    windows = []
    for d, n in enumerate(input.shape[-dims:]):
        size = _outputs(n, kernels[d], strides[d], paddings[d], dilations[d], ceil)
        windows.append(Sliding(size, kernels[d], strides[d], paddings[d], dilations[d]))
    return kernels, strides, dilations, windows


def _edges(input: torch.Tensor, windows: list[Sliding], found: list[CutDim]) -> list[int]:
    """What `F.pad` adds to (or, below zero, cuts off) the dims that are not cut, for windows without padding."""
    first, tiled, around = input.dim() - len(windows), {cut.dim for cut in found}, []
    for d in reversed(range(len(windows))):
        window, n = windows[d], input.shape[first + d]
        around += [0, 0] if first + d in tiled else [window.before, window.needed - window.before - n]
    return around


def _max_pool(plain: Callable, with_places: Callable, dims: int) -> None:
    def max_pool(
        input: torch.Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ):  # fmt: skip
        """The largest of each window of a tensor of which any spatial dim may be cut."""
        found = cuts(input, range(-dims, 0))
        if not found:
            return plain(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        if return_indices:
            raise Uncut(f"max_pool{dims}d with return_indices on tiles: its indices count the whole field")
        kernels, strides, dilations, windows = _slides(input, dims, kernel_size, stride, padding, dilation, ceil_mode)
        around, first = _edges(input, windows, found), input.dim() - dims

        def local(window: torch.Tensor) -> torch.Tensor:
            window = F.pad(window, around, value=lowest) if any(around) else window
            return plain(window, kernels, strides, 0, dilations)

        lowest = -torch.inf if input.is_floating_point() else torch.iinfo(input.dtype).min
        along = {cut.dim: windows[cut.dim - first] for cut in found}
        return windowed(input, along, found, local, lowest)

    def with_indices(
        input: torch.Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1,
        ceil_mode: bool = False, return_indices: bool = True,
    ):  # fmt: skip
        return max_pool(input, kernel_size, stride, padding, dilation, ceil_mode, True)

    answers(plain)(max_pool)
    answers(with_places)(with_indices)


def _avg_pool(plain: Callable, dims: int) -> Callable:
    def avg_pool(
        input: torch.Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The mean of each window of a tensor of which any spatial dim may be cut."""
        found = cuts(input, range(-dims, 0))
        more = () if dims == 1 else (divisor_override,)
        if not found:
            return plain(input, kernel_size, stride, padding, ceil_mode, count_include_pad, *more)
        kernels, strides, _, windows = _slides(input, dims, kernel_size, stride, padding, 1, ceil_mode)
        around, first = _edges(input, windows, found), input.dim() - dims

        def local(window: torch.Tensor) -> torch.Tensor:
            window = F.pad(window, around) if any(around) else window
            return plain(window, kernels, strides)

        output = windowed(input, {cut.dim: windows[cut.dim - first] for cut in found}, found, local)
        if divisor_override:
            return output * (float(np.prod(kernels)) / divisor_override)
        for d, window in enumerate(windows):
            factors = _factors(window, input.shape[first + d], count_include_pad)
            if factors is not None:
                shape = [-1 if e == d else 1 for e in range(dims)]
                output = output * to_device(torch.tensor(factors, dtype=output.dtype).view(shape), output.device)
        return output

    return answers(plain)(avg_pool)


@lru_cache(REMEMBERED)
def _factors(window: Sliding, n: int, padded: bool) -> tuple[float, ...] | None:
    """Kernel size over the indices that each window's mean counts; None where that is 1 throughout."""
    start = np.arange(window.size) * window.stride - window.before
    stop = np.minimum(start + window.kernel, n + window.before)
    counted = stop - start if padded else np.minimum(stop, n) - np.maximum(start, 0)
    return None if (counted == window.kernel).all() else tuple(float(x) for x in window.kernel / counted)


for _dims, _max, _with_places, _avg in (
    (1, F.max_pool1d, F.max_pool1d_with_indices, F.avg_pool1d),
    (2, F.max_pool2d, F.max_pool2d_with_indices, F.avg_pool2d),
    (3, F.max_pool3d, F.max_pool3d_with_indices, F.avg_pool3d),
):
    _max_pool(_max, _with_places, _dims)
    _avg_pool(_avg, _dims)
