"""A step under a pipeline: this rank's row of the schedule, its seeds, and the control row over stages.

    for each op of the row:
        F    receive hidden states . forward of the stage . send outputs; the last stage computes the loss
        B    receive the outputs' gradients . backward . send the inputs' gradients
        I W  B in two parts: the inputs' gradients, which are sent at once; later the weights' gradients
    finish   sum gradients over data ranks as without a pipeline, and those of tied parameters over their stages; send
             loss, weight and norm to every stage

A step runs the schedule `accumulate` times, each with `microbatches` micro-batches, so it equals one process that
accumulates over accumulate * microbatches micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.utils.checkpoint import CheckpointError

from shardwise.comm import Axis, gather_json, gather_rows, gathered_alone, receive, send
from shardwise.device import seed_generators
from shardwise.errors import InputError, RefusedPlan, first_line
from shardwise.host import put, read
from shardwise.layout.dealing import Share
from shardwise.layout.schedule_kinds import Op
from shardwise.layout.schedules import plain_schedule
from shardwise.parallel.full import FullShard
from shardwise.parallel.pipeline import backward
from shardwise.parallel.pipeline.lasting import as_left
from shardwise.parallel.pipeline.stage_gradients import Tape
from shardwise.part.pairs import as_pairs
from shardwise.random import Samples
from shardwise.step.backward_writes import noting_buffers
from shardwise.step.control import Agreement, Tally, agree
from shardwise.step.loss import NO_GRAPH, Loss
from shardwise.step.normalise import square_norm
from shardwise.step.objective import objective_of
from shardwise.step.sample_states import meet_kept
from shardwise.step.seeded_draws import drawing, seed_masks
from shardwise.step.staged import StagedForward
from shardwise.step.state import RankState
from shardwise.trace.deferred import seed_of


def run_schedule(state: RankState, parts: list[Share], tally: Tally) -> None:
    """Runs forward and backward of a step's micro-batches, in the order of this rank's row of the schedule.

    parts  this rank's part of each micro-batch;  tally  gets losses, weights and used parameters
    """
    staged = _staged(state)
    row, done = _Row(state, staged, parts, tally), 0
    while done < len(parts):
        schedule = staged.cut.schedule
        if len(parts) - done < schedule.microbatches:  # fewer are left, as at the end of an epoch
            schedule = plain_schedule(schedule.owner, len(parts) - done)
        final = schedule.last_backward(staged.axis.index)  # after it gradients of weights may be reduced
        staged.mail.expect(schedule, done, row.key)
        ends = done + schedule.microbatches == len(parts)
        for place, op in enumerate(schedule.rows[staged.axis.index]):
            with state.hooks.inside("micro_batch"):
                row.run(op, done + op.microbatch, last=ends and place == final)
        done += schedule.microbatches
    staged.mail.flush()
    # `serving` exists if forwards take gradients over a stage's boundary; its requests of this step are dropped
    if staged.serving is not None:
        staged.serving.clear()
    staged.staged.on_enter = None


def finish_stages(state: RankState, tally: Tally, used: set[int], *, again: bool) -> Agreement:
    """Completes the gradients, sums those of tied parameters over stages; returns all ranks' `Agreement`. Collective.

    used    indices of the parameters that this rank reached; with `again`, that any data rank reached
    again   whether this is the second call in a step, since data ranks used different parameters
    """
    cut = _staged(state).cut
    used = _tied_used(state, used)
    state.technique.finish_step(used)
    # Tied gradients are summed in place, which cannot be done twice, so data ranks' branches are compared first.
    if cut.tied and state.data_ranks > 1 and not again:
        agreed = agree_stages(state, tally, 0.0)
        if not agreed.same_branches:  # the caller calls again, with what any data rank used
            return agreed
    _sum_tied(state, used)
    return agree_stages(state, tally, square_norm(state))


def agree_stages(state: RankState, tally: Tally, square_norm: torch.Tensor | float) -> Agreement:
    """Returns the `Agreement` over data ranks and stages. Collective.

    Loss, weight, samples and extras are the last stage's; `square_norms` has one number, the sum over all stages; and
    `same_branches` holds if it does on every stage. In fp16 `state.scale` is set to the last stage's.
    """
    staged, own = _staged(state), agree(tally, square_norm, state.mesh.gradients)
    rows = own.square_norms[: state.mesh.shard.size] if state.technique.in_pieces else own.square_norms[:1]
    scale = state.scale.value if state.scale is not None else 0.0
    row = [own.total, own.weight, own.samples, own.extras, own.same_branches, math.fsum(rows), scale]
    table = gather_json(row, staged.axis, state.device)
    total, weight, samples, extras, _, _, scale = table[staged.last_owner]
    if state.scale is not None:  # chosen where the loss is
        state.scale.value = scale
    same = all(row[4] for row in table)
    return replace(own, total=total, weight=weight, samples=int(samples), extras=extras, same_branches=same,
                   square_norms=[math.fsum(row[5] for row in table)])  # fmt: skip


def _staged(state: RankState) -> StagedForward:
    assert state.staged is not None, "the plan has no pipeline stages"
    return state.staged


# --- the row


@dataclass
class _Saved:
    """A micro-batch's tensors that a stage saves between its forward and its backward.

    inputs   tensors that it received, leaves of its graph
    outputs  tensors that it sent; on the last stage [the scalar to differentiate]
    key      key of its messages' shapes (`StagedForward.key`)
    tape     of gradients that the forward takes itself over the stage's boundary; else None
    later    set by op I: what op W needs
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    key: tuple
    tape: Tape | None = None
    later: backward.DeferredWeightGrad | None = None


