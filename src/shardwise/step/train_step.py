"""One optimizer step of one rank. A change here needs one in proof/oracle, proof/plain_run and proof/settings too.

    train_step      gradients ......................... update
                    micro-batches, then `complete`      collect, the optimizer's own step, hand out, publish

Backward differentiates each micro-batch's sum, undivided. Ranks' gradients are summed. One control row from each rank
gives the global weight, by which gradients are divided once, together with clipping. Pipelines: step/pipelined.
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
    """Returns this rank's part of each micro-batch of a GLOBAL batch (a pytree); a `list[Share]` is returned as is."""
    if isinstance(batch, list) and batch and all(isinstance(part, Share) for part in batch):
        return batch
    pieces = state.plan.step_microbatches
    return parts_of(batch, accumulate=pieces, data_rank=state.data_rank, data_ranks=state.data_ranks)


def train_step(state: RankState, parts: list[Share]) -> StepResult:
    """Takes one optimizer step on this rank's parts of a global batch; returns its `StepResult`. Collective.

    parts  this rank's `Share` of each micro-batch
    Raises `NotFinite`, which names a bad sample if there is one, unless `state.on_nonfinite` allows such steps;
    `RunError` if ranks took different branches; `InputError` for mistakes in the task; `RefusedPlan` if the step shows
    that the plan would not equal one process.
    """
    if state.look_first is not None:
        look, state.look_first = state.look_first, None
        look(parts[0].total)
    _set_learning_rate(state)
    state.first_fields = state.first_fields or fields_of(parts[0].batch)
    with told_beside_first(state.first_fields, parts[0].batch, state.steps_done):
        return _step(state, parts)


def _step(state: RankState, parts: list[Share]) -> StepResult:
    """Returns the result of one step: computes gradients, and updates if all is finite. Collective."""
    if state.needs_closure:
        return _with_closure(state, parts)
    # a snapshot is needed only if updates within backward may be undone
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
    """Undoes updates within backward if the step must be skipped or clipped, and repeats it with clipping.

    before          snapshot from the step's beginning
    result, usable  what `gradients` returned; returned as they are if updates are valid, else those of the repeat
    """
    assert state.tier is not None
    # the step is to be skipped
    if not usable:
        state.tier.take_back()
    # updates within backward were not clipped, though the norm asks for it, so the step is repeated with that factor
    elif (clip := clipped_late(state, result)) is not None:
        state.tier.take_back()
        before.put_back(state)
        first, (result, usable) = result, gradients(state, parts, clip)
        check_same(first, result)
        state.repeated_steps += 1
    return result, usable


def gradients(state: RankState, parts: list[Share], clip: float | None = None) -> tuple[StepResult, bool]:
    """Runs forward and backward over the micro-batches; returns (`StepResult`, whether the update may be done).

    clip   factor on gradients that are used within backward, in the repeat of a step (`_standing`); None: first run
    Masters then have gradients that are summed over ranks, divided and clipped.
    """
    state.technique.start_step()
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
    except NotFinite as error:  # raised on every rank, so all can search their batches
        # updates within backward are undone; not in a repeat (`clip`), whose first run was finite
        if clip is None and state.tier is not None and state.tier.undo is not None:
            state.tier.take_back()
        raise name_bad_input(state, parts, error) from None


def take_written(state: RankState) -> None:
    """Copies what forwards wrote into weights to their masters; called after the backwards. Collective with owners."""
    if not state.written:
        return
    state.technique.take_weights()
    if state.owners is not None:
        state.owners.take_weights()


def complete(state: RankState, tally: Tally) -> tuple[StepResult, bool]:
    """Sums gradients over ranks, divides and clips them; returns (result, whether ranks may update). Collective.

    tally   this rank's sums over the step's micro-batches
    Raises `RunError` if ranks took different branches that one process could not have taken, and as `normalise`.
    """
    with state.hooks.inside("reduce"):
        reach("reduce", subject=state)
        agreed = _reduced(state, tally, tally.reached, again=False)
        # Ranks used different parameters, so gradients are completed again for those that any rank used.
        if not agreed.same_branches and state.mesh.gradients.size > 1:
            refuse = state.task.branches == "same"
            used = gather_reached(tally, state.names, state.mesh.gradients, state.device, refuse=refuse)
            agreed = _reduced(state, tally, used, again=True)
        return normalise(state, agreed)


