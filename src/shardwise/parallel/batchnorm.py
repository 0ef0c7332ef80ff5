"""Batch normalisation by statistics over all data ranks' samples. Sharded channels and tiles: part/rules/batch_norms.

Each rank sums over its samples; two small all-reduces give the mean and then the variance of all samples:

    n = sum_r n_r        mean = sum_r sum(x_r) / n        var = sum_r sum((x_r - mean)^2) / n

and every rank updates the running statistics with the same numbers. Backward is autograd through the same sums, an
all-reduce's adjoint being an all-reduce. A rank whose sample is only a stand-in adds nothing.

Any module whose own forward calls `batch_norm` in training is covered, whatever its class; torch's SyncBatchNorm is
treated as a plain batch norm, on every device.
Channels that tp shards are summed over the ranks that hold the same channels.
Bytes on the wire: 2 (N-1)/N * (2 C + 1) numbers forward for each layer, about the same backward.
Memory: the input alone is kept for backward, in its own dtype, as torch's kernels keep it.
Source: Ioffe and Szegedy (2015); over devices: Peng et al., "MegDet" (CVPR 2018).

On each rank torch's kernels normalise and sum. Shares of tp and tiles, and second derivatives, go through plain
operations instead, which are several times as slow and keep four tensors for backward.

What this does not do: fuse the last sum of backward into the kernel, as `SyncBatchNorm` does on some devices.
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
    """Returns `sums` (C, sharded by tp) added up over the ranks of `axis`, which hold the same channels.

    Differentiable: backward applies the same function to the gradient, an all-reduce being its own adjoint.
    """
    lead = sums.shell()

    def over_ranks(part: torch.Tensor) -> Part:  # and its own adjoint
        mine = part.local if isinstance(part, Part) else lead.share(part, 0)
        return lead.with_local(sum_over(mine, axis, _TAG))

    return linear(sums, over_ranks, over_ranks, once=True)


def _over_channels(statistic: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a view of `statistic` (C) that broadcasts over `like` (B, C, *)."""
    return statistic.view(1, -1, *([1] * (like.dim() - 2)))


