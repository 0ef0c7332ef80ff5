"""`verify --thorough`: a second proof with a third of what the first has two of.

    ranks    an axis of 2 has 3, the first of `AXES` with which the plan is possible
    steps    3
    samples  an odd number in a batch, so that ranks and micro-batches have unlike shares
    values   in the third step on a grid of halves: ties, and exact zeros

What goes wrong only where a sum passes a third rank, in the third step, or in a share of another size, shows here.

What this does not do: more than one axis of 3 at a time; an odd width or field, which are the task's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan, check
from shardwise.proof.outcome import Parity
from shardwise.step.batching import samples_in, slice_samples
from shardwise.task import Task
from shardwise.task_names import resolve_task

STEPS = 3
AXES = ("dp_shard", "dp_replicate", "pp", "cp", "cp_ulysses", "tp")
Prove = Callable[[Any, Plan], Parity]


@dataclass(frozen=True)
class OddTask:
    """Makes a task with an odd number of samples in each batch, and values on a grid from the third step on."""

    task: Any
    grid: bool = True

    def __call__(self) -> Task:
        """Returns the task."""
        task = resolve_task(self.task)
        return task if task.batch is None else task.with_(batch=_OddBatch(task.batch, self.grid))


@dataclass(frozen=True)
class _OddBatch:
    batch: Callable[[int], Any]
    grid: bool

    def __call__(self, step: int) -> Any:
        batch = self.batch(step)
        samples = samples_in(batch)
        batch = slice_samples(batch, 0, samples - 1) if samples % 2 == 0 and samples > 2 else batch
        return tree_map_only(torch.Tensor, _on_grid, batch) if self.grid and step >= STEPS - 1 else batch


def _on_grid(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * 2).round() / 2 if tensor.is_floating_point() else tensor


def prove_thirds(parity: Parity, task: Any, plan: Plan, prove: Prove) -> None:
    """Add to `parity` the proof of a plan with three ranks of an axis; `prove` proves a task under a plan.

    A plan that is refused gives way to the next, one whose values are not finite on a grid to those off it.
    """
    for third in _thirds(plan):
        for grid in (True, False):
            try:
                second = prove(OddTask(task, grid), third)
            except InputError:  # so few samples, or such values, are not for this task
                continue
            if second.refused:
                break
            if not grid or second.parity or (not second.unproven and _finite(second)):
                parity.second = second
                parity.notes.append(f"not met: {_not_met(third, grid)}")
                return
    parity.notes.append("not met: a third rank of any axis, since each such plan is refused")


def _finite(parity: Parity) -> bool:
    """Returns whether every error is a number: beside values that are not, nothing can be compared."""
    return parity.loss_error is not None and math.isfinite(parity.loss_error)


def _thirds(plan: Plan) -> Iterator[Plan]:
    """Yields plans with 3 in the place of one 2, and at last the plan itself."""
    for axis in AXES:
        if getattr(plan, axis) == 2:
            third = plan.with_(**{axis: 3})
            try:
                check(third)
            except RefusedPlan:
                continue
            yield third
    yield plan


def _not_met(plan: Plan, grid: bool) -> str:
    twos = [axis for axis in AXES if getattr(plan, axis) == 2]
    missing = [f"a third rank of {', '.join(twos)}"] if twos else []
    missing += [] if grid else ["ties and exact zeros"]
    return "; ".join([*missing, f"a step after the third, other widths, more than {plan.world_size} ranks"])
