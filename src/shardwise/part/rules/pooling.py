"""Pooling over one to three spatial dims, sliding or adaptive windows. Paddings by a boundary: boundary.py.

On tiles each rank fetches what its outputs read. Pooling that returns or takes indices (`max_unpool`), means over fewer
cells at edges (`ceil_mode`, padding that does not count), and several adaptive windows run on the gathered field.

Label rules return False where the labelled inputs have to stay whole (`part/labels`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.boundary import Sizes, each
from shardwise.part.labels import Axes, label
from shardwise.part.tiles.entire import apart, done_whole, in_front, of_all
from shardwise.part.tiles.maps import Sliding
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import answers, cuts, windowed


def _outputs(n: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Returns the number of pooling windows along a dim of `n`, by torch's formula; `ceil` is its `ceil_mode`."""
    reach = dilation * (kernel - 1) + 1
    # torch's own check, which it makes on whole tensors: a rank's tile would not tell
    if padding > kernel // 2 or padding < 0:
        raise RuntimeError(f"pad should be at most half of the kernel size, got {padding} and {kernel}")
    size = (n + 2 * padding - reach + (stride - 1 if ceil else 0)) // stride + 1
    # torch drops a window that starts beyond the data and its front padding
    if ceil and (size - 1) * stride >= n + padding:
        size -= 1
    if size < 1:
        raise RuntimeError(f"a window of {reach} is larger than {n} padded by {padding}")
    return size


def _slides(
    input: torch.Tensor, dims: int, kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil: bool
) -> tuple[list[int], list[int], list[int], list[Sliding]]:  # fmt: skip
    """Returns (kernel sizes, strides, dilations, windows), each with an entry for each of the last `dims` dims.

    The other arguments are a pooling function's, an int or a sequence each.
    """
    kernels = each(kernel, dims)
    strides = each(stride, dims) if stride not in (None, [], ()) else kernels  # torch passes [] for no stride too
    paddings, dilations = each(padding, dims), each(dilation, dims)
    windows = []
    for d, n in enumerate(input.shape[-dims:]):
        size = _outputs(n, kernels[d], strides[d], paddings[d], dilations[d], ceil)
        windows.append(Sliding(size, kernels[d], strides[d], paddings[d], dilations[d]))
    return kernels, strides, dilations, windows


def _edges(input: torch.Tensor, windows: list[Sliding], cut_dims: list[CutDim]) -> list[int]:
    """Returns the list for `F.pad` that pads the dims that are not cut, so that the local kernel need not pad.

    Then every window lies inside, whatever `ceil_mode` is. Negative widths drop indices that no window reads.
    """
    first, tiled, around = input.dim() - len(windows), {cut.dim for cut in cut_dims}, []
    for d in reversed(range(len(windows))):
        window, n = windows[d], input.shape[first + d]
        around += [0, 0] if first + d in tiled else [window.before, window.needed - window.before - n]
    return around