@dataclass(frozen=True)
class _Over:
    """The ranks over which a batch norm takes its statistics.

    axis    those ranks
    eps     the batch norm's epsilon
    counts  whether this rank's samples enter the statistics (not those of a stand-in)
    """

    axis: Axis
    eps: float
    counts: bool

    def of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (n (), mean (C), variance (C)) over all ranks, from this rank's x (B, C, *). Collective.

        n is the number of values of each channel; the variance is divided by n, not by n - 1.
        """
        mean, var = self._own(x)
        own = mean.new_full((1,), float(self.counts) * x.numel() / x.shape[1])
        totals = sum_over(torch.cat([mean * own, own]), self.axis, _TAG)
        n = totals[-1]
        common = totals[:-1] / n
        # a second sum around the common mean: one of x^2 would cancel where the mean is large beside the deviation
        squares = (var + (mean - common).square()) * own
        return n, common, sum_over(squares, self.axis, _TAG) / n

    def _own(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns (mean (C), variance (C)) of this rank's x (B, C, *), in at least 32 bits."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.axis.rehearsal is None:
            # momentum 0: the kernel takes the dtype of its results from these, and changes nothing in them
            running = x.new_empty(x.shape[1], dtype=wide)
            return torch.batch_norm_update_stats(x, running, running.clone(), 0.0)
        # without values: `batch_norm_update_stats` has no meta kernel, so torch would allocate zeros as large as x
        return tuple(stat.to(wide) for stat in torch.native_batch_norm(x, None, None, None, None, True, 0.0, 0.0)[1:])


class _Normalised(torch.autograd.Function):
    """Batch norm by torch's kernels: (x (B, C, *), weight (C) or None, bias (C) or None, over) -> (y, n, mean, var).

    y  x normalised over all ranks, in the dtype of x;  n, mean, var  as `_Over.of` returns them, without gradients
    """

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
        """Returns the gradients of x (B, C, *), weight and bias, and None for `over`. Collective.

        The gradient of x contains sums over all ranks; those of weight and bias are this rank's summands.
        """
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
        """Returns what `backward` does, by differentiable operations, for second derivatives.

        inputs  x, weight, bias as saved by forward
        """
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
    """Returns x (B_local, C, *) normalised by statistics over all ranks' samples; updates the running statistics.

    axis   the data ranks;  phase  says whether this rank's samples count
    Other arguments are those of `functional.batch_norm`. Collective over `axis`. Raises `ValueError`, as torch does,
    if a channel has one value over all ranks.
    """
    over = _Over(axis, eps, counts=not phase.stand_in)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    # `Part`s have rules for single operations, not for this autograd function; torch's kernels refuse an empty x
    plainly = isinstance(x, Part) or isinstance(weight, Part) or not x.numel() or torch.compiler.is_compiling()
    y, n, mean, var = (_in_operations if plainly else _Normalised.apply)(x, weight, bias, over)
    if axis.rehearsal is None:  # a rehearsal's n has no value to compare
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
    """Returns x (B, C, *) normalised by torch's kernel over this rank's samples alone; updates the running statistics.

    rehearsed  whether x has no values; then one value a channel is let through, and nothing is updated for it
    Other arguments are those of `functional.batch_norm`. No collective.
    """
    wide = torch.promote_types(x.dtype, torch.float32)  # kernels take a 16-bit x with 32-bit weights
    weight, bias = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    # one value for each channel: `functional.batch_norm` would raise, but a rehearsed rank's share may be that small
    if rehearsed and x.numel() == x.shape[1]:
        return torch.batch_norm(x, weight, bias, None, None, True, momentum, eps, True)
    # the kernel saves the running statistics for backward and writes into them without a new version, by which
    # recompute would notice the write; so the kernel gets copies, and `copy_` below makes the new version
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
    """Returns (y, n, mean, var) as `_Normalised` does, by plain operations, as `Part` and second derivatives need."""
    axis, share = over.axis, float(over.counts)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [0, *range(2, x.dim())]
    count = wide.new_full((1,), share * x.numel() / x.shape[1])
    sums = wide.sum(dims) * share
    if isinstance(sums, Part):  # a share of the channels, which cannot be concatenated with the count into one message
        n, total = sum_over(count, axis, _TAG)[0].detach(), _sum_of_shares(sums, axis)
    else:
        totals = sum_over(torch.cat([sums, count]), axis, _TAG)
        # if tp shards the weights, gradients arrive in shares at these statistics, which are not sharded
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
    """Mode that answers `functional.batch_norm` and `torch.batch_norm` by a subclass's `_batch_norm`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Returns the result of `_batch_norm` for both batch norm functions, and of `func` itself for all others."""
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func is torch.batch_norm:  # weight, bias come before the running statistics; the ninth is `cudnn_enabled`
            x, weight, bias, mean, var, training, momentum, eps = args[:8]
            return self._batch_norm(x, mean, var, weight, bias, training, momentum, eps)
        return func(*args, **kwargs)

    @abstractmethod
    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Returns x (B, C, *) normalised; the arguments are those of `functional.batch_norm`, in its order."""


class JoinBatchNorm(_MeetsBatchNorm):
    """Mode in which batch norm in training takes its statistics over all ranks of `axis`.

    phase  says whether this rank's samples count, and whether all ranks run the same samples (then each takes its own)
    """

    def __init__(self, axis: Axis, phase: Phase):
        super().__init__()
        self.axis = axis
        self.phase = phase

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Returns the batch norm of x (B, C, *), in training by all ranks' statistics; in evaluation as torch does."""
        if not training:
            if running_mean is not None:  # kernels take a 16-bit x, but weight and statistics must share a dtype
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
    """Mode for tensors without values that counts calls of batch norm in training.

    met    number of such calls
    alone  whether one of them had a single value for each channel; a run takes the other ranks' values too, or fails
    """

    def __init__(self) -> None:
        super().__init__()
        self.met, self.alone = 0, False

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Returns torch's batch norm of x (B, C, *); in training counts the call, and lets one value a channel pass."""
        if not training:
            return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        self.met += 1
        if x.numel() == x.shape[1]:  # one value has no unbiased variance with which to update the running one
            self.alone, running_mean, running_var = True, None, None
        return torch.batch_norm(
            x, weight, bias, running_mean, running_var, True, momentum, eps, torch.backends.cudnn.enabled
        )


