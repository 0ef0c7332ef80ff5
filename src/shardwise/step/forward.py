"""Run the model and its loss on one part of a micro-batch; `step/staged` does so under a pipeline."""

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
    """Runs `Task.inputs`, the module and `Task.loss` on a batch, in the plan's dtypes.

    data            the axis of data ranks, over which loss_scope="global" gathers outputs
    positions       which dims of a batch ranks shard; None: none
    metrics         sums of `Task.metrics`, or None
    gathered_bytes  received for loss_scope="global" since the start
    batched         for each leaf of the output, whether its dim 0 is samples, once `joined` has found that; else None
    """

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
        self.gathered_bytes = 0
        self.metrics = MetricTally(task.metrics, device) if task.metrics is not None else None
        self.batched: list[bool] | None = None

    def to_device(self, batch: Any) -> Any:
        """Returns the batch on this rank's device, its positions sharded; floats as float64 if the run computes so."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            wide = self.precision.compute == torch.float64 and tensor.is_floating_point()
            return tensor.to(self.device, torch.float64 if wide else None, non_blocking=True)

        return tree_map_only(torch.Tensor, move, batch) if self.positions is None else self.positions.cut(batch, move)

    def local(self, batch: Any) -> Loss:
        """Returns the `Loss` of this batch's samples alone. `batch` may be on the CPU or the device."""
        batch = self.to_device(batch)
        output = self._output(batch)
        return self.shared(lambda: self.read(output, batch))

    def shared(self, read: Callable[[], Loss]) -> Loss:
        """Returns `read()`; a subclass for a pipeline calls it on the last stage and sends the loss to all."""
        return read()

    def read(self, output: Any, batch: Any) -> Loss:
        """Returns the loss of an output, with `Task.metrics` as extra terms. `batch`: on the device."""
        loss = loss_on(self.task, output, batch)
        return loss if self.metrics is None else loss.with_extras(self.metrics.as_extras(output, batch))

    def __call__(self, part: Share) -> Loss:
        """Returns this rank's loss on its share of a micro-batch.

        A rank without samples (`count` 0) runs another rank's sample to join its collectives, and gets loss and
        weight 0.
        """
        batch = self.to_device(part.batch)
        return self.loss_of(self._output(batch), batch, part)

    def loss_of(self, output: Any, batch: Any, part: Share) -> Loss:
        """Returns the loss that this rank contributes, from the model's output; adds to `metrics`.

        batch  on the device;  part  the share of which it is
        """
        if self.metrics is not None:
            again = self.task.loss_scope == "model" and self.data.index > 0  # another rank's samples
            self.metrics.add(output, batch, 0 if again else part.count)
        # a loss over pairs of samples needs every rank's outputs
        if self.task.loss_scope == "global" and self.data.size > 1:
            return self._gathered(output, batch, part)
        loss = loss_on(self.task, output, batch)
        return loss if part.count else _nothing(loss)

    def joined(self, whole_and_parts: tuple[Any, Sequence[Any]]) -> Loss:
        """Returns the loss on the concatenated outputs for parts of a batch; sets `batched`.

        whole_and_parts  (a batch, the parts into which it was split)
        """
        whole, parts = whole_and_parts
        batches = [self.to_device(batch) for batch in (whole, *parts)]
        outputs = [self.output(batch) for batch in batches]
        return self.shared(lambda: self.joined_of(outputs, batches))

    def joined_of(self, outputs: Sequence[Any], batches: Sequence[Any]) -> Loss:
        """Returns the loss of `joined` from outputs and batches, both for the whole batch first, then for its parts."""
        (_, spec), *_ = flat = [tree_flatten(output) for output in outputs]
        counts = [samples_in(batch) for batch in batches]
        by_leaf = list(zip(*(leaves for leaves, _ in flat), strict=True))
        self.batched = [_has_samples(leaves, counts) for leaves in by_leaf]
        joined = [torch.cat(leaves[1:]) if at else leaves[0] for leaves, at in zip(by_leaf, self.batched, strict=True)]
        loss = loss_on(self.task, tree_unflatten(joined, spec), batches[0])
        if self.metrics is None:
            return loss
        # metrics are computed on each rank's own samples and added up, also if the loss is over all samples
        of_parts = [self.metrics.as_extras(*pair) for pair in zip(outputs[1:], batches[1:], strict=True)]
        return loss.with_extras(reduce(added_extras, of_parts))

    def output(self, batch: Any) -> Any:
        """Returns the model's output for a batch on the device; under a pipeline None unless on the last stage."""
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
        """Returns the loss on the gathered samples of all data ranks; the others than the first return value 0.

        Backward of the gather keeps the gradient of each rank's own samples, which is complete. A tensor without a
        batch dim (a learned temperature) gets the same gradient on every rank, so that is divided by their number.
        """
        row = gather_rows(put([float(part.count)], self.device), self.data).view(-1)
        counts = tuple(int(n) for n in read(row, "samples of each rank"))
        ranks = self.data.size

        def gather(leaf: Any, batched: bool = True) -> Any:
            if isinstance(leaf, np.ndarray) and batched and leaf.ndim:  # an array of the batch has samples too
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
        if batched is None or len(batched) != len(leaves):  # not known from the look, so guessed by the size of dim 0
            rows = max(part.count, 1)  # a stand-in is one sample
            batched = [isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,) for leaf in leaves]
        output = tree_unflatten([gather(*pair) for pair in zip(leaves, batched, strict=True)], spec)
        loss = loss_on(self.task, output, tree_map(gather, batch))
        # The other ranks' value is 0, but their gradient is the same, since backward must reach each rank's samples.
        if self.data.index == 0:
            return loss
        return Loss(_uncounted(loss.total), 0.0, {k: _uncounted_extra(v) for k, v in loss.extras.items()})


