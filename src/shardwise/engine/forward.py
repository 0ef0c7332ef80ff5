"""The model and its loss on one part of a micro-batch, the same under every plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from shardwise.comm import Axis, gather_rows, gather_samples
from shardwise.engine.loss import Loss, read_loss
from shardwise.layout.dealing import Part
from shardwise.precision import Precision
from shardwise.task import Task


class Forward:
    """Runs `inputs`, the module and `loss`, in the plan's dtypes."""

    def __init__(self, task: Task, module: nn.Module, precision: Precision, device: torch.device, data: Axis):
        self.task = task
        self.module = module
        self.precision = precision
        self.device = device
        self.data = data
        self.gathered_bytes = 0  # received for loss_scope="global" since the start
        self._batched: list[bool] | None = None  # which output leaves have the batch dim

    def to_device(self, batch: Any) -> Any:
        """The batch on this rank's device; float64 runs see float64 data."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            wide = self.precision.compute == torch.float64 and tensor.is_floating_point()
            return tensor.to(self.device, torch.float64 if wide else None, non_blocking=True)

        return tree_map_only(torch.Tensor, move, batch)

    def local(self, batch: Any) -> Loss:
        """The loss of these samples alone. `batch` is on the CPU or the device."""
        batch = self.to_device(batch)
        return read_loss(self.task.loss(self._output(batch), batch))

    def __call__(self, part: Part) -> Loss:
        """The loss that this rank contributes for a part (a stand-in contributes nothing)."""
        batch = self.to_device(part.batch)
        output = self._output(batch)
        if self.task.loss_scope == "global" and self.data.size > 1:
            return self._gathered(output, batch, part)
        loss = read_loss(self.task.loss(output, batch))
        return loss if part.count else _nothing(loss)

    def _output(self, batch: Any) -> Any:
        args, kwargs = self.task.inputs(batch)
        if self.precision.mixed or self.precision.compute != torch.float32:
            args, kwargs = self.precision.cast_inputs((args, kwargs))
        return self.precision.cast_outputs(self.module(*args, **kwargs))

    def _gathered(self, output: Any, batch: Any, part: Part) -> Loss:
        """Every rank evaluates the loss on all samples; it counts once, on the first rank of the data axis.

        Backward of the gather keeps each rank's own rows, whose gradient is complete; tensors without a batch dim
        (a learned temperature) get their gradient on every rank, so it is divided by the ranks.
        """
        counts = tuple(
            int(n) for n in gather_rows(torch.tensor([float(part.count)], dtype=torch.float64, device=self.device),
                                        self.data).view(-1).tolist()
        )  # fmt: skip
        rows = max(part.count, 1)
        ranks = self.data.size

        def gather(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.dim() and leaf.shape[0] == rows:
                full = gather_samples(leaf, counts, self.data, "loss inputs")
                self.gathered_bytes += (full.numel() - leaf.numel()) * full.element_size()
                return full
            return _ShareOfGradient.apply(leaf, ranks) if leaf.requires_grad else leaf

        leaves, spec = tree_flatten(output)
        output = tree_unflatten([gather(leaf) for leaf in leaves], spec)
        loss = read_loss(self.task.loss(output, tree_map(gather, batch)))
        if self.data.index == 0:
            return loss
        return Loss(_uncounted(loss.total), 0.0, {k: _uncounted_extra(v) for k, v in loss.extras.items()})


class _ShareOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient / ctx.ranks, None


class _Uncounted(torch.autograd.Function):
    """Value 0, gradient 1: the sum is counted by another rank, its gradient is needed here too."""

    @staticmethod
    def forward(ctx, total: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(total)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient


def _uncounted(total: torch.Tensor) -> torch.Tensor:
    return _Uncounted.apply(total)


def _uncounted_extra(extra):
    return type(extra)(_uncounted(extra.total), None if extra.weight is None else 0.0)


def _nothing(loss: Loss) -> Loss:
    """The stand-in's loss: in the graph, so that collectives of backward are met, but worth nothing."""
    zero = {k: type(v)(v.total * 0, None if v.weight is None else 0.0) for k, v in loss.extras.items()}
    return Loss(loss.total * 0, 0.0, zero)
