"""Batch normalisation over a micro-batch on all its ranks. Cut channels, and tiles: part/rules/batch_norms.

Each rank sums over its samples; two small all-reduces give the mean and then the variance of all of them:

    n = sum_r n_r        mean = sum_r sum(x_r) / n        var = sum_r sum((x_r - mean)^2) / n

and every rank updates the running statistics with the same numbers. Backward is autograd through the same sums, an
all-reduce's adjoint being an all-reduce. A rank whose sample is only a stand-in adds nothing.

Any module whose own forward calls `batch_norm` in training is met, whatever its class; one that was already seen by
torch's SyncBatchNorm is treated as the plain one, on every device.
Channels that tp cuts are summed by the ranks that hold the same ones.
Bytes on the wire: 2 (N-1)/N * (2 C + 1) numbers forward for each layer, about the same backward.
Memory: the input alone is kept for backward, in its own dtype, as torch's kernels keep it.
Source: Ioffe and Szegedy (2015); over devices: Peng et al., "MegDet" (CVPR 2018).

What is normalised and summed on one rank is torch's kernels' work. Shares of tp and tiles, and backwards that are
differentiated themselves, go through plain operations: several times as slow, and they keep four tensors.

What this does not do: the last sum of backward in the same kernel, as `SyncBatchNorm` has it on some devices.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.overrides import TorchFunctionMode

from shardwise.comm import Axis, sum_over
from shardwise.host import require
from shardwise.layout import Plan
from shardwise.parallel.slots import Phase
from shardwise.part import Part, plain
from shardwise.part.sums import linear, whole_gradient
from shardwise.precision import Precision

_TAG = "batch_norm"


def _sum_of_shares(sums: Part, axis: Axis) -> torch.Tensor:
    """Returns, differentiably, statistics whose channels tp cuts, summed over the ranks that hold the same channels."""
    lead = sums.shell()

    def over_ranks(part: torch.Tensor) -> Part:  # and its own adjoint
        mine = part.local if isinstance(part, Part) else lead.share(part, 0)
        return lead.with_local(sum_over(mine, axis, _TAG))

    return linear(sums, over_ranks, over_ranks, once=True)


def _over_channels(statistic: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return statistic.view(1, -1, *([1] * (like.dim() - 2)))


@dataclass(frozen=True)
class _Over:
    """The ranks over which a batch norm takes its statistics; `counts`: this rank's samples enter them."""

    axis: Axis
    eps: float  # of the norm
    counts: bool

    def of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (n, mean (C), variance (C)) of all ranks' values, of this rank's x (B, C, *)."""
        mean, var = self._own(x)
        own = mean.new_full((1,), float(self.counts) * x.numel() / x.shape[1])
        totals = sum_over(torch.cat([mean * own, own]), self.axis, _TAG)
        n = totals[-1]
        common = totals[:-1] / n
        # a second sum around the common mean: one of x^2 would cancel where the mean is large beside the deviation
        squares = (var + (mean - common).square()) * own
        return n, common, sum_over(squares, self.axis, _TAG) / n

    def _own(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns (mean (C), variance (C)) of x, in at least 32 bits."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.axis.rehearsal is None:
            # momentum 0: the kernel takes the dtype of its results from these, and changes nothing in them
            running = x.new_empty(x.shape[1], dtype=wide)
            return torch.batch_norm_update_stats(x, running, running.clone(), 0.0)
        # the other has no form without values: torch would make some, as large as x
        return tuple(stat.to(wide) for stat in torch.native_batch_norm(x, None, None, None, None, True, 0.0, 0.0)[1:])


class _Normalised(torch.autograd.Function):
    """Returns (normalised x, count, mean, variance) over all ranks, of x (B, C, *), weight and bias (C) or None."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, over: _Over):
        n, mean, var = over.of(x)
        y = functional.batch_norm(x, mean, var, weight, bias, False, 0.0, over.eps)  # "evaluation": by these statistics
        ctx.save_for_backward(x, weight, bias, n, mean, var)
        ctx.over = over
        ctx.mark_non_differentiable(n, mean, var)
        return y, n, mean, var

    @staticmethod
    def backward(ctx, dy: torch.Tensor, *unused: None):
        """Returns the gradients of x (B, C, *), weight and bias: dx by sums over ranks, the others this rank's own."""
        x, weight, bias, n, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is differentiated itself
            return _Normalised._again(ctx, dy, x, weight, bias)
        inverse = torch.rsqrt(var + ctx.over.eps)
        dx, dw, db = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, mean, var, mean, inverse, False, ctx.over.eps, (True, True, True)
        )
        # dx = (dy - sum(dy) / n - xhat * sum(dy * xhat) / n) * inverse * weight, where xhat = (x - mean) * inverse
        # the kernel gives the first term alone, since it was told of fixed statistics; the sums run over all ranks
        total_b, total_w = sum_over(torch.cat([db, dw]), ctx.over.axis, _TAG).chunk(2)
        if ctx.over.counts:  # a stand-in's x did not enter mean and variance, so no gradient comes back through them
            scale = inverse / n if weight is None else inverse / n * weight
            shift = functional.batch_norm(x, mean, var, scale * total_w, scale * total_b, False, 0.0, ctx.over.eps)
            dx = dx - shift
        needed = ctx.needs_input_grad
        # dw and db are this rank's summands: the technique that holds the weights sums them with the other gradients
        return dx, dw if needed[1] else None, db if needed[2] else None, None

    @staticmethod
    def _again(ctx, dy: torch.Tensor, *inputs: Any):
        """Returns the gradients of `_Normalised` by differentiable operations, for second derivatives."""
        needed = [tensor for tensor, wanted in zip(inputs, ctx.needs_input_grad, strict=False) if wanted]
        x, weight, bias = inputs
        y = _in_operations(x, weight, bias, ctx.over)[0]
        gradients = iter(torch.autograd.grad(y, needed, dy, create_graph=True))
        return *(next(gradients) if wanted else None for wanted in ctx.needs_input_grad[:3]), None


