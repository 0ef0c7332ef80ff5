"""Run the model and its loss on one part of a micro-batch, under every plan without a pipeline (that: staged)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from shardwise.comm import Axis, gather_rows, gather_samples
from shardwise.device import CPU
from shardwise.errors import InputError, RefusedPlan
from shardwise.host import put, read
from shardwise.layout.dealing import Share
from shardwise.memory.chunk_waiting import whole
from shardwise.parallel.batchnorm import JoinBatchNorm
from shardwise.parallel.slots import Phase
from shardwise.part.crossing import on_shares
from shardwise.part.positions import Positions
from shardwise.precision import Precision
from shardwise.step.batching import samples_in
from shardwise.step.loss import Loss, loss_on
from shardwise.step.task_metrics import MetricTally, added_extras
from shardwise.task import Task, call_arguments


class Forward:
    """Runs `inputs`, the module and `loss`, in the plan's dtypes."""

    def __init__(
        self, task: Task, module: nn.Module, precision: Precision, device: torch.device, data: Axis,
        positions: Positions | None = None,
    ):  # fmt: skip
        self.task = task
        self.module = module
        self.precision = precision
        self.device = device
        self.data = data
        self.positions = positions
        self.gathered_bytes = 0  # received for loss_scope="global" since the start
        self.metrics = MetricTally(task.metrics, device) if task.metrics is not None else None
        self.batched: list[bool] | None = None  # which output leaves have the batch dim, once it was looked at

    def to_device(self, batch: Any) -> Any:
        """Returns the batch on this rank's device, its positions cut; float64 runs see float64 data."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            wide = self.precision.compute == torch.float64 and tensor.is_floating_point()
            return tensor.to(self.device, torch.float64 if wide else None, non_blocking=True)

        return tree_map_only(torch.Tensor, move, batch) if self.positions is None else self.positions.cut(batch, move)

    def local(self, batch: Any) -> Loss:
        """Returns the `Loss` of this batch's samples, other ranks left out. `batch` is on the CPU or the device."""
        batch = self.to_device(batch)
        output = self._output(batch)
        return self.shared(lambda: self.read(output, batch))

    def shared(self, read: Callable[[], Loss]) -> Loss:
        """Returns the loss that `read` gives; under a pipeline on every stage."""
        return read()

    def read(self, output: Any, batch: Any) -> Loss:
        """Returns the loss of an output, with Task.metrics as extra terms, for a batch on the device."""
        loss = loss_on(self.task, output, batch)
        return loss if self.metrics is None else loss.with_extras(self.metrics.as_extras(output, batch))

    def __call__(self, part: Share) -> Loss:
        """Returns this rank's loss on its share of a micro-batch.

        A rank without samples runs one of another rank (`count` is 0), so that it takes part in collectives: its loss
        counts nothing.
        """
        batch = self.to_device(part.batch)
        return self.loss_of(self._output(batch), batch, part)

    def loss_of(self, output: Any, batch: Any, part: Share) -> Loss:
        """Returns the loss that this rank contributes, from the model's output; `batch` is on the device."""
        if self.metrics is not None:
            again = self.task.loss_scope == "model" and self.data.index > 0  # another rank's samples
            self.metrics.add(output, batch, 0 if again else part.count)
        # a loss over pairs of samples needs every rank's outputs
        if self.task.loss_scope == "global" and self.data.size > 1:
            return self._gathered(output, batch, part)
        loss = loss_on(self.task, output, batch)
        return loss if part.count else _nothing(loss)

    def joined(self, whole_and_parts: tuple[Any, Sequence[Any]]) -> Loss:
        """Returns the loss on the outputs for parts put together; learns which outputs have the batch dim."""
        whole, parts = whole_and_parts
        batches = [self.to_device(batch) for batch in (whole, *parts)]
        outputs = [self.output(batch) for batch in batches]
        return self.shared(lambda: self.joined_of(outputs, batches))

    def joined_of(self, outputs: Sequence[Any], batches: Sequence[Any]) -> Loss:
        """Returns the loss of `joined` from outputs: the whole batch's first, then those of its parts."""
        (_, spec), *_ = flat = [tree_flatten(output) for output in outputs]
        counts = [samples_in(batch) for batch in batches]
        by_leaf = list(zip(*(leaves for leaves, _ in flat), strict=True))
        self.batched = [_has_samples(leaves, counts) for leaves in by_leaf]
        joined = [torch.cat(leaves[1:]) if at else leaves[0] for leaves, at in zip(by_leaf, self.batched, strict=True)]
        loss = loss_on(self.task, tree_unflatten(joined, spec), batches[0])
        if self.metrics is None:
            return loss
        # of each rank's own samples, and added up, whatever the loss is of
        of_parts = [self.metrics.as_extras(*pair) for pair in zip(outputs[1:], batches[1:], strict=True)]
        return loss.with_extras(reduce(added_extras, of_parts))

    def output(self, batch: Any) -> Any:
        """Returns the model's output for a batch on the device; under a pipeline None but on the last stage."""
        return whole(self._output(batch))

    def _output(self, batch: Any) -> Any:
        """Returns the module's output in the plan's dtypes; its errors name the embedding or batch norm at fault."""
        args, kwargs = call_arguments(self.task, batch)
        if self.precision.mixed or self.precision.compute != torch.float32:
            args, kwargs = self.precision.cast_inputs((args, kwargs))
        # torch's own messages name neither the table nor the index
        try:
            return self.precision.cast_outputs(self.module(*args, **kwargs))
        except IndexError as error:
            raise beyond_table(error, self.module) or error from error
        except ValueError as error:
            raise lone_value(error, samples_in(batch)) or error from error

    def _gathered(self, output: Any, batch: Any, part: Share) -> Loss:
        """Returns the loss on all ranks' samples, gathered; it counts once, on the first rank of the data axis.

        Backward of the gather keeps each rank's own rows, whose gradient is complete; tensors without a batch dim
        (a learned temperature) get their gradient on every rank, so it is divided by the ranks.
        """
        row = gather_rows(put([float(part.count)], self.device), self.data).view(-1)
        counts = tuple(int(n) for n in read(row, "samples of each rank"))
        ranks = self.data.size

        def gather(leaf: Any, batched: bool = True) -> Any:
            if isinstance(leaf, np.ndarray) and batched and leaf.ndim:  # of a batch: its samples are all ranks' too
                full = gather(torch.as_tensor(leaf, device=self.device))
                return np.array(read(full, "arrays of a batch"), dtype=leaf.dtype).reshape(full.shape)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if batched and leaf.dim():
                full = on_shares(leaf, lambda share: gather_samples(share, counts, self.data, "loss inputs"))
                self.gathered_bytes += (full.numel() - leaf.numel()) * full.element_size()
                return full
            return _ShareOfGradient.apply(leaf, ranks) if leaf.requires_grad else leaf

        leaves, spec = tree_flatten(whole(output))
        batched = self.batched
        if batched is None or len(batched) != len(leaves):  # nothing was looked at: by size
            rows = max(part.count, 1)  # a stand-in is one sample
            batched = [isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) for leaf in leaves]
        output = tree_unflatten([gather(*pair) for pair in zip(leaves, batched, strict=True)], spec)
        loss = loss_on(self.task, output, tree_map(gather, batch))
        # The others' value is 0 and their gradient the same: backward must give each rank's own rows theirs.
        if self.data.index == 0:
            return loss
        return Loss(_uncounted(loss.total), 0.0, {k: _uncounted_extra(v) for k, v in loss.extras.items()})


