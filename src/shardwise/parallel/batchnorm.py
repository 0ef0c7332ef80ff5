"""Batch normalisation over a micro-batch on all its ranks. Cut channels: part/channels; tiles: domain/norms.

Each rank sums over its samples; two small all-reduces give the mean and then the variance of all of them:

    n = sum_r n_r        mean = sum_r sum(x_r) / n        var = sum_r sum((x_r - mean)^2) / n

and every rank updates the running statistics with the same numbers. Backward is autograd through the same sums, an
all-reduce's adjoint being an all-reduce. A rank whose sample is only a stand-in adds nothing.

Any module whose own forward calls `batch_norm` in training is met, whatever its class; one that was already seen by
torch's SyncBatchNorm is treated as the plain one, on every device.
Channels that tp cuts are summed by the ranks that hold the same ones.
Bytes on the wire: 2 (N-1)/N * (2 C + 1) numbers forward for each layer, about the same backward.
Source: Ioffe and Szegedy (2015); over devices: Peng et al., "MegDet" (CVPR 2018).

What this does not do: fuse kernels; the local part is plain PyTorch ops.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.overrides import TorchFunctionMode

from shardwise.comm import Axis, sum_over
from shardwise.host import require
from shardwise.layout import Plan
from shardwise.parallel.slots import Phase
from shardwise.part import Part, plain
from shardwise.precision import Precision

_TAG = "batch_norm"
NORMALISED = "batch norm over ranks"  # in the metadata of the node of autograd that gave one's output


class _SumOfShares(torch.autograd.Function):
    """The sum over samples of statistics whose channels are cut: ranks with the same channels add theirs up."""

    @staticmethod
    def forward(ctx, sums: Part, axis: Axis) -> Part:
        ctx.axis, ctx.lead = axis, sums.shell()
        return sums.with_local(sum_over(sums.local, axis, _TAG))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        mine = gradient.local if isinstance(gradient, Part) else ctx.lead.share(gradient, 0)
        return ctx.lead.with_local(sum_over(mine, ctx.axis, _TAG)), None


def _over_channels(statistic: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return statistic.view(1, -1, *([1] * (like.dim() - 2)))


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
    """Training-mode batch norm of x (B_local, C, *) with statistics over all ranks' samples."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    share = 0.0 if phase.stand_in else 1.0
    dims = [0, *range(2, x.dim())]
    count = wide.new_full((1,), share * x.numel() / x.shape[1])
    sums = wide.sum(dims) * share
    if isinstance(sums, Part):
        n, total = sum_over(count, axis, _TAG)[0].detach(), _SumOfShares.apply(sums, axis)
    else:
        totals = sum_over(torch.cat([sums, count]), axis, _TAG)
        n, total = totals[-1].detach(), totals[:-1]
    mean = total / n
    centred = wide - _over_channels(mean, x)
    squares = centred.square().sum(dims) * share
    var = (_SumOfShares.apply(squares, axis) if isinstance(squares, Part) else sum_over(squares, axis, _TAG)) / n
    if axis.rehearsal is None:
        require(n > 1, lambda: ValueError("batch norm needs more than one value per channel over all ranks"))
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(plain(mean).to(running_mean.dtype), momentum)
            running_var.lerp_(plain(var * n / (n - 1)).to(running_var.dtype), momentum)
    y = centred * _over_channels(torch.rsqrt(var + eps), x)
    if weight is not None:
        y = y * _over_channels(weight.to(y.dtype), x)
    if bias is not None:
        y = y + _over_channels(bias.to(y.dtype), x)
    y = y.to(x.dtype)
    if y.grad_fn is not None:
        y.grad_fn.metadata[NORMALISED] = True
    return y