class _Row:
    """Runs the ops of one step on this rank, and keeps a `_Saved` for each (stage, micro-batch) between F and B."""

    def __init__(self, state: RankState, staged: StagedForward, parts: list[Share], tally: Tally):
        self.state, self.staged, self.parts, self.tally = state, staged, parts, tally
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._first = True  # no forward was run
        self._trained: dict[int, list[bool]] = {}  # stage -> `trainable()` after its first forward
        self._keys: dict[int, tuple] = {}

    def key(self, index: int) -> tuple:
        """Returns the key of the message shapes of the micro-batch `index` (`StagedForward.key`)."""
        if index not in self._keys:
            self._keys[index] = self.staged.key(self.parts[index].batch, index)
        return self._keys[index]

    def run(self, op: Op, index: int, *, last: bool) -> None:
        """Runs one op on the micro-batch `index`. `last`: whether it is the last op that makes gradients of weights."""
        if op.kind == "F":
            self._forward(op.stage, index)
        else:
            self._backward(op, index, last=last)

    def _forward(self, stage: int, index: int) -> None:
        """Run one stage's forward of a micro-batch: receive inputs, send outputs or compute the loss."""
        state, staged, part = self.state, self.staged, self.parts[index]
        self._meet(part)
        meet_kept(state, part)
        self.tally.stood_in |= part.count == 0
        seed_masks(state, index, part, alone=self._first)
        self._first = False
        batch = staged.to_device(part.batch)
        key = self.key(index)
        inbox = staged.mail.receive_forward(stage, index, key) if stage else []
        if state.global_random is None:  # a stage's own random numbers; those drawn before it are equal on all stages
            own = seed_of("fast", state.seed, state.steps_done, index, state.data_rank, stage)
            staged.staged.on_enter = lambda: seed_generators(own)
        with drawing(state), as_left(state.module, staged.cut.written):
            output, tape = staged.stage(stage, batch, inbox, index)
            if stage == staged.last:
                outputs = [self._loss(staged.loss_of(output, batch, part), part)]
            else:
                outputs = list(output)
                staged.mail.send_forward(stage, index, key, outputs)
        self._as_first(stage)
        self._saved[stage, index] = _Saved(staged.staged.taken, outputs, key, tape)
        staged.staged.taken = []  # else the last micro-batch's tensors would be kept until the next step

    def _as_first(self, stage: int) -> None:
        """Raise `RefusedPlan` if a forward leaves other weights trainable than the stage's first one of the step."""
        now = self.staged.trainable()
        if now != self._trained.setdefault(stage, now):
            raise RefusedPlan(
                "the forward turns requires_grad of weights within a step, and under pp= other micro-batches, whose "
                "backwards are to come, would be given other gradients than in one process: turn it in the first "
                "forward of a step or between steps, set microbatches=1, or leave pp out"
            )

    def _loss(self, loss: Loss, part: Share) -> torch.Tensor:
        """Returns the scalar to differentiate of a micro-batch; adds its loss to the tally."""
        objective, extras = objective_of(self.state, loss)
        if not objective.requires_grad:
            raise InputError(NO_GRAPH)
        self.tally.add(loss, part.count, extras)
        return objective

    def _meet(self, part: Share) -> None:
        """Sets the samples that modules run next, for random numbers by global index and to mark a stand-in."""
        self.state.phase.samples = part.count
        if self.state.global_random is not None:
            self.state.global_random.samples = Samples(part.start, part.count, part.total)

    def _backward(self, op: Op, index: int, *, last: bool) -> None:
        """Runs op B (whole backward), I (of inputs only) or W (of weights only, nothing is sent) of a micro-batch."""
        saved, mail = self._saved[op.stage, index], self.staged.mail
        if op.kind == "W":
            assert saved.later is not None
            with self._counted(last):
                backward.of_weights(saved.later)
            del self._saved[op.stage, index]
            return
        self._meet(self.parts[index])  # recompute runs the forward again
        gradients: list[torch.Tensor | None] = [None]
        if op.stage < self.staged.last:
            # The forward takes gradients over the stage's boundary, and the next stage may still ask for some before
            # it has the outputs' gradients.
            if self.staged.serving is not None:
                with drawing(self.state):
                    self.staged.serving.until_end(op.stage, index)
            gradients = mail.receive_backward(op.stage, index, saved.key)
            # outputs that the next stage's backward did not reach are left out, since zero gradients for weights that
            # nobody used would make the optimizer move them
            saved.outputs = [o for o, g in zip(saved.outputs, gradients, strict=True) if g is not None]
            gradients = [gradient for gradient in gradients if gradient is not None]
        # The forward took gradients itself, so its tape adds tensors from which backward starts.
        if saved.tape is not None and self.staged.serving is not None:
            with drawing(self.state):
                saved.outputs, gradients = saved.tape.last(saved.outputs, gradients)
                self.staged.serving.end(op.stage, index)
        with drawing(self.state), noting_buffers(self.state.backwards, ahead=len(self._saved) > 1):
            if op.kind == "I":
                saved.later = backward.of_input(saved.outputs, gradients, saved.inputs)
                saved.outputs = []
            else:
                with self._counted(last):
                    self._whole(saved, gradients)
                del self._saved[op.stage, index]
        if op.stage:
            mail.send_backward(op.stage, index, saved.inputs)
            for leaf in saved.inputs:
                leaf.grad = None
        if saved.tape is not None and self.staged.serving is not None:
            self.staged.serving.forget(op.stage, index)

    @contextmanager
    def _counted(self, last: bool) -> Iterator[None]:
        """Context of a backward that makes gradients of weights, which the technique then reduces.

        last  whether it is the step's last such backward on this rank, so that reductions may start
        """
        self.state.technique.start_micro_batch(last=last)
        yield
        self.tally.used.append(self.state.technique.finish_micro_batch())

    @staticmethod
    def _whole(saved: _Saved, gradients: list[torch.Tensor | None]) -> None:
        """Runs the backward of a stage's micro-batch; `RefusedPlan` if a recomputed block differs from its forward."""
        try:
            backward.whole(saved.outputs, gradients)
        except CheckpointError as error:
            raise RefusedPlan(
                "a block run again in backward did something else than in forward; use remat=none "
                f"({first_line(error)})"
            ) from error


