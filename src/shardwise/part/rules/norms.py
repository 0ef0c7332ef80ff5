"""Layer, RMS and group norms: local if the normalised dims are whole; on tiles with statistics over all ranks.

    mean = sum_r sum(x_r) / n        var = sum_r sum((x_r - mean)^2) / n        over all ranks' tiles
    y = (x - mean) / sqrt(var + eps) * w + b
    dx = (g - sum_r sum(g) / n - x' sum_r sum(g x') / n) / sqrt(var + eps)      with g = dy * w, x' the normalised x

Two small all-reduces forward over each axis, one backward. Statistics are float32 at least.
Source: Ioffe and Szegedy (2015); Wu and He, "Group Normalization" (2018).

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.comm import Axis, sum_over
from shardwise.part.cuts import Uncut, repeated
from shardwise.part.exchanges import TAG
from shardwise.part.labels import Axes, label
from shardwise.part.levels import Distributed
from shardwise.part.moves import share_as
from shardwise.part.sums import Sum, all_sum
from shardwise.part.tensor import is_part, no_rule, parts_in, rule
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import answers, cuts, opened, placed, taken, used
from shardwise.trace.leaves import tensors_in


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns (output, mean, rstd) of a layer or RMS norm over last dims that are not cut, each cut as x is."""
    part, shape = args[0], args[1]  # then weight, bias, eps
    if not is_part(part) or parts_in(args[2:]) or part.dim_cut >= part.dim() - len(shape):
        raise Uncut(f"a norm's statistics run over a cut dim ({no_rule(func, parts_in(args))})")
    return tuple(part.with_local(each) for each in func(part.local, *args[1:], **kwargs))


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns (dx cut like x, gradients of weight and bias as sums over ranks) of a layer or RMS norm."""
    part = args[1] if is_part(args[1]) else parts_in(args)[0]
    # args[2] is the normalised shape: statistics over a cut dim have no rule here
    if part.dim_cut >= part.dim() - len(args[2]):
        raise Uncut(no_rule(func, parts_in(args)))

    def local(each: Any) -> Any:
        # weights are whole, and what they are like is this rank's share
        if is_part(each):
            return share_as(each, part, part.dim_cut, func).contiguous()
        statistics = isinstance(each, torch.Tensor) and each.dim() == part.dim()
        # the kernel reads mean and rstd as if they were contiguous
        return part.share(each, part.dim_cut).contiguous() if statistics else each

    args = tuple(map(local, args))
    dx, *others = func(*args, **kwargs)
    # gradients of weights are summands: every rank computed its own samples'
    sums = (None if o is None else Sum.of(o, part.axis, part.origin, spread=False) for o in others)
    return (None if dx is None else part.with_local(dx), *sums)


@rule("native_group_norm")
def group_norm(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns (output, mean, rstd) of x (N, C, ...) cut along N, or along C in whole groups, all cut alike."""
    x, w, b, n, channels, area, count, eps = args
    # rows are apart: each rank runs the kernel on fewer of them
    if _of_rows(x, w, b):
        rows = x.owners.counts[x.axis.index]
        results = func(x.local.contiguous(), w, b, rows, channels, area, count, eps)
        return tuple(x.with_local(each) for each in results)
    x = as_weights(x, w, b)
    groups = _group_owners(func, x, channels, count, args)
    rank = x.axis.index
    wl, bl = (None if t is None else t.local if is_part(t) else x.share(t, 0) for t in (w, b))
    y, mean, rstd = func(x.local.contiguous(), wl, bl, n, x.owners.counts[rank], area, groups.counts[rank], eps)
    return x.with_local(y), x.with_local(mean, 1, groups), x.with_local(rstd, 1, groups)


def as_weights(x: Any, *weights: Any) -> Any:
    """Returns x (N, C, ...); a whole one (as a pipeline stage receives it) beside cut weights (C,), cut along C."""
    lead = next(iter(parts_in(weights)), None)
    return x if is_part(x) or lead is None else lead.with_local(lead.share(x, 1), 1, lead.owners)


def _of_rows(x: Any, *weights: Any) -> bool:
    """Whether x (N, C, ...) of a group norm is cut along N and its weights are whole.

    For example (B, S, C), cut along S and viewed as (B * S, C).
    """
    return is_part(x) and x.dim_cut == 0 and not parts_in(weights)


