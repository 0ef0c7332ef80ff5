"""One optimizer step of one rank (its rows under pp: pipelined). A change: also proof/oracle, plain_run, settings.

    train_step      gradients ......................... update
                    micro-batches, then `complete`      collect, the optimizer's own step, hand out, publish

Each micro-batch's sum is differentiated as it is; ranks' gradients are summed; one control row from each rank tells
the global weight, and gradients are divided by it once, together with clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from shardwise.comm import gather_json
from shardwise.errors import InputError, RefusedPlan, first_line
from shardwise.guard.points import reach
from shardwise.layout.dealing import Share
from shardwise.part import forget, plain
from shardwise.part.levels import Distributed
from shardwise.step.backward_writes import BackwardWrites, noting_buffers
from shardwise.step.batching import fields_of, parts_of, pieces_of, told_beside_first
from shardwise.step.control import Agreement, PendingRow, Tally, agree, gather_reached
from shardwise.step.loss import NO_GRAPH, TWICE, is_second_backward
from shardwise.step.normalise import NotFinite, normalise, square_norm
from shardwise.step.not_finite import name_bad_input
from shardwise.step.objective import objective_of
from shardwise.step.repeat import Before, check_same, clipped_late
from shardwise.step.result import StepResult
from shardwise.step.sample_states import meet_kept
from shardwise.step.seeded_draws import drawing, seed_masks
from shardwise.step.state import RankState
from shardwise.trace.outside_reads import set_training

T = TypeVar("T")


def dealt(state: RankState, batch: Any) -> list[Share]:
    """Returns this rank's parts of a GLOBAL batch (a pytree), or the parts themselves where they are given."""
    if isinstance(batch, list) and batch and all(isinstance(part, Share) for part in batch):
        return batch
    pieces = state.plan.step_microbatches
    return parts_of(batch, accumulate=pieces, data_rank=state.data_rank, data_ranks=state.data_ranks)


def train_step(state: RankState, parts: list[Share]) -> StepResult:
    """Take one optimizer step on this rank's parts of a global batch; returns its loss, norm, ... Collective.

    Raises `NotFinite`, or a `RunError` that names the sample at fault, as `state.on_nonfinite` says; `RunError` where
    ranks took different branches; `InputError` for the task's own mistakes, `RefusedPlan` for what a step finds.
    """
    if state.look_first is not None:
        look, state.look_first = state.look_first, None
        look(parts[0].total)
    _set_learning_rate(state)
    state.first_fields = state.first_fields or fields_of(parts[0].batch)
    with told_beside_first(state.first_fields, parts[0].batch, state.steps_done):
        return _step(state, parts)


def _step(state: RankState, parts: list[Share]) -> StepResult:
    """Returns the result of one step: gradients, and an update where they are usable. Collective."""
    if state.needs_closure:
        return _with_closure(state, parts)
    # only a tier whose updates within backward can be taken back (`undo`) needs what the step began with
    before = Before(state) if state.tier is not None and state.tier.undo is not None else None
    try:
        result, usable = gradients(state, parts)
        if before is not None:
            result, usable = _standing(state, parts, before, result, usable)
    except BaseException:
        if state.tier is not None:
            state.tier.abandon()  # some weights may have been updated
        raise
    if usable:
        update(state, state.optimizer.step)
    return _done(state, result, usable)


def _standing(
    state: RankState, parts: list[Share], before: Before, result: StepResult, usable: bool
) -> tuple[StepResult, bool]:
    """Returns what `gradients` did where updates within it stand; else takes these back, and repeats it if usable."""
    assert state.tier is not None
    # no update is to be done: those within backward are taken back
    if not usable:
        state.tier.take_back()
    # what was updated within backward was not clipped, and would have been: the step is repeated with its factor
    elif (clip := clipped_late(state, result)) is not None:
        state.tier.take_back()
        before.put_back(state)
        first, (result, usable) = result, gradients(state, parts, clip)
        check_same(first, result)
        state.repeated_steps += 1
    return result, usable