def _reduced(state: RankState, tally: Tally, used: set[int], *, again: bool) -> Agreement:
    """Completes the gradients and gathers control rows; returns their `Agreement`. Collective.

    used   indices of the parameters to complete;  again  whether this is the second call in a step
    Replicas have the same sums to the bit, and so the same norm. Their control rows need not contain it, and are sent
    while gradients are still reduced.
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
    """Calls `step`, the optimizer's, on this rank's tensors, and publishes the weights; returns its result. Collective.

    An optimizer that needs unsharded tensors gets those that this rank owns.
    """
    with state.hooks.inside("update"):
        reach("update", subject=state)
        if state.owners is not None:
            state.owners.collect_gradients(state.used)
        result = step() if state.tier is None else state.tier.step(step)
        if state.owners is not None:
            state.owners.hand_out(state.used)
        state.technique.publish(rounded=state.tier is not None and state.tier.rounds)
        return result


def _with_closure(state: RankState, parts: list[Share]) -> StepResult:
    """Takes a step of an optimizer with a closure (LBFGS); returns the first evaluation's result. Collective."""
    results: list[StepResult] = []

    def closure() -> float:
        state.technique.publish()  # the optimizer has moved the masters since its last call
        result, usable = gradients(state, parts)
        results.append(result)
        # only the first gradients end the step; non-finite ones of weights tried later are a line search's to handle
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
    """Raised in the closure to end an optimizer's step whose first gradients are not finite, if these are skipped."""


def _done(state: RankState, result: StepResult, updated: bool) -> StepResult:
    """Counts the step and drops tensors that it cached; returns the result, with metrics. `updated`: not skipped."""
    if state.steps_done == 0 and state.forward.gathered_bytes:
        received_mb = state.forward.gathered_bytes / 1e6
        state.notices.append(
            f'loss_scope="global": in each step this rank receives {received_mb:.3g} MB of other ranks\' outputs '
            "and batches for the loss"
        )
    # unsharded weights that a step gathered and cached are out of date now
    if state.tensor is not None:
        forget()
    if state.tensor is not None or state.forward.positions is not None:
        _settle_buffers(state.module)
    state.steps_done += 1
    state.skipped_steps += not updated
    return replace(result, metrics=collect_metrics(state)) if state.forward.metrics is not None else result


def _settle_buffers(module: nn.Module) -> None:
    """Replaces sharded tensors that a forward left in buffers by unsharded ones, for checkpoints. Collective."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if isinstance(buffer, Distributed):
                child._buffers[name] = plain(buffer.detach())


def _set_learning_rate(state: RankState) -> None:
    """Sets each group's learning rate for this step to its initial one times the schedule's factor."""
    if state.schedule is None:
        return
    factor = state.schedule(state.steps_done)
    for group, base in zip(state.optimizer.param_groups, state.base_lrs, strict=True):
        if base is not None:  # an optimizer may have no rate (a group without "lr")
            group["lr"] = base * factor


def _micro_batch(state: RankState, index: int, part: Share, tally: Tally, *, last: bool) -> None:
    """Runs forward and backward of one micro-batch, into gradients and `tally`.

    index  of the micro-batch in the step;  part  this rank's share of it
    last   whether it is the step's last one, in whose backward reductions begin
    """
    meet_kept(state, part)
    state.phase.samples = part.count
    # a stand-in sample may take other branches, which must not be compared with other ranks'
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
        # these gradients are divided within backward, so ranks agree on the divisor before it
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
    """Runs a rank's part of a micro-batch in pieces, as `deterministic` asks; arguments as of `_micro_batch`.

    An empty piece runs a stand-in sample if ranks must meet in FSDP2's units; else it is skipped.
    """
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
            # every rank needs as many entries, since they are compared one by one
            tally.used.append(set())
            tally.stood_in = True


# --- beside the step


@torch.no_grad()
def evaluate(state: RankState, steps: Iterable[list[Share]]) -> tuple[float, float]:
    """Returns (sum, weight) of the loss over many batches and all ranks, in eval mode. Collective.

    steps  this rank's parts of each batch; as many on every rank
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
    """Returns {metric: value} over all samples of the last step, or of the last `evaluate`. Collective."""
    if state.forward.metrics is None:
        return {}
    metrics = state.forward.metrics.collect(state.mesh.data)
    if state.staged is not None:  # only the last stage has outputs to measure
        metrics = gather_json(metrics, state.mesh.pp, state.device)[state.staged.last_owner]
    return metrics
