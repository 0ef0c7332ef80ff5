"""Rules of batch norms whose channels tp cuts (pooling has none), and of tiles. Cut samples: parallel/batchnorm

    x (N, C, ...) cut along C, weight and bias alike    ->    y cut alike; nothing is sent for it
    running statistics, whole on every rank             ->    this rank's channels renewed, then gathered: 2 C numbers

What this does not do: statistics over cut samples or positions (`parallel.batchnorm`, and Uncut here), or kernels of
other names than torch's own.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gathered
from shardwise.part.labels import Axes, label
from shardwise.part.moves import share_as
from shardwise.part.rules.norms import _by_group, as_weights
from shardwise.part.sums import plain
from shardwise.part.tensor import Part, is_part, no_rule, parts_in, rule
from shardwise.part.tiles.windows import answers, cuts, opened, placed, used

# names in a trace for the compiler; an overload of the second takes no running statistics
_TRACED = ("_native_batch_norm_legit_no_training", "_native_batch_norm_legit")


def _as_in_a_run(args: tuple, name: str) -> tuple:
    """Returns the arguments of a traced batch norm as `native_batch_norm` takes them."""
    # (input, weight, bias, mean, var, momentum, eps), to which `training` is added
    if name == _TRACED[0]:
        return (*args[:5], False, *args[5:])
    # six arguments are the overload without running mean and variance
    return (*args[:3], None, None, *args[3:]) if len(args) == 6 else args


def _of_channels(x: Any, t: torch.Tensor | None) -> torch.Tensor | None:
    """Returns this rank's channels of a weight or a statistic `t` (C,); None for None."""
    return None if t is None else t.local if is_part(t) else x.share(t, 0).contiguous()


def _lead(func: Any, x: Any, args: tuple) -> Part:
    """Returns x; raises `Uncut` unless it is cut along channels alone, with some on every rank."""
    plain = not isinstance(x.local, Part) if is_part(x) else False
    vectors = [part for part in parts_in(args) if part.dim() == 1]
    if plain and x.dim_cut == 1 and all(x.owners.counts) and all(part.dim_cut == 0 for part in vectors):
        return x
    raise Uncut(f"a batch norm's statistics run over a cut dim ({no_rule(func, parts_in(args))})")