class FindBatchNorm(_MeetsBatchNorm):
    """Mode that records which modules call batch norm in training, and normalises by mean 0 and variance 1.

    running  the modules whose forwards are running, outermost first; kept up to date by the caller
    modules  the modules that called it, each once
    calls    for each call (module or None, number of values of each channel)
    """

    def __init__(self, running: list[nn.Module]):
        super().__init__()
        self.running = running
        self.modules: list[nn.Module] = []
        self.calls: list[tuple[nn.Module | None, int]] = []

    @property
    def on_all(self) -> bool:
        """Whether one of the running modules computes on all ranks' samples (parallel/on_all_samples)."""
        return any(getattr(module.forward, "looking", None) is not None for module in self.running)

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Returns the batch norm of x (B, C, *), in training by mean 0 and variance 1, so that samples do not mix.

        Modules on all ranks' samples may mix them, so their calls are neither recorded nor changed.
        """
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
    """Mean and variance by which one call of batch norm in training normalised.

    path  path of the module that called it; "" outside of any
    rows  number of values of each channel that mean and variance are taken over
    """

    path: str
    rows: int
    mean: torch.Tensor  # (C,)
    var: torch.Tensor  # (C,), not corrected for the number of values


class KnownStatistics(FindBatchNorm):
    """Mode that records each training batch norm's statistics, and can normalise by those of an earlier run.

    names    module -> its path
    earlier  an earlier run's `noted`: the n-th call normalises by its n-th entry, if that has the same path, else by
             its own statistics; None: always by its own
    syncing  SyncBatchNorm modules that were put into eval mode for this run, but whose calls count as training
    noted    the statistics of each call in this run
    """

    def __init__(self, names: Mapping[nn.Module, str], earlier: list[Statistics] | None = None):
        super().__init__([])
        self.names, self.earlier = names, earlier
        self.syncing: list[nn.Module] = []
        self.noted: list[Statistics] = []

    def _batch_norm(
        self, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Returns the batch norm of x (B, C, *) by an earlier run's statistics or its own; records its own."""
        caller = self.running[-1] if self.running else None
        # `syncing`: SyncBatchNorm in training would look for a CUDA device, and so runs in eval mode here
        # an evaluation brings its statistics, and an empty x has none
        if not (training or caller in self.syncing) or not x.numel() or self.on_all:
            return functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        dims, rows = [0, *range(2, x.dim())], x.numel() // x.shape[1]
        mean = plain(wide.sum(dims)) / rows
        var = plain((wide - _over_channels(mean, x)).square().sum(dims)) / rows
        number = len(self.noted)  # index of this call in the run: a norm that runs twice has two entries
        self.noted.append(Statistics(self.names.get(caller, ""), rows, mean, var))
        other = self.earlier[number] if self.earlier is not None and number < len(self.earlier) else None
        # another path: the runs took different branches, so the n-th calls do not correspond
        if other is not None and other.path == self.noted[number].path:
            mean, var = other.mean, other.var
        dtype = x.dtype if weight is None else weight.dtype
        return functional.batch_norm(x, mean.to(dtype), var.to(dtype), weight, bias, False, momentum, eps)


def joins_batch_norms(data_ranks: int, plan: Plan) -> bool:
    """Whether a run with `data_ranks` data ranks replaces torch's batch norms by those of this module (`sync_module`).

    With several ranks they share statistics; under recompute the second forward must not update running statistics
    again; in 16 bits running statistics are float32, which no kernel takes with 16-bit weights.
    """
    return data_ranks > 1 or plan.remat != "none" or Precision.of(plan).compute.itemsize < 4


def sync_module(module: nn.Module, axis: Axis, phase: Phase) -> None:
    """Replaces `module.forward` so that batch norms in it use statistics over all ranks of `axis` in training."""

    def synced(forward: Callable) -> Callable:
        """Returns `forward` inside a `JoinBatchNorm` mode."""

        def run(*args, **kwargs):
            if phase.looked_at:  # the look at a few samples has a mode of its own for batch norms
                return forward(*args, **kwargs)
            with JoinBatchNorm(axis, phase):
                return forward(*args, **kwargs)

        return run

    if isinstance(module, SyncBatchNorm):  # its own forward would sum over torch's default group, and on GPUs alone
        module.forward = types.MethodType(_BatchNorm.forward, module)
    # a norm that is itself a recomputed block (its forward has `inside`) is wrapped within recompute, since otherwise
    # the second forward, which backward starts, would run outside the mode, with this rank's statistics alone
    inside = getattr(module.forward, "inside", None)
    if inside is not None:
        inside(synced)
    else:
        module.forward = synced(module.forward)


def batch_norm_modules(module: nn.Module) -> list[nn.Module]:
    """Returns all modules within `module` that are of torch's batch norm classes (SyncBatchNorm too)."""
    return [child for child in module.modules() if isinstance(child, _BatchNorm)]