def run_alone(
    task: Task, precision: Precision, positions: Positions | None = None, device: torch.device = CPU
) -> Callable[[nn.Module, Any], Loss]:  # fmt: skip
    """Returns a function (module, batch) -> loss without other ranks: to look at a module before ranks hold it.

    positions  cut over axes that send nothing
    """
    alone = Axis.alone("data")

    def run(module: nn.Module, batch: Any) -> Loss:
        with _norms_of(precision):
            return Forward(task, module, precision, device, alone, positions).local(batch)

    return run


def _norms_of(precision: Precision) -> AbstractContextManager[Any]:
    """Returns a context that replaces batch norms' kernels under 16-bit compute, as a run does."""
    # statistics are float32, which no kernel takes beside weights of 16 bits (`joins_batch_norms`)
    narrow = precision.compute.itemsize < 4
    return JoinBatchNorm(Axis.alone("data"), Phase()) if narrow else nullcontext()


def output_alone(task: Task, precision: Precision) -> Callable[[nn.Module, Any], Any]:
    """Returns a function (module, batch) -> the model's output without other ranks, on the CPU."""
    alone = Axis.alone("data")

    def run(module: nn.Module, batch: Any) -> Any:
        forward = Forward(task, module, precision, CPU, alone)
        with _norms_of(precision):
            return forward.output(forward.to_device(batch))

    return run


