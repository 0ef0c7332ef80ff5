"""Repeat a step whose gradients were used as they were made, where their norm came to more than the bound.

    first    forward, backward: sub-groups updated, as if nothing were clipped      norm <= bound: the step stands
    else     weights, state ── put back (tiers/undo)      buffers, draws, what the module holds ── put back
    again    forward, backward: gradients · bound / norm, sub-groups updated

Every rank has the same norm, from the same rows, so that all repeat or none. The norm of the second run is the first
one's; where it is another, the forward hangs on what is not put back, and the run ends.

What this does not do: put back what a forward changes in its batch (the look finds that parts do not add up then), in
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

APART = 1e-2  # of two norms that are one, where a device adds up in another order each time


class Before:
    """What forward and backward of a step change beside weights and the optimizer's state, as it was before."""

    def __init__(self, state: RankState):
        task, forward = state.task, state.forward
        if state.reached is None:  # the same in each step
            state.reached = Reached(state.module, (task.loss, task.inputs, *filter(None, [task.metrics])))
        module = ModuleState(state.module, reached=state.reached)
        self._put_back: list[Callable[[], None]] = [module.restore, python_kept(), generators_now()]
        self._metrics = None if forward.metrics is None else dict(forward.metrics.sums)
        self._gathered = forward.gathered_bytes

    def put_back(self, state: RankState) -> None:
        """Let all of it be what it was."""
        for put in self._put_back:
            put()
        if state.forward.metrics is not None:
            state.forward.metrics.sums = dict(self._metrics or {})
        state.forward.gathered_bytes = self._gathered


def clipped_late(state: RankState, result: StepResult) -> float | None:
    """Returns what the step's gradients, used already, should have been multiplied by; None where the step stands."""
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