class _MeetsBatchNorm(TorchFunctionMode, ABC):
    """Sends both spellings of batch norm to `_batch_norm`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func is torch.batch_norm:
            x, weight, bias, mean, var, training, momentum, eps = args[:8]
            return self._batch_norm(x, mean, var, weight, bias, training, momentum, eps)
        return func(*args, **kwargs)

    @abstractmethod
    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """What batch norm is while this mode is active; arguments as `functional.batch_norm` has them."""


class JoinBatchNorm(_MeetsBatchNorm):
    """While active, batch norm in training has statistics over all ranks of the axis."""

    def __init__(self, axis: Axis, phase: Phase):
        super().__init__()
        self.axis = axis
        self.phase = phase

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        if not training:
            if running_mean is not None:  # kernels take a 16-bit input, and all else in one dtype
                weight, bias = (None if t is None else t.to(running_mean.dtype) for t in (weight, bias))
            return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        axis, phase = (Axis.alone(self.axis.name), Phase()) if self.phase.same else (self.axis, self.phase)
        return synced_batch_norm(x, running_mean, running_var, weight, bias, momentum, eps, axis, phase)


class CountBatchNorm(_MeetsBatchNorm):
    """While active on tensors without values, `met` counts the batch norms in training.

    One value for each channel is let through and noted in `alone`: a run joins it with others' or fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met, self.alone = 0, False

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        if not training:
            return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        self.met += 1
        if x.numel() == x.shape[1]:  # of which there is no unbiased variance
            self.alone, running_mean, running_var = True, None, None
        return torch.batch_norm(
            x, weight, bias, running_mean, running_var, True, momentum, eps, torch.backends.cudnn.enabled
        )


class FindBatchNorm(_MeetsBatchNorm):
    """Mode that records in `found` which modules call batch norm in training; mean 0 and variance 1 are used.

    `found` has the modules that called it, `rows` how many values of a channel each call was given.
    """

    def __init__(self, running: list[nn.Module]):
        super().__init__()
        self.running = running  # the modules whose forwards are running, outermost first
        self.found: list[nn.Module] = []
        self.rows: list[int] = []

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        if training:
            self.rows.append(x.numel() // max(x.shape[1], 1))
            if self.running and self.running[-1] not in self.found:
                self.found.append(self.running[-1])
            dtype = x.dtype if weight is None else weight.dtype  # under autocast wider than the input
            running_mean, running_var = x.new_zeros(x.shape[1], dtype=dtype), x.new_ones(x.shape[1], dtype=dtype)
        return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)


@dataclass(frozen=True)
class Statistics:
    """What one batch norm in training normalised by: over `rows` values of each channel; `path` of its module."""

    path: str
    rows: int
    mean: torch.Tensor
    var: torch.Tensor


class KnownStatistics(FindBatchNorm):
    """Mode that notes each batch norm's statistics in `noted`, and normalises by those of another run, `known`, where
    that had as many batch norms before this one in the same module."""

    def __init__(self, names: Mapping[nn.Module, str], known: list[Statistics] | None = None):
        super().__init__([])
        self.names, self.known = names, known
        self.syncing: list[nn.Module] = []  # put into eval mode for this run
        self.noted: list[Statistics] = []

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        caller = self.running[-1] if self.running else None
        if not (training or caller in self.syncing) or not x.numel():
            return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        dims, rows = [0, *range(2, x.dim())], x.numel() // x.shape[1]
        mean = plain(wide.sum(dims)) / rows
        var = plain((wide - _over_channels(mean, x)).square().sum(dims)) / rows
        at = len(self.noted)
        self.noted.append(Statistics(self.names.get(caller, ""), rows, mean, var))
        if self.known is not None and at < len(self.known) and self.known[at].path == self.noted[at].path:
            mean, var = self.known[at].mean, self.known[at].var
        dtype = x.dtype if weight is None else weight.dtype
        return functional.batch_norm(x, mean.to(dtype), var.to(dtype), weight, bias, False, momentum, eps)


def joins_batch_norms(data_ranks: int, plan: Plan) -> bool:
    """Whether a run replaces the kernels of batch norms.

    Over several ranks for their statistics; under recompute since a second forward must not update them again; in 16
    bits since statistics are float32, which no kernel takes beside weights of 16 bits.
    """
    return data_ranks > 1 or plan.remat != "none" or Precision.of(plan).compute.itemsize < 4


def sync_module(module: nn.Module, axis: Axis, phase: Phase) -> None:
    """Make this module's forward use statistics over all ranks, each time that it runs."""

    def synced(forward: Callable) -> Callable:
        def run(*args, **kwargs):
            if phase.looked_at:
                return forward(*args, **kwargs)
            with JoinBatchNorm(axis, phase):
                return forward(*args, **kwargs)

        return run

    if isinstance(module, SyncBatchNorm):
        module.forward = types.MethodType(_BatchNorm.forward, module)
    inside = getattr(module.forward, "inside", None)  # of one that is computed again in backward
    if inside is not None:
        inside(synced)
    else:
        module.forward = synced(module.forward)


def batch_norm_modules(module: nn.Module) -> list[nn.Module]:
    """Modules of torch's batch norm classes."""
    return [child for child in module.modules() if isinstance(child, _BatchNorm)]