def beyond_table(error: IndexError, module: nn.Module) -> InputError | None:
    """Returns an error that names an embedding's index beyond its table, and the module; None for another error."""
    table, lookup, frame = "", None, error.__traceback__
    while frame is not None:
        names = frame.tb_frame.f_locals
        if isinstance(names.get("self"), nn.Embedding):
            table = next((path for path, child in module.named_modules() if child is names["self"]), table)
        index = names.get("input", names.get("index"))  # of `F.embedding`, or of the product on a cut table
        if isinstance(index, torch.Tensor) and isinstance(names.get("weight"), torch.Tensor):
            lookup = index, names["weight"].shape[0]
        frame = frame.tb_next
    # no embedding or product on its table was being indexed: this is another IndexError
    if lookup is None or lookup[0].is_floating_point():
        return None
    index, rows = lookup
    wrong = ((index < 0) | (index >= rows)).nonzero()
    if not len(wrong):  # an IndexError of something else inside
        return None
    place = tuple(read(wrong[0], "where an index is wrong"))
    return InputError(
        f"index {int(index[place])} at {list(place)} of this rank's samples is beyond the table "
        f"'{table or 'embedding'}' of {rows} rows ({len(wrong)} such indices): the data's vocabulary is larger than "
        "the model's (another tokenizer?), or the data are damaged"
    )


def lone_value(error: ValueError, samples: int) -> InputError | None:
    """Returns an error that says that batch norm has one value per channel; None for another error."""
    if "more than 1 value per channel" not in str(error):
        return None
    return InputError(
        f"batch norm has one value for each channel in a micro-batch of {samples} sample(s), and no variance to divide "
        "by: make the batch larger, or accumulate smaller"
    )


def _has_samples(leaves: tuple, counts: list[int]) -> bool:
    """Whether the first dim of an output, computed for several `counts` of samples, counts them; else `RefusedPlan`.

    False for one of the same shape whatever the count, and for plain values.
    """
    leaf = leaves[0]
    # what is no tensor is not gathered: plain values are the same on every rank, other objects might hold tensors
    if not isinstance(leaf, torch.Tensor):
        if leaf is None or isinstance(leaf, bool | int | float | str):
            return False
        raise RefusedPlan(
            f'loss_scope="global" gathers the outputs of the model, and cannot look into a {type(leaf).__name__}: '
            "return tensors, tuples or dicts, or register the class as a pytree"
        )
    shapes = [output.shape for output in leaves]
    # the same shape for other numbers of samples: a value of the whole batch
    if len(set(shapes)) == 1:
        return False
    first = [shape[:1] for shape in shapes]
    if first == [(count,) for count in counts] and len({shape[1:] for shape in shapes}) == 1:
        return True
    raise RefusedPlan(
        f'loss_scope="global" gathers the outputs of the model along their first dim, but one of shape '
        f"{tuple(leaf.shape)} for {counts[0]} samples has the shape {tuple(shapes[1])} for {counts[1]}: return what "
        "belongs to each sample (embeddings), samples first, and compute what compares samples (logits) in the loss"
    )


class _ShareOfGradient(torch.autograd.Function):
    """Identity whose backward divides the gradient by the number of ranks, since it is summed over them later."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient / ctx.ranks, None


class _Uncounted(torch.autograd.Function):
    """Identity in backward, 0 in forward: another rank counts the loss, whose gradient is needed here too."""

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
    """Returns the loss with value and weight 0, still in the graph, so that backward runs the others' collectives."""
    zero = {k: type(v)(v.total * 0, None if v.weight is None else 0.0) for k, v in loss.extras.items()}
    return Loss(loss.total * 0, 0.0, zero)