def gradients(state: RankState, parts: list[Share], clip: float | None = None) -> tuple[StepResult, bool]:
    """Run forward and backward over the micro-batches; gradients end up summed, divided and clipped.

    clip   what gradients that are used as they are made are clipped by, where a first run of the step has told
    Returns what the step came to, and whether the update may be done.
    """
    state.technique.start_step()
    # clip None: a first run; else the repeat that clips by what the first run told
    if state.as_made is not None:
        state.as_made.forget(clip)
    first = state.steps_done == 0
    state.backwards = BackwardWrites(state.module, state.mesh, state.norms) if first else None
    tally = Tally(state.device, state.counts, pieces=state.plan.deterministic)
    if state.staged is not None:
        from shardwise.step.pipelined import run_schedule

        reach("forward", state.steps_done, state)
        run_schedule(state, parts, tally)
    else:
        for index, part in enumerate(parts):
            with state.hooks.inside("micro_batch"):
                reach("forward", state.steps_done, state)
                run = _micro_batch if state.order is None else _in_pieces
                run(state, index, part, tally, last=index == len(parts) - 1)
    take_written(state)
    if state.backwards is not None:
        state.backwards.refuse(state.read_elsewhere, same_samples=state.same_samples)
    try:
        return complete(state, tally)
    except NotFinite as error:  # raised on every rank, so that all look into their batches
        # updates within backward are taken back; a repeat (`clip`) comes after a first run that was finite
        if clip is None and state.tier is not None and state.tier.undo is not None:
            state.tier.take_back()
        raise name_bad_input(state, parts, error) from None


def take_written(state: RankState) -> None:
    """Let masters follow what forwards wrote into the weights; their backwards are over."""
    if not state.written:
        return
    state.technique.take_weights()
    if state.owners is not None:
        state.owners.take_weights()


def complete(state: RankState, tally: Tally) -> tuple[StepResult, bool]:
    """Returns (result, whether ranks may update); gradients are summed over ranks, divided and clipped. Collective.

    tally   what this rank added up over the step's micro-batches
    Raises `RunError` where ranks took different branches that one process could not have taken, and as `normalise`.
    """
    with state.hooks.inside("reduce"):
        reach("reduce", subject=state)
        agreed = _reduced(state, tally, tally.reached, again=False)
        # A weight that this rank did not reach has a gradient from those that did: once more, with what any rank used.
        if not agreed.same_branches and state.mesh.gradients.size > 1:
            refuse = state.task.branches == "same"
            used = gather_reached(tally, state.names, state.mesh.gradients, state.device, refuse=refuse)
            agreed = _reduced(state, tally, used, again=True)
        return normalise(state, agreed)


def _reduced(state: RankState, tally: Tally, used: set[int], *, again: bool) -> Agreement:
    """Completes the gradients and exchanges control rows; returns their `Agreement`. Collective.

    Replicas hold the same sums, bit by bit, and so the same norm: their row need not wait for it, and travels
    beside the gradients.
    """
    state.used = used
    if state.staged is not None:
        from shardwise.step.pipelined import finish_stages

        return finish_stages(state, tally, used, again=again)
    if state.technique.in_pieces:
        state.technique.finish_step(used)
        return agree(tally, square_norm(state), state.mesh.gradients)
    asked = PendingRow(tally, 0.0, state.mesh.gradients)
    state.technique.finish_step(used)
    return asked.answer(square_norm(state))


def update(state: RankState, step: Callable[[], T]) -> T | None:
    """Run the optimizer's `step` where its tensors are whole enough, and publish; returns its result. Collective."""
    with state.hooks.inside("update"):
        reach("update", subject=state)
        # an optimizer that needs whole tensors steps over those that this rank owns
        if state.owners is not None:
            state.owners.collect_gradients(state.used)
        result = step() if state.tier is None else state.tier.step(step)
        if state.owners is not None:
            state.owners.hand_out(state.used)
        state.technique.publish(rounded=state.tier is not None and state.tier.rounds)
        return result


def _with_closure(state: RankState, parts: list[Share]) -> StepResult:
    """Returns the first evaluation's result of an optimizer that asks for the loss again. Collective."""
    results: list[StepResult] = []

    def closure() -> float:
        state.technique.publish()  # the optimizer has moved the masters since its last call
        result, usable = gradients(state, parts)
        results.append(result)
        # it has moved nothing yet; gradients of weights that it tries later are its own to judge, as line searches do
        if not usable and len(results) == 1:
            raise _NotUsable("the first gradients are not finite")
        return result.loss

    try:
        state.optimizer.step(closure)
    except _NotUsable:
        return _done(state, results[0], False)
    state.technique.publish()
    # The first evaluation is that of the weights before the step, as with other optimizers.
    return _done(state, results[0], True)


class _NotUsable(Exception):
    """Ends an optimizer's step whose first gradients are not finite, where such steps are skipped."""


def _done(state: RankState, result: StepResult, updated: bool) -> StepResult:
    """Returns the result, with metrics; counts the step, and drops what it left. `updated`: weights moved."""
    if state.steps_done == 0 and state.forward.gathered_bytes:
        received_mb = state.forward.gathered_bytes / 1e6
        state.notices.append(
            f'loss_scope="global": in each step this rank receives {received_mb:.3g} MB of other ranks\' outputs '
            "and batches for the loss"
        )
    # what a step gathered to be read again belongs to its weights
    if state.tensor is not None:
        forget()
    if state.tensor is not None or state.forward.positions is not None:
        _settle_buffers(state.module)
    state.steps_done += 1
    state.skipped_steps += not updated
    return replace(result, metrics=collect_metrics(state)) if state.forward.metrics is not None else result


