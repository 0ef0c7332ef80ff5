"""Convolutions, plain and transposed, cut along samples, channels or whole groups, and on tiles with a halo exchange.

On tiles a plain convolution goes by `part/tiles/deep` or `part/tiles/overlap` if these can; others wait for the halo.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.boundary import Sizes, each, paddings
from shardwise.part.cuts import Uncut, repeated
from shardwise.part.labels import Axes, Use, label, param_of
from shardwise.part.moves import share_as
from shardwise.part.sums import Sum
from shardwise.part.tensor import is_part, no_rule, parts_in, rule
from shardwise.part.tiles.deep import deepened
from shardwise.part.tiles.maps import Sliding, Spreading
from shardwise.part.tiles.overlap import Convolution, overlapped
from shardwise.part.tiles.windows import answers, cuts, used, windowed


@rule("convolution")
def convolution(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns x (N, C, ...) convolved with w (O, C/g, ...), cut along samples or output channels.

    A `Sum` over ranks if input channels are cut. A transposed one has w (C, O, ...), cut along either's channels.
    """
    x, w, b, stride, padding, dilation, transposed, output_padding, g = args
    rest = (stride, padding, dilation, transposed, output_padding)
    outer, inner = _channels(func, args, transposed, g)
    x = _by_groups(x, w, g)
    x_cut = x.dim_cut if is_part(x) else None
    w_cut = w.dim_cut if is_part(w) else None
    # by samples
    if x_cut == 0 and w_cut is None:
        return x.with_local(func(x.local, w, b, *rest, g), 0)
    # by output channels: each rank makes its own of the whole input
    if g == 1 and x_cut is None and w_cut == outer:
        bias = b.local if is_part(b) else None if b is None else w.share(b, 0)
        return w.with_local(func(x, w.local, bias, *rest, 1), 1)
    # by input channels: a sum over ranks, to which the bias is added once
    if g == 1 and w_cut in (inner, None) and x_cut in (1, None) and (w_cut is None or x_cut is None or x.beside(w)):
        lead = w if is_part(w) else x
        local = _convolved(func, share_as(x, lead, 1), share_as(w, lead, inner), (x, w), rest)
        total = Sum.of(local, lead.axis, lead.origin, spread=False)
        return total if b is None else total + b.view(-1, *([1] * (total.dim() - 2)))
    # depthwise, each rank has whole groups: channels of input and output alike
    if g > 1 and x_cut == 1 and w_cut == 0 and x.shape[1] == g and w.owners == repeated(x.owners, w.shape[0] // g):
        bias = b.local if is_part(b) else None if b is None else w.share(b, 0)
        return w.with_local(func(x.local, w.local, bias, *rest, x.local.shape[1]), 1)
    raise Uncut(no_rule(func, parts_in(args)))


def _by_groups(x: torch.Tensor, w: torch.Tensor, g: int) -> torch.Tensor:
    """Returns x; a whole one (as a pipeline stage receives it) of a depthwise convolution, cut as w's groups are."""
    if g == 1 or is_part(x) or not is_part(w) or w.dim_cut != 0 or x.shape[1] != g:
        return x
    groups = w.owners.sliced(0, w.shape[0], w.shape[0] // g)
    return w.with_local(groups.take(x, 1, w.axis.index), 1, groups)


def _convolved(func: Any, x: torch.Tensor, w: torch.Tensor, whole: tuple, rest: tuple) -> torch.Tensor:
    """Returns the convolution over this rank's input channels; zeros of the result's shape on a rank without any.

    x, w   this rank's shares;  whole  (x, w) with their global shapes
    rest   (stride, padding, dilation, transposed, output padding)
    """
    if x.shape[1]:
        return func(x, w, None, *rest, 1)
    empty = (torch.empty(each.shape, device="meta") for each in whole)
    return x.new_zeros(func(*empty, None, *rest, 1).shape)


@rule("convolution_backward")
def convolution_backward(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns a convolution's (dx, dweight, dbias), cut as in `convolution`; None for each that is not asked for."""
    dy, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, g, wanted = args
    rest = (stride, padding, dilation, transposed, output_padding)
    outer, inner = _channels(func, args, transposed, g)
    lead = parts_in([w]) or parts_in([x]) or parts_in([dy])
    part = lead[0]
    w_cut = w.dim_cut if is_part(w) else None
    if w_cut == outer and g == 1:  # by output channels: dx is a sum over ranks
        local = None if bias_sizes is None else [w.local.shape[outer]]
        dx, dw, db = func(share_as(dy, w, 1), x, w.local, local, *rest, 1, wanted)
        dx = Sum.of(dx, w.axis, w.origin, spread=False) if dx is not None and wanted[0] else None
        dw = None if dw is None else w.with_local(dw, outer)
        return dx, dw, None if db is None else w.with_local(db, 0)
    if w_cut == 0 and g > 1:  # depthwise
        x = _by_groups(x, w, g)
        local = None if bias_sizes is None else [w.local.shape[0]]
        dx, dw, db = func(share_as(dy, w, 1), x.local, w.local, local, *rest, x.local.shape[1], wanted)
        dx = x.with_local(dx, 1) if wanted[0] else None
        return dx, *(None if gradient is None else w.with_local(gradient, 0) for gradient in (dw, db))
    # by input channels
    if g == 1 and not is_part(dy) and (w_cut == inner or (is_part(x) and x.dim_cut == 1)):
        xl, wl = share_as(x, part, 1), share_as(w, part, inner)
        if xl.shape[1]:
            dx, dw, db = func(dy, xl, wl, bias_sizes, *rest, 1, wanted)
        else:
            # kernels take no tensor without channels; the bias has its whole gradient on every rank
            dx, dw, db = torch.zeros_like(xl), torch.zeros_like(wl), dy.sum([0, *range(2, dy.dim())])
        dx = part.with_local(dx, 1) if wanted[0] else None
        return dx, part.with_local(dw, inner) if wanted[1] else None, db
    if w_cut is None and part.dim_cut == 0:  # by samples
        dx, dw, db = func(share_as(dy, part, 0), share_as(x, part, 0), w, bias_sizes, *rest, g, wanted)
        dx = part.with_local(dx, 0) if wanted[0] else None
        sums = (Sum.of(gradient, part.axis, part.origin, spread=False) if m else None
                for gradient, m in zip((dw, db), wanted[1:], strict=True))  # fmt: skip
        return dx, *sums
    raise Uncut(no_rule(func, parts_in(args)))


def _channels(func: Any, args: tuple, transposed: bool, groups: int) -> tuple[int, int]:
    """Returns the weight's (dim of output channels, dim of input channels)."""
    if transposed and groups > 1:
        raise Uncut(no_rule(func, parts_in(args)))
    return (1, 0) if transposed else (0, 1)


def _convolution(plain: Callable, dims: int) -> Callable:
    """Returns a function with the arguments of `plain`, a convolution over `dims` dims, that takes tiles too."""

    def convolution(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Sizes = 1,
        padding: Sizes | str = 0, dilation: Sizes = 1, groups: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the convolution of a tensor of which any spatial dim may be cut."""
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
    """Returns `size`, a number of outputs; raises `RuntimeError` if it is less than 1."""
    if size < 1:  # as torch's kernel does, which is given a window of it, with a shape that the user does not know
        raise RuntimeError(f"a kernel of {tuple(kernel)} is larger than the padded input {tuple(input.shape)}")
    return size


def _transposed(plain: Callable, dims: int) -> Callable:
    """Returns a function with the arguments of `plain`, transposed over `dims` spatial dims, that takes tiles too."""

    def transposed(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Sizes = 1,
        padding: Sizes = 0, output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the transposed convolution of a tensor of which any spatial dim may be cut."""
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


@label("convolution")
def convolution_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels the output by w's output channels, and unites x's labels with w's input channels.

    False if x has labels along other dims than channels, or w is no parameter with its channels as dims.
    """
    x, w, b = args[:3]
    transposed, groups = args[6], args[8]
    labels, param = axes.labels(x), param_of(w)
    # w is no weight, or a view in which its channels are no dims; transposed groups have no rule
    if param is None or param[1][0] is None or (param[1][1] is None and groups == 1) or (transposed and groups > 1):
        return False
    if labels is not None and any(n > 1 for d, n in enumerate(labels.shape) if d != 1):
        return False
    name, dims = param
    if name in axes.frozen:  # the plan keeps the weight whole, so channels with labels would have to be whole too
        return labels is None
    # of a depthwise one dims[1] may be None: it has one index, and nothing is contracted
    outer, inner = (dims[1], dims[0]) if transposed else (dims[0], dims[1] or 0)
    seeds = axes.seeds[name, outer], axes.seeds[name, inner]
    of_bias = axes.labels(b)
    if groups == 1:
        if labels is not None:
            axes.unite(labels.ravel(), seeds[1])
        else:
            axes.keep_whole(seeds[1], "its input is whole")
        place = axes.modules[-1] if axes.modules else ""
        axes.uses.append(Use(name, "channels", inner, outer, place))
    # depthwise: output channels follow their one input channel, and nothing is contracted
    elif groups == x.shape[1] and labels is not None:
        axes.unite(np.repeat(labels.ravel(), w.shape[0] // groups), seeds[0])
    else:
        return False
    if of_bias is not None:
        axes.unite(of_bias.ravel(), seeds[0])
    axes.give(output, seeds[0].reshape([1, -1, *([1] * (output.dim() - 2))]))
    return True
