"""Norms of tiles, with statistics over the whole field: group, instance, layer, RMS and batch norm.

    mean = sum_r sum(x_r) / n        var = sum_r sum((x_r - mean)^2) / n        over all ranks' tiles
    y = (x - mean) / sqrt(var + eps) * w + b
    dx = (g - sum_r sum(g) / n - x' sum_r sum(g x') / n) / sqrt(var + eps)      with g = dy * w, x' the normalised x

Two small all-reduces forward over each axis, one backward. Statistics are float32 at least.
Source: Ioffe and Szegedy (2015); Wu and He, "Group Normalization" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.comm import Axis, sum_over
from shardwise.parallel.domain.tiles import CutDim, answers, cuts, opened, placed, taken, used
from shardwise.part.cuts import Uncut
from shardwise.part.gathering import all_sum
from shardwise.part.levels import Distributed
from shardwise.part.moves import TAG
from shardwise.part.sums import plain


def _total(tensor: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """Returns the sum over the ranks of these axes. Collective; not differentiable."""
    for axis in axes:
        tensor = all_sum(tensor, axis)
    return tensor


class _Standardised(torch.autograd.Function):
    """(y, mean, variance) of this rank's tile, over `dims` and over the ranks of the axes; the last two are constants.

    weight, bias  None, or of a shape that broadcasts to x's
    count         elements in all that one mean is of
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
    """Returns the gradients of x, weight and bias by differentiable operations: statistics are computed again."""
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
    """Returns (y, mean, variance) of x (N, C, ...): statistics of each group of channels, of each sample or of all.

    samples  of all: as a batch norm has them
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
def group_norm(
    input: torch.Tensor, num_groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> torch.Tensor:  # fmt: skip
    """`F.group_norm` of a tensor of which any spatial dim may be cut."""
    cut_dims = cuts(input, range(2, input.dim()))
    if not cut_dims:
        return F.group_norm(input, num_groups, weight, bias, eps)
    if input.shape[1] % num_groups:  # torch's own error, which the reshape to groups would come before
        raise RuntimeError(f"{input.shape[1]} channels are not divisible into {num_groups} groups")
    return _by_group(input, cut_dims, num_groups, weight, bias, eps, False)[0]


@answers(F.instance_norm, cut_once=False)
def instance_norm(
    input: torch.Tensor, running_mean: torch.Tensor | None = None, running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, use_input_stats: bool = True,
    momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """`F.instance_norm` of a tensor of which any spatial dim may be cut."""
    cut_dims = cuts(input, range(2, input.dim()))
    if not cut_dims:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if not use_input_stats:  # running statistics are of a channel, whatever the sample
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    count = math.prod(input.shape[2:])
    if count < 2:  # asked of the whole field: a tile may well have a single element
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.size()}")
    y, mean, var = _by_group(input, cut_dims, input.shape[1], weight, bias, eps, False)
    _keep(running_mean, running_var, mean.mean(0).flatten(), var.mean(0).flatten(), count, momentum)
    return y


@answers(F.batch_norm, cut_once=False)
def batch_norm(
    input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """`F.batch_norm` of a tensor of which any dim but that of channels may be cut."""
    cut_dims = cuts(input, (0, *range(2, input.dim())))
    if not cut_dims:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training:
        tile, w, b = opened(input, cut_dims), used(weight, cut_dims), used(bias, cut_dims)
        if running_mean is not None:  # kernels take a 16-bit input, and all else in one dtype
            w, b = (None if t is None else t.to(running_mean.dtype) for t in (w, b))
        return placed(F.batch_norm(tile, running_mean, running_var, w, b, False, momentum, eps), cut_dims)
    count = input.numel() // input.shape[1]
    if count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    y, mean, var = _by_group(input, cut_dims, input.shape[1], weight, bias, eps, True)
    _keep(running_mean, running_var, mean.flatten(), var.flatten(), count, momentum)
    return y


@answers(torch.batch_norm, cut_once=False)
def _torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True):
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _keep(
    running_mean: torch.Tensor | None, running_var: torch.Tensor | None, mean: torch.Tensor, var: torch.Tensor,
    count: int, momentum: float,
) -> None:  # fmt: skip
    """Update running statistics in place, by the same numbers on every rank. The variance is the unbiased one."""
    if running_mean is None or running_var is None:
        return
    with torch.no_grad():
        # past autograd, as the kernels of torch write them: what the same norm of a whole tensor kept stays valid
        running_mean.data.lerp_(plain(mean).to(running_mean.dtype), momentum)  # of channels that tp cuts: all
        running_var.data.lerp_(plain(var * count / (count - 1)).to(running_var.dtype), momentum)


@answers(F.layer_norm, torch.layer_norm, cut_once=False)
def layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> torch.Tensor:  # fmt: skip
    """`F.layer_norm` of a tensor of which any of the dims that it runs over may be cut."""
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
    """`F.rms_norm` of a tensor of which any of the dims that it runs over may be cut."""
    dims = list(range(-len(normalized_shape), 0))
    if not cuts(input, dims):
        return F.rms_norm(input, list(normalized_shape), weight, eps)
    # by operations that parts have rules for; in float32, so that bf16 is rounded once, at the end
    # (`test_norms_over_cut_dims_round_once`)
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    y = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + least)
    return (y if weight is None else y * weight).to(input.dtype)


__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]