def _settle_buffers(module: nn.Module) -> None:
    """Gathers cut tensors that a forward left in buffers, since proofs and checkpoints read whole ones. Collective."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if isinstance(buffer, Distributed):
                child._buffers[name] = plain(buffer.detach())


def _set_learning_rate(state: RankState) -> None:
    """Set the rates of this step by the schedule, as multiples of those that were given."""
    if state.schedule is None:
        return
    factor = state.schedule(state.steps_done)
    for group, base in zip(state.optimizer.param_groups, state.base_lrs, strict=True):
        if base is not None:  # an optimizer may have no rate (a group without "lr")
            group["lr"] = base * factor


def _micro_batch(state: RankState, index: int, part: Share, tally: Tally, *, last: bool) -> None:
    """Run forward and backward of one micro-batch, into gradients and `tally`; `last`: reductions begin with it."""
    meet_kept(state, part)
    state.phase.samples = part.count
    # a rank without samples: its branches and parameters must not be compared with the others'
    tally.stood_in |= part.count == 0
    seed_masks(state, index, part)
    state.technique.start_micro_batch(last=last)
    with drawing(state):
        loss = state.forward(part)
        objective, extras = objective_of(state, loss)
        # a loss that no parameter reaches would raise in torch with a message about its graph
        if not objective.requires_grad:
            raise InputError(NO_GRAPH)
        tally.add(loss, part.count, extras)
        # gradients are divided as they are made, so what they are divided by is agreed on before backward
        if state.as_made is not None:
            state.as_made.begin(tally)
        try:
            with noting_buffers(state.backwards):
                objective.backward()
        except CheckpointError as error:
            raise RefusedPlan(
                "a block run again in backward did something else than in forward: a block that changes what it "
                "is given (a key-value cache: use_cache=False) or keeps state outside the module cannot be "
                f"recomputed; use remat=none ({first_line(error)})"
            ) from error
        except RuntimeError as error:
            if is_second_backward(error):
                raise InputError(TWICE) from error
            raise
    tally.used.append(state.technique.finish_micro_batch())


def _in_pieces(state: RankState, index: int, part: Share, tally: Tally, *, last: bool) -> None:
    """Run a rank's part of a micro-batch in pieces; one without samples runs where all ranks must meet in units."""
    order = state.order
    assert order is not None
    first, meet = order.pieces.first(index, state.data_rank), state.plan.sharded.weights
    pieces = pieces_of(part, order.pieces.samples(part.total, state.data_rank))
    for place, piece in enumerate(pieces):
        order.begin(first + place, last=last and place == len(pieces) - 1)
        # FSDP2 gathers in each forward, so that ranks of zero=3 run as many; elsewhere an empty piece costs nothing.
        if piece.count or meet:
            tally.leaves.append(order.leaf)
            _micro_batch(state, index, piece, tally, last=order.last)
        else:
            # as many entries on every rank, which are compared place by place
            tally.used.append(set())
            tally.stood_in = True


# --- beside the step


@torch.no_grad()
def evaluate(state: RankState, steps: Iterable[list[Share]]) -> tuple[float, float]:
    """Returns (sum, weight) of the loss over the parts of many batches and all ranks, in eval mode. Collective.

    Extra terms are left out; metrics are added up for `collect_metrics`.
    """
    reach("evaluate", subject=state)
    set_training(state.module, False)
    tally = Tally(state.device, state.counts)
    try:
        for parts in steps:
            for part in parts:
                state.phase.samples = part.count
                tally.add(state.forward(part), part.count, {})
    finally:
        set_training(state.module, True)
    take_written(state)  # an evaluation too may write into weights
    if state.staged is None:
        agreed = agree(tally, 0.0, state.mesh.gradients)
    else:
        from shardwise.step.pipelined import agree_stages

        agreed = agree_stages(state, tally, 0.0)
    return agreed.total, agreed.weight


def collect_metrics(state: RankState) -> dict[str, float]:
    """Returns Task.metrics over all samples since the last step (after `evaluate`: its own). Collective."""
    if state.forward.metrics is None:
        return {}
    metrics = state.forward.metrics.collect(state.mesh.data)
    if state.staged is not None:  # the last stage has them
        metrics = gather_json(metrics, state.mesh.pp, state.device)[state.staged.last_owner]
    return metrics
