"""The step of a pipelined engine: this rank's row of the schedule, executed; and what all stages must know alike.

    for each op of the row:
        F    receive hidden states . forward of the stage . send on; the last stage computes the loss
        B    receive their gradients . backward . send the input's gradient back
        I W  the same in two parts: the input's gradient, which is sent at once; later the weights'
    finish   gradients over data ranks as without a pipeline; those of tied parameters over the stages that hold them;
             loss, weight and norm told to every stage

A step runs the schedule `accumulate` times, each time with `microbatches` micro-batches: one process that
accumulates accumulate * microbatches micro-batches does the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import CheckpointError

from shardwise.comm import Axis, broadcast, gather_json, gather_rows, receive, send
from shardwise.device import seed_generators
from shardwise.engine.control import Agreement, Tally, agree
from shardwise.engine.cutting import Cut
from shardwise.engine.forward import Forward
from shardwise.engine.loss import Extra, Loss
from shardwise.engine.normalise import square_norm
from shardwise.engine.objective import objective_of
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.dealing import Share
from shardwise.layout.schedule_kinds import Op
from shardwise.layout.schedules import plain_schedule
from shardwise.parallel.pipeline import backward
from shardwise.parallel.pipeline.messages import DTYPES, MOST_DIMS, Mail
from shardwise.parallel.pipeline.stage import StagedModule
from shardwise.part import plain
from shardwise.random import Samples
from shardwise.trace.deferred import seed_of

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

PASSES = 2**12  # forwards outside of steps, numbered anew after so many


class StagedForward(Forward):
    """The forward of this rank's stages; the loss belongs to the last one."""

    def __init__(self, forward: Forward, staged: StagedModule, cut: Cut, axis: Axis):
        super().__init__(forward.task, forward.module, forward.precision, forward.device, forward.data)
        self.staged, self.cut, self.axis = staged, cut, axis
        self.mail = Mail(axis, cut.schedule.owner, forward.device)
        self.last = len(cut.stages) - 1
        self.last_owner = cut.schedule.owner[self.last]
        self._passes = 0

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here."""
        return self.last_owner == self.axis.index

    def stage(self, index: int, batch: Any, inbox: list[tuple[torch.Tensor, bool]]) -> Any:
        """One stage on a batch that is on the device: what it sends on, or the model's output."""

        def run() -> Any:
            args, kwargs = self.task.inputs(batch)
            if self.precision.mixed or self.precision.compute != torch.float32:
                args, kwargs = self.precision.cast_inputs((args, kwargs))
            return self.module(*args, **kwargs)

        output = self.staged.run(index, inbox, run)
        return self.precision.cast_outputs(output) if index == self.last else output

    def key(self, batch: Any) -> tuple:
        """What the shapes of messages may depend on."""
        shapes = tuple(tuple(leaf.shape) for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor))
        return torch.is_grad_enabled(), self.module.training, shapes

    def _output(self, batch: Any) -> Any:
        """All stages in turn, without a schedule; the model's output where the last stage is, else None."""
        number = self._passes % PASSES
        self._passes += 1
        output, key = None, self.key(batch)
        for stage in self.cut.mine:
            inbox = self.mail.receive_forward(stage.index, number, key) if stage.index else []
            output = self.stage(stage.index, batch, inbox)
            if stage.index < self.last:
                self.mail.send_forward(stage.index, number, key, output)
                output = None
        self.mail.flush()
        return output

    def local(self, batch: Any) -> Loss:
        """The loss of these samples alone, its numbers on every stage."""
        batch = self.to_device(batch)
        output = self._output(batch)
        return self._shared(lambda: self.read(output, batch))

    def __call__(self, part: Share) -> Loss:
        """The loss of a part: nothing, where the last stage is elsewhere."""
        batch = self.to_device(part.batch)
        output = self._output(batch)
        return self.loss_of(output, batch, part) if self.has_loss else _no_loss(self.device)

    def joined(self, whole_and_parts: tuple[Any, tuple[Any, Any]]) -> Loss:
        """The loss on the outputs for two parts put together, its numbers on every stage."""
        if self.has_loss:
            return self._shared(lambda: super(StagedForward, self).joined(whole_and_parts))
        whole, parts = whole_and_parts
        for batch in (whole, *parts):
            self._output(self.to_device(batch))
        return self._shared(lambda: _no_loss(self.device))

    def _shared(self, read: Callable[[], Loss]) -> Loss:
        mine = None
        if self.has_loss:
            loss = read()
            extras = {
                k: [float(v.total.detach()), None if v.weight is None else float(v.weight)]
                for k, v in loss.extras.items()
            }
            mine = [float(loss.total.detach()), float(loss.weight), extras]
        total, weight, extras = gather_json(mine, self.axis, self.device)[self.last_owner]
        if total != total:
            raise RefusedPlan(
                "under pipeline stages the loss on a few samples is NaN. If it is a number in one process, a value "
                "gets from stage to stage by a way that cannot be followed (an attribute, numpy, .item()): name "
                "other places with stages=, or hand it over as a tensor"
            )
        told = {k: Extra(torch.tensor(v[0], dtype=torch.float64), v[1]) for k, v in extras.items()}
        return Loss(torch.tensor(total, dtype=torch.float64), weight, told)