def synced_batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    axis: Axis,
    phase: Phase,
) -> torch.Tensor:
    """Returns x (B_local, C, *) normalised by statistics over all ranks' samples; updates the running ones.

    Collective over the axis. `ValueError`, as of torch, for one value a channel over all ranks.
    """
    over = _Over(axis, eps, counts=not phase.stand_in)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    # parts have rules for single operations, not for an autograd function of ours; torch's kernels take no empty x
    plainly = isinstance(x, Part) or isinstance(weight, Part) or not x.numel() or torch.compiler.is_compiling()
    y, n, mean, var = (_in_operations if plainly else _Normalised.apply)(x, weight, bias, over)
    if axis.rehearsal is None:  # without values there is no n to look at
        require(n > 1, lambda: ValueError("batch norm needs more than one value per channel over all ranks"))
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(plain(mean).to(running_mean.dtype), momentum)
            running_var.lerp_(plain(var * n / (n - 1)).to(running_var.dtype), momentum)  # unbiased, as torch keeps it
    return y


def _alone(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    *,
    rehearsed: bool,
) -> torch.Tensor:
    """Returns x (B, C, *) normalised by torch's kernel, on one rank; updates the running statistics."""
    wide = torch.promote_types(x.dtype, torch.float32)  # a kernel of 16 bits takes weights of 32
    weight, bias = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    # one value for each channel: `functional.batch_norm` raises, where a rehearsed rank's share may be that small
    if rehearsed and x.numel() == x.shape[1]:
        return torch.batch_norm(x, weight, bias, None, None, True, momentum, eps, True)
    # a kernel keeps what it is given for backward, and does not tell that it wrote into it, which recompute asks
    kept = [(buffer, buffer.clone()) for buffer in (running_mean, running_var) if buffer is not None]
    mean, var = (copy for _, copy in kept) if kept else (None, None)
    y = functional.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    with torch.no_grad():
        for before, after in kept:
            before.copy_(after)
    return y