# --- parameters that several stages hold


def _tied_used(state: RankState, used: set[int]) -> set[int]:
    """Returns `used` plus indices of this rank's tied parameters that any stage used. Collective over stages."""
    staged = _staged(state)
    tied = staged.cut.tied
    if not tied:
        return used
    index_of = {name: index for index, name in enumerate(state.names)}
    here = [float(index_of.get(name, -1) in used) for name in tied]
    anywhere = read(gather_rows(put(here, state.device), staged.axis).amax(dim=0), "tied parameters")
    reached = {index_of[name] for name, any_ in zip(tied, anywhere, strict=True) if any_ and name in index_of}
    return used | reached


@torch.no_grad()
def _sum_tied(state: RankState, used: set[int]) -> None:
    """Sums gradients of parameters that several stages hold, into each holder's `master.grad`. Collective."""
    staged, technique = _staged(state), state.technique
    if not staged.cut.tied:
        return
    index_of = {name: index for index, name in enumerate(state.names)}
    slots = {slot.name: slot for slot in technique.slots}
    shapes = state.shapes()
    for number, name in enumerate(staged.cut.tied):
        index = index_of.get(name)
        # no stage of this rank holds it, or no rank's backward reached it on any stage
        if index is None or index not in used:
            continue
        gradient = gathered_alone(technique.full_gradient(index))
        reached = gradient is not None
        if gradient is None:  # another stage used it: this one adds zeros
            kind = state.precision.master.to_complex() if name in state.pairs else state.precision.master
            where = slots[name].master.device if name in slots else state.device
            gradient = torch.zeros(shapes[name], dtype=kind, device=where)
        numbers = _summed(as_pairs(gradient.contiguous()), staged.axis, staged.cut.holders[name], number)
        total = state.outside(name, numbers)
        if not reached and isinstance(technique, FullShard):  # FSDP2 has set no `.grad` that could be written into
            technique.place_gradient(index, total)
            continue
        slot = slots.get(name)
        if slot is None:  # this rank of dp_shard has no element of it
            continue
        select = getattr(technique, "select", None)
        piece = total if select is None else select(index, total, state.mesh.shard.index)
        # only another stage's backward reached it
        if slot.master.grad is None:
            slot.master.grad = torch.zeros_like(slot.master)
        slot.master.grad.copy_(piece.reshape(slot.master.grad.shape))


def _summed(gradient: torch.Tensor, axis: Axis, holders: tuple[int, ...], number: int) -> torch.Tensor:
    """Returns the sum of `gradient` over the pipeline ranks `holders`, the same bits on each.

    The first holder adds in order of ranks and sends the sum to the others. number: of the parameter, for messages
    """
    first, *others = holders
    tag = "tied gradients"
    if axis.index != first:  # even numbers on the way to the first holder, odd ones back: messages stay apart
        sending = send(gradient, axis, first, tag, 2 * number)
        total = torch.empty_like(gradient)
        receive(total, axis, first, tag, 2 * number + 1).wait()
        sending.wait()
        return total
    total = gradient.clone()
    for other in others:
        theirs = torch.empty_like(total)
        receive(theirs, axis, other, tag, 2 * number).wait()
        total += theirs
    for pending in [send(total, axis, other, tag, 2 * number + 1) for other in others]:
        pending.wait()
    return total