def _group_owners(func: Any, x: Any, channels: int, count: int, args: tuple):
    """Returns the owners of x's `count` groups of `channels`; raises `Uncut` unless each rank has whole groups."""
    if is_part(x) and x.dim_cut == 1:
        groups = x.owners.sliced(0, channels, channels // count)
        if repeated(groups, channels // count) == x.owners and all(groups.counts):
            return groups
    raise Uncut(f"a group norm's groups lie across ranks ({no_rule(func, parts_in(args))})")


@rule("native_group_norm_backward")
def group_norm_backward(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns a group norm's (dx, dweight, dbias), cut along channels; if x is cut along N, the last two are `Sum`s."""
    dy, x, mean, rstd, w, n, channels, area, count, mask = args
    # samples are cut: every rank has whole groups of its own ones
    if _of_rows(x, w):
        dy, mean, rstd = (share_as(tensor, x, x.dim_cut, func).contiguous() for tensor in (dy, mean, rstd))
        rows = x.owners.counts[x.axis.index]
        dx, *others = func(dy, x.local.contiguous(), mean, rstd, w, rows, channels, area, count, mask)
        sums = (None if o is None else Sum.of(o, x.axis, x.origin, spread=False) for o in others)
        return (None if dx is None else x.with_local(dx), *sums)
    # channels are cut, and groups with them
    x = as_weights(x, w)
    groups = _group_owners(func, x, channels, count, args)
    rank = x.axis.index
    dy = share_as(dy, x, x.dim_cut, func)
    # a whole weight is cut to this rank's channels
    wl = None if w is None else w.local if is_part(w) else x.share(w, 0)
    statistics = mean.local.contiguous(), rstd.local.contiguous()  # the kernel reads them as if they were
    sizes = n, x.owners.counts[rank], area, groups.counts[rank]
    dx, dw, db = func(dy.contiguous(), x.local.contiguous(), *statistics, wl, *sizes, mask)
    return tuple(None if tensor is None else x.with_local(tensor, d) for tensor, d in ((dx, 1), (dw, 0), (db, 0)))


def _total(tensor: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """Returns the sum over the ranks of these axes. Collective; not differentiable."""
    for axis in axes:
        tensor = all_sum(tensor, axis)
    return tensor


class _Standardised(torch.autograd.Function):
    """Normalises this rank's tile with statistics over `dims` and over the ranks of `axes`: (y, mean, variance).

    Mean and variance have no gradient.

    weight, bias  None, or of a shape that broadcasts to x's
    count         elements that one mean is over, on all ranks
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dims: list[int],
        axes: tuple[Axis, ...], count: int, eps: float,
    ):  # fmt: skip
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = _total(wide.sum(dims, True), axes) / count
        centred = wide - mean
        del wide
        var = _total(centred.square().sum(dims, True), axes) / count
        rstd = torch.rsqrt(var + eps)
        y = centred.mul_(rstd)  # a tile is large: what has been used is written over
        if weight is not None:
            y.mul_(weight)
        if bias is not None:
            y.add_(bias)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.over = dims, axes, count, eps
        ctx.mark_non_differentiable(mean, var)
        return y.to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *unused: Any):
        """Returns the gradients of x (by two sums over ranks), weight and bias (this rank's summands), else None."""
        (x, weight, bias, mean, rstd), (dims, axes, count, _) = ctx.saved_tensors, ctx.over
        if torch.is_grad_enabled():  # `create_graph=True`: by operations that autograd can differentiate again
            return (*_differentiable(gradient, x, weight, bias, *ctx.over), None, None, None, None)
        gradient = gradient.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean).mul_(rstd)
        dw = None if weight is None else (gradient * normal).sum_to_size(weight.shape).to(weight.dtype)
        db = None if bias is None else gradient.sum_to_size(bias.shape).to(bias.dtype)
        if not ctx.needs_input_grad[0]:  # the same on all ranks, so none waits in the all-reduce below
            return None, dw, db, None, None, None, None
        inner = gradient if weight is None else gradient * weight
        del gradient
        # one all-reduce for both sums
        sums = torch.stack([inner.sum(dims, True), (inner * normal).sum(dims, True)])
        first, second = (_total(sums, axes) / count).unbind(0)
        # without a weight, `inner` may be the gradient that was handed in, and is not ours to write over
        dx = inner - first if weight is None else inner.sub_(first)
        dx = dx.sub_(normal.mul_(second)).mul_(rstd)
        return dx.to(x.dtype), dw, db, None, None, None, None


def _differentiable(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dims: list[int],
    axes: tuple[Axis, ...], count: int, eps: float,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Returns the gradients of x, weight and bias by differentiable operations, from statistics computed again."""
    # derivatives of statistics over ranks are not known where channels are cut too
    if any(isinstance(tensor, Distributed) for tensor in (gradient, x, weight, bias)):
        raise Uncut("a second derivative through the norm of tiles whose channels tp cuts: use domain alone")

    def mean_of(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.sum(dims, True)
        for axis in axes:
            tensor = sum_over(tensor, axis, TAG)
        return tensor / count

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - mean_of(wide)
    rstd = torch.rsqrt(mean_of(centred.square()) + eps)
    normal, gradient = centred * rstd, gradient.to(wide.dtype)
    inner = gradient if weight is None else gradient * weight
    dx = (inner - mean_of(inner) - normal * mean_of(inner * normal)) * rstd
    dw = None if weight is None else (gradient * normal).sum_to_size(weight.shape).to(weight.dtype)
    db = None if bias is None else gradient.sum_to_size(bias.shape).to(bias.dtype)
    return dx.to(x.dtype), dw, db


def _by_group(
    input: torch.Tensor, cut_dims: list[CutDim], groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float, samples: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (y, mean, variance) of x (N, C, ...), normalised within each of `groups` groups of channels.

    samples  Whether statistics are over all samples (batch norm), not over each one
    """
    tile = opened(input, cut_dims)
    n, channels, *space = tile.shape
    grouped = tile.reshape(n, groups, channels // groups, *space)
    shape = [1, groups, -1, *[1] * len(space)]
    weight, bias = (None if t is None else t.view(shape) for t in (used(weight, cut_dims), used(bias, cut_dims)))
    dims = [0] * samples + list(range(2, grouped.dim()))
    # elements of the whole field: a part has the whole tensor's shape
    count = input.numel() // (groups if samples else groups * n)
    axes = tuple(cut.axis for cut in cut_dims)
    y, mean, var = _Standardised.apply(grouped, weight, bias, dims, axes, count, eps)
    return placed(y.reshape(tile.shape), cut_dims), mean, var


@answers(F.group_norm, torch.group_norm, cut_once=False)
def group_norm_of_tiles(
    input: torch.Tensor, num_groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Returns `F.group_norm` of a tensor of which any spatial dim may be cut."""
    cut_dims = cuts(input, range(2, input.dim()))
    if not cut_dims:
        return F.group_norm(input, num_groups, weight, bias, eps)
    if input.shape[1] % num_groups:  # torch's own error, which the reshape to groups would come before
        raise RuntimeError(f"{input.shape[1]} channels are not divisible into {num_groups} groups")
    return _by_group(input, cut_dims, num_groups, weight, bias, eps, False)[0]


@answers(F.layer_norm, torch.layer_norm, cut_once=False)
def layer_norm_of_tiles(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Returns `F.layer_norm` of a tensor of which any of the normalised dims may be cut."""
    dims = list(range(-len(normalized_shape), 0))
    cut_dims = cuts(input, dims)
    if not cut_dims:
        return F.layer_norm(input, list(normalized_shape), weight, bias, eps)
    axes, lead = tuple(cut.axis for cut in cut_dims), input.dim() - len(dims)
    # a weight has an element for each index of a cut dim: each rank reads its own, where other norms read all of it
    own = [CutDim(cut.axis, cut.dim - lead, cut.owners) for cut in cut_dims]
    tile, w, b = opened(input, cut_dims), taken(weight, own), taken(bias, own)
    y, _, _ = _Standardised.apply(tile, w, b, dims, axes, math.prod(normalized_shape), eps)
    return placed(y, cut_dims)


@answers(F.rms_norm, torch.rms_norm, cut_once=False)
def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns `F.rms_norm` of a tensor of which any of the normalised dims may be cut."""
    dims = list(range(-len(normalized_shape), 0))
    if not cuts(input, dims):
        return F.rms_norm(input, list(normalized_shape), weight, eps)
    # by operations that parts have rules for; in float32, so that bf16 is rounded once, at the end
    # (`test_norms_over_cut_dims_round_once`)
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    y = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + least)
    return (y if weight is None else y * weight).to(input.dtype)


@label("native_layer_norm", "_fused_rms_norm")
def layer_norm_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels a layer norm, with the labels along the normalised dims united and its weights kept whole. Always True."""
    x, shape = args[0], args[1]
    labels = axes.labels(x)
    last = list(range(x.dim() - len(shape), x.dim()))
    for weight in tensors_in(args[2:]):
        of_weight = axes.labels(weight)
        # a weight of the norm belongs to every index that it runs over
        if of_weight is not None:  # replicated wherever the norm's input is cut along other dims
            axes.keep_whole(of_weight, "a norm's statistics run over it")
    if labels is not None:
        # the norm runs over labelled dims: their indices lie on one rank from here on
        if any(labels.shape[d] > 1 for d in last):
            over = axes.unite_along(labels, [d for d in last if labels.shape[d] > 1])
            # nothing is left apart: the input stays whole
            if all(n == 1 for d, n in enumerate(over.shape)):
                axes.keep_whole(over, "a norm's statistics run over it")
            labels = over
        axes.give(tensors_in(output)[0], labels)
    return True


@label("native_group_norm")
def group_norm_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels the output by x's channels, those of a group united; False if x has labels along other dims, or none."""
    x, w, b, _, channels, _, groups, _ = args
    labels = axes.labels(x)
    if labels is None or any(n > 1 for d, n in enumerate(labels.shape) if d != 1):
        return False
    grouped = labels.reshape(groups, channels // groups)
    axes.unite_along(grouped, [1])
    for weight in (w, b):
        of_weight = axes.labels(weight)
        if of_weight is not None:
            axes.unite(labels.ravel(), of_weight)
    axes.give(output[0], labels)
    return True
