"""Repeat a step that updated weights within backward, if the norm of its gradients turns out to exceed `clip_norm`.

    first    forward, backward: sub-groups updated, as if nothing were clipped      norm <= bound: the step stands
    else     weights, state ── restored (tiers/undo)      buffers, RNG states, what the module holds ── restored
    again    forward, backward: gradients · bound / norm, sub-groups updated

Every rank has the same norm, from the same control rows, so either all repeat or none. If the second run has another
norm, the forward depends on something that is not restored, and the run ends.

What this does not do: restore what a forward changes in its batch (the look finds that parts do not add up then), in
objects of torch's classes, in files, or in other processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwise.device import generators_now
from shardwise.errors import RunError
from shardwise.python_seeds import python_kept
from shardwise.step.normalise import clip_of
from shardwise.step.result import StepResult
from shardwise.step.state import RankState
from shardwise.trace.module_state import ModuleState
from shardwise.trace.outside_state import Reached

APART = 1e-2  # relative difference of the two norms that is allowed, since a device may sum in varying order


class Before:
    """A snapshot of what a step's forward and backward change besides weights and the optimizer's state.

    That is the module's buffers and attributes, RNG states, sums of metrics.
    """

    def __init__(self, state: RankState):
        task, forward = state.task, state.forward
        if state.reached is None:  # the same in each step
            state.reached = Reached(state.module, (task.loss, task.inputs, *filter(None, [task.metrics])))
        module = ModuleState(state.module, reached=state.reached)
        self._put_back: list[Callable[[], None]] = [module.restore, python_kept(), generators_now()]
        self._metrics = None if forward.metrics is None else dict(forward.metrics.sums)
        self._gathered = forward.gathered_bytes

    def put_back(self, state: RankState) -> None:
        """Restores the snapshot."""
        for put in self._put_back:
            put()
        if state.forward.metrics is not None:
            state.forward.metrics.sums = dict(self._metrics or {})
        state.forward.gathered_bytes = self._gathered


def clipped_late(state: RankState, result: StepResult) -> float | None:
    """Returns the clip factor that gradients used within backward should have had; None if the step is valid."""
    clip = clip_of(state, result.grad_norm)
    return clip if state.tier is not None and state.tier.stepping and clip != 1.0 else None


def check_same(first: StepResult, again: StepResult) -> None:
    """Raise `RunError`, on every rank, where the gradient norms of a step's two runs differ by more than `APART`."""
    if not math.isclose(first.grad_norm, again.grad_norm, rel_tol=APART):
        raise RunError(
            f"gradients=as_made: step {first.step} was repeated, since its gradients had to be clipped, and its norm "
            f"is {again.grad_norm:.6g} where it was {first.grad_norm:.6g}: the forward hangs on something outside of "
            "the module that changes from call to call: leave gradients out, and go on from the last checkpoint"
        )