def _no_loss(device: torch.device) -> Loss:
    return Loss(torch.zeros((), dtype=torch.float64, device=device), 0.0)


@dataclass
class _Held:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    key: tuple
    later: backward.Later | None = None


class Pipeline:
    """One rank's part in the pipeline of an engine."""

    def __init__(self, engine: Engine, cut: Cut, forward: StagedForward):
        self.engine, self.cut, self.forward = engine, cut, forward
        self.axis = engine.mesh.pp
        self.mail = forward.mail
        self._held: dict[tuple[int, int], _Held] = {}
        self._first = True  # no forward of this step was run
        self._asked = False  # whether data ranks used the same parameters, in this step
        self.tied = [name for name, ranks in cut.holders.items() if len(ranks) > 1]

    # --- the schedule

    def run(self, parts: list[Share], tally: Tally) -> None:
        """Forward and backward of every micro-batch of a step."""
        done, self._asked, self._first = 0, False, True
        while done < len(parts):
            schedule = self.cut.schedule
            if len(parts) - done < schedule.microbatches:  # the end of an epoch
                schedule = plain_schedule(schedule.owner, len(parts) - done)
            final = schedule.last_backward(self.axis.index)
            self.mail.expect(schedule, done, lambda index: self.forward.key(parts[index].batch))
            ends = done + schedule.microbatches == len(parts)
            for place, op in enumerate(schedule.rows[self.axis.index]):
                index = done + op.microbatch
                if op.kind == "F":
                    self._forward(op.stage, index, parts[index], tally)
                else:
                    self._backward(op, index, parts[index], tally, last=ends and place == final)
            done += schedule.microbatches
        self.mail.flush()
        self.forward.staged.on_enter = None

    def _forward(self, stage: int, index: int, part: Share, tally: Tally) -> None:
        engine, forward = self.engine, self.forward
        self._meet(part)
        tally.stood_in |= part.count == 0
        engine.seed_masks(index, part, alone=self._first)
        self._first = False
        batch = forward.to_device(part.batch)
        key = forward.key(batch)
        inbox = self.mail.receive_forward(stage, index, key) if stage else []
        if engine.global_random is None:  # masks of a stage are its own; what is drawn before it, everybody's
            own = seed_of("fast", engine.seed, engine.steps_done, index, engine.data_rank, stage)
            forward.staged.on_enter = lambda: seed_generators(own)
        with engine.random_context():
            output = forward.stage(stage, batch, inbox)
            if stage == forward.last:
                outputs = [self._loss(forward.loss_of(output, batch, part), part, tally)]
            else:
                outputs = list(output)
                self.mail.send_forward(stage, index, key, outputs)
        self._held[stage, index] = _Held(forward.staged.taken, outputs, key)
        forward.staged.taken = []  # or the last of them would live on until the next step

    def _loss(self, loss: Loss, part: Share, tally: Tally) -> torch.Tensor:
        objective, extras = objective_of(self.engine, loss)
        if not objective.requires_grad:
            raise InputError("Task.loss returned a sum that does not depend on any trainable parameter")
        tally.add(loss, part.count, extras)
        return objective

    def _meet(self, part: Share) -> None:
        """Tell everything inside the module which micro-batch it works on."""
        self.engine.phase.stand_in = part.count == 0
        if self.engine.global_random is not None:
            self.engine.global_random.samples = Samples(part.start, part.count, part.total)

    def _backward(self, op: Op, index: int, part: Share, tally: Tally, *, last: bool) -> None:
        held = self._held[op.stage, index]
        if op.kind == "W":
            assert held.later is not None
            with self._counted(tally, last):
                backward.of_weights(held.later)
            del self._held[op.stage, index]
            return
        self._meet(part)
        gradients: list[torch.Tensor | None] = [None]
        if op.stage < self.forward.last:
            gradients = self.mail.receive_backward(op.stage, index, held.key)
        with self.engine.random_context():
            if op.kind == "I":
                held.later = backward.of_input(held.outputs, gradients, held.inputs)
                held.outputs = []
            else:
                with self._counted(tally, last):
                    self._whole(held, gradients)
                del self._held[op.stage, index]
        if op.stage:
            returned = [torch.zeros_like(leaf) if leaf.grad is None else plain(leaf.grad) for leaf in held.inputs]
            self.mail.send_backward(op.stage, index, returned)
            for leaf in held.inputs:
                leaf.grad = None

    def _counted(self, tally: Tally, last: bool) -> _Counted:
        return _Counted(self.engine, tally, last)

    @staticmethod
    def _whole(held: _Held, gradients: list[torch.Tensor | None]) -> None:
        try:
            backward.whole(held.outputs, gradients)
        except CheckpointError as error:
            raise RefusedPlan(
                "a block run again in backward did something else than in forward; use remat=none "
                f"({str(error).splitlines()[0]})"
            ) from error

    # --- what all stages know alike

    def finish(self, tally: Tally, used: set[int]) -> Agreement:
        """Complete the gradients, sum those of tied parameters over stages, and agree over all ranks."""
        technique = self.engine.technique
        used = self._tied_used(used)
        technique.finish_step(used)
        if self.tied and self.engine.data_ranks > 1 and not self._asked:
            self._asked = True
            agreed = self.agree(tally, 0.0)
            if not agreed.same_branches:  # the engine comes again, with what any data rank used
                return agreed
        self._sum_tied(used)
        return self.agree(tally, square_norm(self.engine))

    def agree(self, tally: Tally, square_norm: float) -> Agreement:
        """The control rows of the data ranks, then of the stages: loss from the last, norms from all."""
        engine = self.engine
        own = agree(tally, square_norm, engine.mesh.data)
        rows = own.square_norms[: engine.plan.dp_shard] if engine.technique.in_pieces else own.square_norms[:1]
        scale = engine.scale.value if engine.scale is not None else 0.0
        told = [own.total, own.weight, own.samples, own.extras, own.same_branches, math.fsum(rows), scale]
        table = gather_json(told, self.axis, engine.device)
        total, weight, samples, extras, _, _, scale = table[self.forward.last_owner]
        if engine.scale is not None:
            engine.scale.value = scale
        same = all(row[4] for row in table)
        return replace(own, total=total, weight=weight, samples=int(samples), extras=extras, same_branches=same,
                       square_norms=[math.fsum(row[5] for row in table)])  # fmt: skip

    def counts_here(self, name: str) -> bool:
        """Whether this rank is the one that counts a parameter which several stages hold."""
        return self.cut.holders[name][0] == self.axis.index

    def _tied_used(self, used: set[int]) -> set[int]:
        """A tied parameter that any stage used is used on all that hold it."""
        if not self.tied:
            return used
        index_of = {name: index for index, name in enumerate(self.engine.names)}
        here = [float(index_of.get(name, -1) in used) for name in self.tied]
        row = torch.tensor(here, dtype=torch.float64, device=self.engine.device)
        anywhere = gather_rows(row, self.axis).amax(dim=0).tolist()
        found = {index_of[name] for name, any_ in zip(self.tied, anywhere, strict=True) if any_ and name in index_of}
        return used | found

    @torch.no_grad()
    def _sum_tied(self, used: set[int]) -> None:
        """Gradients of parameters on several stages: summed by the first that holds them, in the order of stages."""
        technique = self.engine.technique
        index_of = {name: index for index, name in enumerate(self.engine.names)}
        slots = {slot.name: slot for slot in technique.slots}
        shapes = {name: param.shape for name, param in self.engine.module.named_parameters()}
        for number, name in enumerate(self.tied):
            index = index_of.get(name)
            if index is None or index not in used:
                continue
            gradient = technique.full_gradient(index)
            if gradient is None:
                gradient = torch.zeros(shapes[name], dtype=self.engine.precision.master, device=self.engine.device)
            total = self._summed(gradient.contiguous(), self.cut.holders[name], number)
            slot = slots.get(name)
            if slot is None:
                continue
            select = getattr(technique, "select", None)
            piece = total if select is None else select(index, total, self.engine.mesh.shard.index)
            if slot.master.grad is None:
                slot.master.grad = torch.zeros_like(slot.master)
            slot.master.grad.copy_(piece.reshape(slot.master.grad.shape))

    def _summed(self, gradient: torch.Tensor, holders: tuple[int, ...], number: int) -> torch.Tensor:
        """The sum over the holders, the same bits on each."""
        first, *others = holders
        tag = "tied gradients"
        if self.axis.index != first:
            sending = send(gradient, self.axis, first, tag, 2 * number)
            total = torch.empty_like(gradient)
            receive(total, self.axis, first, tag, 2 * number + 1).wait()
            sending.wait()
            return total
        total = gradient.clone()
        for other in others:
            theirs = torch.empty_like(total)
            receive(theirs, self.axis, other, tag, 2 * number).wait()
            total += theirs
        for pending in [send(total, self.axis, other, tag, 2 * number + 1) for other in others]:
            pending.wait()
        return total

    # --- whole tensors to every stage

    def spread(self, held: Iterator[tuple[str, torch.Tensor | None]], names: list[str]) -> Iterator[tuple[str, Any]]:
        """(name, tensor) for all names, on every stage, from what each holds (in the order of the names)."""
        for name in names:
            ranks = self.cut.holders[name]
            tensor = None
            if self.axis.index in ranks:
                found, tensor = next(held)
                assert found == name, f"{found} came where {name} was expected"
            yield name, self._handed_out(tensor, ranks[0])

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every buffer as the stage has it that uses it."""
        for name, buffer in self.engine.module.named_buffers():
            owner = self.cut.buffers[name]
            found = self._handed_out(buffer if owner == self.axis.index else None, owner)
            assert found is not None
            yield name, found

    def _handed_out(self, tensor: torch.Tensor | None, source: int) -> torch.Tensor | None:
        row = torch.zeros(3 + MOST_DIMS, dtype=torch.int64)
        if self.axis.index == source and tensor is not None:
            numbers = [1, DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
            row[: len(numbers)] = torch.tensor(numbers)
        row = row.to(self.engine.device)
        broadcast(row, self.axis, source, "control")
        present, kind, dims, *shape = row.tolist()
        if not present:
            return None
        if self.axis.index != source or tensor is None:
            tensor = torch.empty(shape[:dims], dtype=DTYPES[kind], device=self.engine.device)
        tensor = tensor.detach().contiguous()
        as_bytes = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        broadcast(as_bytes, self.axis, source, "control")
        return tensor


class _Counted:
    """Around a backward that makes gradients of weights: the technique takes part, and tells which were reached."""

    def __init__(self, engine: Engine, tally: Tally, last: bool):
        self.engine, self.tally, self.last = engine, tally, last

    def __enter__(self) -> None:
        self.engine.technique.start_micro_batch(last=self.last)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.tally.used.append(self.engine.technique.finish_micro_batch())