def _in_operations(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, over: _Over
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (normalised x, count, mean, variance) as `_Normalised`, by operations that parts and autograd know."""
    axis, share = over.axis, float(over.counts)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [0, *range(2, x.dim())]
    count = wide.new_full((1,), share * x.numel() / x.shape[1])
    sums = wide.sum(dims) * share
    if isinstance(sums, Part):  # a share of the channels: added beside the count, not in one message with it
        n, total = sum_over(count, axis, _TAG)[0].detach(), _sum_of_shares(sums, axis)
    else:
        totals = sum_over(torch.cat([sums, count]), axis, _TAG)
        # weights that tp cuts bring gradients in shares to statistics that are not cut
        n, total = totals[-1].detach(), whole_gradient(totals[:-1])
    mean = total / n
    centred = wide - _over_channels(mean, x)
    squares = centred.square().sum(dims) * share
    cut = isinstance(squares, Part)
    var = (_sum_of_shares(squares, axis) if cut else whole_gradient(sum_over(squares, axis, _TAG))) / n
    y = centred * _over_channels(torch.rsqrt(var + over.eps), x)
    if weight is not None:
        y = y * _over_channels(weight, x)
    if bias is not None:
        y = y + _over_channels(bias, x)
    return y.to(x.dtype), n, mean, var


class _MeetsBatchNorm(TorchFunctionMode, ABC):
    """Mode that calls `_batch_norm` for both of torch's functions, `functional.batch_norm` and `torch.batch_norm`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func is torch.batch_norm:  # weights stand before the running statistics there; the last is of cuDNN
            x, weight, bias, mean, var, training, momentum, eps = args[:8]
            return self._batch_norm(x, mean, var, weight, bias, training, momentum, eps)
        return func(*args, **kwargs)

    @abstractmethod
    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Returns the normalised x; arguments as `functional.batch_norm` has them."""


class JoinBatchNorm(_MeetsBatchNorm):
    """Mode in which batch norm in training takes its statistics over all ranks of the axis."""

    def __init__(self, axis: Axis, phase: Phase):
        super().__init__()
        self.axis = axis
        self.phase = phase

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Returns the batch norm of x (B, C, *): in training by all ranks' statistics, unless samples are the same."""
        if not training:
            if running_mean is not None:  # kernels take a 16-bit input, and all else in one dtype
                weight, bias = (None if t is None else t.to(running_mean.dtype) for t in (weight, bias))
            return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        # on the same samples everywhere, sums over ranks would count each sample once for each rank
        axis, phase = (Axis.alone(self.axis.name), Phase()) if self.phase.same else (self.axis, self.phase)
        if axis.size == 1 and not isinstance(x, Part) and not isinstance(weight, Part):
            return _alone(
                x, running_mean, running_var, weight, bias, momentum, eps, rehearsed=axis.rehearsal is not None
            )
        return synced_batch_norm(x, running_mean, running_var, weight, bias, momentum, eps, axis, phase)


class CountBatchNorm(_MeetsBatchNorm):
    """Mode, for tensors without values, that counts the batch norms in training in `met`.

    One value for each channel is let through and noted in `alone`: a run joins it with others' or fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met, self.alone = 0, False

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Returns the batch norm of x as torch gives it; notes that it trained, and on one value a channel."""
        if not training:
            return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        self.met += 1
        if x.numel() == x.shape[1]:  # of which there is no unbiased variance
            self.alone, running_mean, running_var = True, None, None
        return torch.batch_norm(
            x, weight, bias, running_mean, running_var, True, momentum, eps, torch.backends.cudnn.enabled
        )


class FindBatchNorm(_MeetsBatchNorm):
    """Mode that records who calls batch norm in training, and normalises by mean 0 and variance 1.

    modules  that called it
    calls    (module, how many values of a channel it was given) of each call
    """

    def __init__(self, running: list[nn.Module]):
        super().__init__()
        self.running = running  # the modules whose forwards are running, outermost first
        self.modules: list[nn.Module] = []
        self.calls: list[tuple[nn.Module | None, int]] = []

    @property
    def on_all(self) -> bool:
        """Whether a module is running that is given all samples of a micro-batch (parallel/on_all_samples)."""
        return any(getattr(module.forward, "looking", None) is not None for module in self.running)

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Returns the batch norm of x by mean 0 and variance 1, so that samples do not mix; notes the module."""
        if training and not self.on_all:
            self.calls.append((self.running[-1] if self.running else None, x.numel() // max(x.shape[1], 1)))
            if self.running and self.running[-1] not in self.modules:
                self.modules.append(self.running[-1])
            dtype = x.dtype if weight is None else weight.dtype  # under autocast wider than the input
            running_mean, running_var = x.new_zeros(x.shape[1], dtype=dtype), x.new_ones(x.shape[1], dtype=dtype)
            training = False
        return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


@dataclass(frozen=True)
class Statistics:
    """Mean and variance (C) by which one batch norm in training normalised.

    path  of its module
    rows  values of each channel that they are of
    """

    path: str
    rows: int
    mean: torch.Tensor  # (C,)
    var: torch.Tensor  # (C,), not corrected for the number of values


class KnownStatistics(FindBatchNorm):
    """Mode that notes each batch norm's statistics in `noted`, and normalises by another run's, `earlier`.

    The n-th call takes those of the other run's n-th call, if that was of the same module; else its own.
    """

    def __init__(self, names: Mapping[nn.Module, str], earlier: list[Statistics] | None = None):
        super().__init__([])
        self.names, self.earlier = names, earlier
        self.syncing: list[nn.Module] = []  # put into eval mode for this run
        self.noted: list[Statistics] = []

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Returns the batch norm of x by its own statistics, which are noted, or by those of an earlier run."""
        caller = self.running[-1] if self.running else None
        # `syncing`: SyncBatchNorm in training would look for a CUDA device, and so runs in eval mode here
        # no statistics are taken of given ones, nor of no elements
        if not (training or caller in self.syncing) or not x.numel() or self.on_all:
            return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        dims, rows = [0, *range(2, x.dim())], x.numel() // x.shape[1]
        mean = plain(wide.sum(dims)) / rows
        var = plain((wide - _over_channels(mean, x)).square().sum(dims)) / rows
        # a norm that runs twice has two entries, by their order
        number = len(self.noted)
        self.noted.append(Statistics(self.names.get(caller, ""), rows, mean, var))
        # statistics of a run before, where this call stands at the same place of it
        other = self.earlier[number] if self.earlier is not None and number < len(self.earlier) else None
        if other is not None and other.path == self.noted[number].path:
            mean, var = other.mean, other.var
        dtype = x.dtype if weight is None else weight.dtype
        return functional.batch_norm(x, mean.to(dtype), var.to(dtype), weight, bias, False, momentum, eps)


def joins_batch_norms(data_ranks: int, plan: Plan) -> bool:
    """Returns whether a run replaces the kernels of batch norms.

    Over several ranks for their statistics; under recompute since a second forward must not update them again; in 16
    bits since statistics are float32, which no kernel takes beside weights of 16 bits.
    """
    return data_ranks > 1 or plan.remat != "none" or Precision.of(plan).compute.itemsize < 4


def sync_module(module: nn.Module, axis: Axis, phase: Phase) -> None:
    """Make this module's forward use statistics over all ranks, each time that it runs."""

    def synced(forward: Callable) -> Callable:
        def run(*args, **kwargs):
            if phase.looked_at:  # the look at a few samples has a mode of its own for batch norms
                return forward(*args, **kwargs)
            with JoinBatchNorm(axis, phase):
                return forward(*args, **kwargs)

        return run

    if isinstance(module, SyncBatchNorm):  # its own forward would sum over torch's default group, and on GPUs alone
        module.forward = types.MethodType(_BatchNorm.forward, module)
    # a norm that is itself a recomputed block is wrapped within recompute: else its second forward, which backward
    # starts, would run outside the mode, with this rank's statistics
    inside = getattr(module.forward, "inside", None)
    if inside is not None:
        inside(synced)
    else:
        module.forward = synced(module.forward)


def batch_norm_modules(module: nn.Module) -> list[nn.Module]:
    """Returns the modules of torch's batch norm classes."""
    return [child for child in module.modules() if isinstance(child, _BatchNorm)]