def run_alone(
    task: Task, precision: Precision, positions: Positions | None = None, device: torch.device = CPU
) -> Callable[[nn.Module, Any], Loss]:  # fmt: skip
    """Returns a function (module, batch) -> `Loss` that needs no other rank, to try a module before it is sharded.

    positions  dims of the batch that are sharded over axes of a rehearsal, which send nothing; None: none
    """
    alone = Axis.alone("data")

    def run(module: nn.Module, batch: Any) -> Loss:
        with _norms_of(precision):
            return Forward(task, module, precision, device, alone, positions).local(batch)

    return run


def _norms_of(precision: Precision) -> AbstractContextManager[Any]:
    """Returns a context in which batch norms run as in a training run: under 16-bit compute by another kernel."""
    # statistics are float32, which no kernel takes beside weights of 16 bits (`joins_batch_norms`)
    narrow = precision.compute.itemsize < 4
    return JoinBatchNorm(Axis.alone("data"), Phase()) if narrow else nullcontext()


def output_alone(task: Task, precision: Precision) -> Callable[[nn.Module, Any], Any]:
    """Returns a function (module, batch) -> the model's output, which runs on the CPU and needs no other rank."""
    alone = Axis.alone("data")

    def run(module: nn.Module, batch: Any) -> Any:
        forward = Forward(task, module, precision, CPU, alone)
        with _norms_of(precision):
            return forward.output(forward.to_device(batch))

    return run


def beyond_table(error: IndexError, module: nn.Module) -> InputError | None:
    """Returns an `InputError` that names an embedding, and the index beyond its table; None for another IndexError.

    error  raised in the forward of `module`
    """
    table, lookup, frame = "", None, error.__traceback__
    while frame is not None:
        names = frame.tb_frame.f_locals
        if isinstance(names.get("self"), nn.Embedding):
            table = next((path for path, child in module.named_modules() if child is names["self"]), table)
        # local names in `F.embedding`, or in the lookup on a table that tp shards
        index = names.get("input", names.get("index"))
        if isinstance(index, torch.Tensor) and isinstance(names.get("weight"), torch.Tensor):
            lookup = index, names["weight"].shape[0]
        frame = frame.tb_next
    # no embedding was being indexed
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
    """Returns an `InputError` on a batch norm with one value per channel, for a batch of `samples`; else None."""
    if "more than 1 value per channel" not in str(error):
        return None
    return InputError(
        f"batch norm has one value for each channel in a micro-batch of {samples} sample(s), and no variance to divide "
        "by: make the batch larger, or accumulate smaller"
    )


def _has_samples(leaves: tuple, counts: list[int]) -> bool:
    """Whether dim 0 of an output leaf is samples.

    leaves  the leaf in the outputs for batches of `counts` samples
    False for a leaf of the same shape for all counts, and for plain values. Raises `RefusedPlan` for another leaf.
    """
    leaf = leaves[0]
    # plain values are the same on every rank; other objects might hold tensors that would have to be gathered
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
    """Identity whose backward divides the gradient by `ranks`, since it is summed over them later."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient / ctx.ranks, None


class _Uncounted(torch.autograd.Function):
    """Function with value 0 and the gradient of the identity, for a loss that another rank counts."""

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
    """Returns the loss with value and weight 0, still in the graph, so that backward joins other ranks' collectives."""
    zero = {k: type(v)(v.total * 0, None if v.weight is None else 0.0) for k, v in loss.extras.items()}
    return Loss(loss.total * 0, 0.0, zero)