def _max_pool(plain: Callable, with_places: Callable, dims: int) -> None:
    """Registers max pooling of tiles over `dims` spatial dims, with indices and without."""

    def max_pool(
        input: torch.Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ):  # fmt: skip
        """Returns the largest of each window of a tensor of which any spatial dim may be cut."""
        cut_dims = cuts(input, range(-dims, 0))
        if not cut_dims:
            return plain(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        if return_indices:  # places are counted in the whole field
            return whole(input, kernel_size, stride, padding, dilation, ceil_mode, True)
        kernels, strides, dilations, windows = _slides(input, dims, kernel_size, stride, padding, dilation, ceil_mode)
        around, first = _edges(input, windows, cut_dims), input.dim() - dims

        def local(window: torch.Tensor) -> torch.Tensor:
            window = F.pad(window, around, value=lowest) if any(around) else window
            return plain(window, kernels, strides, 0, dilations)

        lowest = -torch.inf if input.is_floating_point() else torch.iinfo(input.dtype).min
        along = {cut.dim: windows[cut.dim - first] for cut in cut_dims}
        return windowed(input, along, cut_dims, local, lowest)

    whole = of_all(plain)
    answers(with_places, cut_once=False)(of_all(with_places))
    answers(plain)(max_pool)


def _avg_pool(plain: Callable, dims: int) -> Callable:
    """Registers, and returns, average pooling of tiles over `dims` spatial dims, in place of `plain`."""

    def avg_pool(
        input: torch.Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the mean of each window of a tensor of which any spatial dim may be cut."""
        cut_dims = cuts(input, range(-dims, 0))
        more = () if dims == 1 else (divisor_override,)  # `avg_pool1d` has no such argument
        if not cut_dims:
            return plain(input, kernel_size, stride, padding, ceil_mode, count_include_pad, *more)
        padded = not count_include_pad and any(each(padding, dims))
        if ceil_mode or padded or divisor_override:  # windows of tiles are divided by their whole size alone
            return whole(input, kernel_size, stride, padding, ceil_mode, count_include_pad, *more)
        kernels, strides, _, windows = _slides(input, dims, kernel_size, stride, padding, 1, False)
        around, first = _edges(input, windows, cut_dims), input.dim() - dims

        def local(window: torch.Tensor) -> torch.Tensor:
            window = F.pad(window, around) if any(around) else window
            return plain(window, kernels, strides)

        return windowed(input, {cut.dim: windows[cut.dim - first] for cut in cut_dims}, cut_dims, local)

    whole = of_all(plain)
    return answers(plain)(avg_pool)


for _dims, _max, _with_places, _avg in (
    (1, F.max_pool1d, F.max_pool1d_with_indices, F.avg_pool1d),
    (2, F.max_pool2d, F.max_pool2d_with_indices, F.avg_pool2d),
    (3, F.max_pool3d, F.max_pool3d_with_indices, F.avg_pool3d),
):
    _max_pool(_max, _with_places, _dims)
    _avg_pool(_avg, _dims)


def _adaptive_avg(plain: Callable, dims: int) -> None:
    """Registers adaptive average pooling of tiles over `dims` dims: to size one by a mean, else on gathered tiles."""

    def adaptive_avg_pool(input: torch.Tensor, output_size: Any) -> torch.Tensor:
        """Returns means over windows that divide each spatial dim, of which any may be cut."""
        # nothing of these dims is cut
        if not cuts(input, range(-dims, 0)):
            return plain(input, output_size)
        asked = list(output_size) if isinstance(output_size, Sequence) else [output_size] * dims
        sizes = [n if m is None else m for n, m in zip(input.shape[-dims:], asked, strict=True)]
        alone = [d - dims for d, m in enumerate(sizes) if m == 1]
        if alone:  # a single window takes in every tile: numbers are moved, not the field
            input = input.mean(alone, keepdim=True)
        # the rest, if any, needs windows of the whole field
        return input if sizes == list(input.shape[-dims:]) else whole(input, sizes)

    whole = of_all(plain)
    answers(plain)(adaptive_avg_pool)


for _dims, _plain in ((1, F.adaptive_avg_pool1d), (2, F.adaptive_avg_pool2d), (3, F.adaptive_avg_pool3d)):
    _adaptive_avg(_plain, _dims)
for _dims in (1, 2, 3):
    done_whole(f"max_unpool{_dims}d", f"adaptive_max_pool{_dims}d", f"adaptive_max_pool{_dims}d_with_indices")


POOLS = ("max_pool{}d", "avg_pool{}d", "adaptive_avg_pool{}d", "adaptive_max_pool{}d")


for _dims in (1, 2, 3):
    for _name in POOLS:
        apart(getattr(F, _name.format(_dims)), in_front(_dims))


@label("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d",
      "upsample_nearest1d", "max_pool3d_with_indices", "avg_pool3d", "reflection_pad2d")  # fmt: skip
def spatial_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Whether the input has no labels; labels are not carried through, so a labelled input has to stay whole."""
    return axes.labels(args[0]) is None