@rule("native_batch_norm", *_TRACED)
def batch_norm(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns (output cut like x, mean, inverse standard deviation), the last two (C,) cut along channels.

    In training it updates the running statistics, which are whole on every rank, in place.
    """
    # two names that a trace for the compiler meets: run as the operation that a run calls
    if func._opname in _TRACED:
        func, args = torch.ops.aten.native_batch_norm.default, _as_in_a_run(args, func._opname)
    x, weight, bias, mean, var, training, momentum, eps = args
    x = _lead(func, as_weights(x, weight, bias), args)
    own = [_of_channels(x, tensor) for tensor in (weight, bias)]
    kept = [None if tensor is None else _of_channels(x, tensor) for tensor in (mean, var)]
    # the kernel renews them in place: in copies, which are put into the whole buffers below
    kept = [tensor.clone() if training and tensor is not None else tensor for tensor in kept]
    y, *statistics = func(x.local, *own, *kept, training, momentum, eps)
    # in training running statistics are renewed in the whole buffers, which every rank has
    if training:
        for whole, mine in zip((mean, var), kept, strict=True):
            if whole is not None and mine is not None:
                whole.copy_(gathered(x.with_local(mine, 0)))
    # the kernel gives empty statistics outside of training
    of_channels = [x.with_local(tensor, 0) if tensor.numel() else tensor for tensor in statistics]
    return (x.with_local(y), *of_channels)


@rule("native_batch_norm_backward")
def batch_norm_backward(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns a batch norm's (dx, dweight, dbias), cut along channels; None for each that is not asked for."""
    dy, x, weight, mean, var, save_mean, save_inverse, training, eps, mask = args
    x = _lead(func, as_weights(x, weight), args)
    statistics = [_of_channels(x, tensor) for tensor in (weight, mean, var)]
    # in evaluation nothing was saved: tensors without elements, or None
    saved = [_of_channels(x, kept) if kept is not None and kept.numel() else kept for kept in (save_mean, save_inverse)]
    gradients = func(share_as(dy, x, x.dim_cut, func), x.local, *statistics, *saved, training, eps, mask)
    dims = (1, 0, 0)  # of channels in (N, C, ...), (C,) and (C,)
    return tuple(None if grad is None else x.with_local(grad, d) for grad, d in zip(gradients, dims, strict=True))


@answers(F.instance_norm, cut_once=False)
def instance_norm(
    input: torch.Tensor, running_mean: torch.Tensor | None = None, running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, use_input_stats: bool = True,
    momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Returns `F.instance_norm` of a tensor of which any spatial dim may be cut."""
    cut_dims = cuts(input, range(2, input.dim()))
    if not cut_dims:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if not use_input_stats:  # running statistics are of a channel, whatever the sample
        return batch_norm_of_tiles(input, running_mean, running_var, weight, bias, False, momentum, eps)
    count = math.prod(input.shape[2:])
    if count < 2:  # asked of the whole field: a tile may well have a single element
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.size()}")
    y, mean, var = _by_group(input, cut_dims, input.shape[1], weight, bias, eps, False)
    _keep(running_mean, running_var, mean.mean(0).flatten(), var.mean(0).flatten(), count, momentum)
    return y


@answers(F.batch_norm, cut_once=False)
def batch_norm_of_tiles(
    input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Returns `F.batch_norm` of a tensor of which any dim but that of channels may be cut."""
    cut_dims = cuts(input, (0, *range(2, input.dim())))
    if not cut_dims:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training:
        tile, w, b = opened(input, cut_dims), used(weight, cut_dims), used(bias, cut_dims)
        if running_mean is not None:  # kernels take a 16-bit input, and all else in one dtype
            w, b = (None if t is None else t.to(running_mean.dtype) for t in (w, b))
        return placed(F.batch_norm(tile, running_mean, running_var, w, b, False, momentum, eps), cut_dims)
    count = input.numel() // input.shape[1]
    if count < 2:  # asked of the whole field: a tile may well have a single element
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    y, mean, var = _by_group(input, cut_dims, input.shape[1], weight, bias, eps, True)
    _keep(running_mean, running_var, mean.flatten(), var.flatten(), count, momentum)
    return y


@answers(torch.batch_norm, cut_once=False)
def _torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True):
    return batch_norm_of_tiles(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _keep(
    running_mean: torch.Tensor | None, running_var: torch.Tensor | None, mean: torch.Tensor, var: torch.Tensor,
    count: int, momentum: float,
) -> None:  # fmt: skip
    """Updates running mean and (unbiased) variance in place, by the same numbers on every rank.

    mean, var  (C,) of this batch, the variance biased;  count  elements that each is computed over, on all ranks
    """
    if running_mean is None or running_var is None:
        return
    with torch.no_grad():
        # past autograd, as the kernels of torch write them: what the same norm of a whole tensor kept stays valid
        running_mean.data.lerp_(plain(mean).to(running_mean.dtype), momentum)  # of channels that tp cuts: all
        running_var.data.lerp_(plain(var * count / (count - 1)).to(running_var.dtype), momentum)


@label("native_batch_norm")
def batch_norm_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels the output by x's channels, united with weight and bias; False if x has other labels, or none."""
    labels = axes.labels(args[0])
    if labels is None or any(n > 1 for d, n in enumerate(labels.shape) if d != 1):
        return False
    for weight in args[1:3]:
        of_weight = axes.labels(weight)
        if of_weight is not None:
            axes.unite(labels.ravel(), of_weight)
    axes.give(output[0], labels)
    return True
