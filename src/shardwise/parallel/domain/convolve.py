"""Convolutions of tiles, plain and transposed: by deep or overlap (plain ones alone), else with the halo fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from shardwise.boundary import Sizes, each, paddings
from shardwise.parallel.domain.deep import deepened
from shardwise.parallel.domain.maps import Sliding, Spreading
from shardwise.parallel.domain.overlap import Convolution, overlapped
from shardwise.parallel.domain.tiles import answers, cuts, used, windowed
from shardwise.part import Uncut


def _convolution(plain: Callable, dims: int) -> Callable:
    """Returns the function that does what `plain`, a convolution over `dims` spatial dims, does on tiles too."""

    def convolution(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Sizes = 1,
        padding: Sizes | str = 0, dilation: Sizes = 1, groups: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        """The convolution of a tensor of which any spatial dim may be cut."""
        first = input.dim() - dims  # counted from the back: a field without a batch dim is convolved too
        cut_dims = cuts(input, range(first, input.dim()))
        if not cut_dims:
            return plain(input, weight, bias, stride, padding, dilation, groups)
        strides, dilations, kernel = each(stride, dims), each(dilation, dims), weight.shape[2:]
        before, after = paddings(padding, kernel, dilations)
        tiled = {cut.dim - first for cut in cut_dims}
        along = {}
        for d in tiled:
            # kernels take no empty tile: where one is, every rank goes by `Sliding`, by which it reads zeros
            filled = all(0 not in cut.owners.counts for cut in cut_dims if cut.dim == first + d)
            if filled and (kernel[d], strides[d], before[d], after[d]) == (1, 1, 0, 0):
                continue  # each output reads its own input: nothing is fetched, also of a dim that two axes cut
            reach = dilations[d] * (kernel[d] - 1) + 1
            size = (input.shape[first + d] + before[d] + after[d] - reach) // strides[d] + 1
            along[first + d] = Sliding(_positive(size, input, kernel), kernel[d], strides[d], before[d], dilations[d])
        # the local operation pads dims that are not cut; padding="same" of an even kernel has one more behind
        uneven = any(before[d] != after[d] for d in range(dims) if d not in tiled)
        pads = [0 if uneven or d in tiled else before[d] for d in range(dims)]
        around = [n for d in reversed(range(dims)) for n in ((0, 0) if d in tiled else (before[d], after[d]))]

        def local(window: torch.Tensor) -> torch.Tensor:
            window = F.pad(window, around) if uneven else window
            return plain(window, used(weight, cut_dims), used(bias, cut_dims), strides, pads, dilations, groups)

        # a margin that is wide enough saves the whole exchange, so it is looked at before what hides an exchange
        if (output := deepened(input, along, cut_dims, local)) is not None:
            return output
        if not uneven:  # `Convolution.padding` has one number for both sides of a dim
            how = Convolution(tuple(strides), tuple(pads), tuple(dilations), groups)
            output = overlapped(input, weight, bias, how, along, cut_dims)
            if output is not None:
                return output
        return windowed(input, along, cut_dims, local)

    return convolution


def _positive(size: int, input: torch.Tensor, kernel: Sequence[int]) -> int:
    if size < 1:  # as torch's kernel does, which is given a window of it, with a shape that the user does not know
        raise RuntimeError(f"a kernel of {tuple(kernel)} is larger than the padded input {tuple(input.shape)}")
    return size


def _transposed(plain: Callable, dims: int) -> Callable:
    """Returns the function that does what `plain`, a transposed convolution over `dims` dims, does on tiles too."""

    def transposed(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Sizes = 1,
        padding: Sizes = 0, output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
    ) -> torch.Tensor:  # fmt: skip
        """The transposed convolution of a tensor of which any spatial dim may be cut."""
        first = input.dim() - dims
        cut_dims = cuts(input, range(first, input.dim()))
        if not cut_dims:
            return plain(input, weight, bias, stride, padding, output_padding, groups, dilation)
        strides, dilations, kernel = each(stride, dims), each(dilation, dims), weight.shape[2:]
        pads, more = each(padding, dims), each(output_padding, dims)
        along = {}
        for cut in cut_dims:
            d = cut.dim - first
            # torch's formula, of the whole field: a tile's own would add padding and output padding at every border
            size = (cut.owners.size - 1) * strides[d] - 2 * pads[d] + dilations[d] * (kernel[d] - 1) + more[d] + 1
            if size < 1:
                raise Uncut(
                    f"a transposed convolution of {tuple(input.shape)} of whose outputs its padding leaves none"
                )
            along[cut.dim] = Spreading(size, kernel[d], strides[d], pads[d], dilations[d])
            pads[d], more[d] = 0, 0  # the local operation gives all that its window adds to; `windowed` takes its own

        def local(window: torch.Tensor) -> torch.Tensor:
            return plain(window, used(weight, cut_dims), used(bias, cut_dims), strides, pads, more, groups, dilations)

        return windowed(input, along, cut_dims, local)

    return transposed


for _dims, _plain, _back in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    answers(_plain)(_convolution(_plain, _dims))
    answers(_back)(_transposed(_back, _dims))
