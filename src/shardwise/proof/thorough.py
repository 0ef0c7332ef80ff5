"""`verify --thorough`: a second proof with three ranks, steps and the like where the first has two.

    ranks    an axis of 2 gets 3, the first of `AXES` with which the plan is possible
    steps    3
    samples  an odd number in a batch, so that ranks and micro-batches have shares of different sizes
    extents  of sequences and fields one less (odd for even, even for odd), if one process runs with that
    values   in the third step rounded to multiples of 1/2, for ties and exact zeros

This finds mistakes that show only when a sum passes a third rank, in the third step, or in a share of another size.

What this does not do: more than one axis of 3 at a time, other widths of the model, or dtypes of messages, which the
first proof and the one in the plan's own precision check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan, check
from shardwise.look.one_process import Untried, failure_alone
from shardwise.precision import Precision
from shardwise.proof.outcome import Parity
from shardwise.step.batching import samples_in, slice_samples
from shardwise.task import Task
from shardwise.task_names import resolve_task

STEPS = 3
OWN_STEPS, SCALED_STEPS = 4, 10  # in the plan's own precision; the latter with a loss scale, which grows after 6 steps
LEAST = 3  # only an extent above this is made one less
AXES = ("dp_shard", "dp_replicate", "pp", "cp", "cp_ulysses", "tp")
Prove = Callable[[Any, Plan], Parity]


@dataclass(frozen=True)
class OddTask:
    """Callable that makes a task with an odd number of samples in each batch.

    task     the original, as `verify` got it
    grid     whether values of the third and later steps are rounded to multiples of 1/2
    extents  sizes: a dim of the batch, other than the first, that has one of these is made one shorter
    """

    task: Any
    grid: bool = True
    extents: frozenset[int] = frozenset()

    def __call__(self) -> Task:
        """Returns the changed task; one that does not make its own batches is returned unchanged."""
        task = resolve_task(self.task)
        return task if task.batch is None else task.with_(batch=_OddBatch(task.batch, self.grid, self.extents))


@dataclass(frozen=True)
class _OddBatch:
    batch: Callable[[int], Any]
    grid: bool
    extents: frozenset[int]

    def __call__(self, step: int) -> Any:
        batch = tree_map_only(torch.Tensor, partial(_less, extents=self.extents), self.batch(step))
        samples = samples_in(batch)
        batch = slice_samples(batch, 0, samples - 1) if samples % 2 == 0 and samples > 2 else batch
        return tree_map_only(torch.Tensor, _on_grid, batch) if self.grid and step >= STEPS - 1 else batch


def _less(tensor: torch.Tensor, extents: frozenset[int]) -> torch.Tensor:
    for dim in range(1, tensor.dim()):
        tensor = tensor.narrow(dim, 0, tensor.shape[dim] - (tensor.shape[dim] in extents))
    return tensor


def _extents(task: Any) -> frozenset[int]:
    """Returns the sizes of a batch's dims, except the first, that can be one less without one process failing."""
    resolved, precision, fine = resolve_task(task), Precision.of(Plan()), set[int]()
    # a task with a source, whose batches `OddTask` does not change
    if resolved.batch is None:
        return frozenset()
    leaves = [leaf for leaf in tree_leaves(resolved.batch(0)) if isinstance(leaf, torch.Tensor)]
    # small extents are rather channels than lengths
    for extent in sorted({n for leaf in leaves for n in leaf.shape[1:] if n > LEAST}):
        less = OddTask(task, False, frozenset({extent}))()
        assert less.batch is not None
        # a model that cannot be copied cannot be tried in one process, so its extents stay
        with suppress(Untried):
            if failure_alone(less, precision, less.batch(0)) is None:
                fine.add(extent)
    return frozenset(fine)


def _on_grid(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * 2).round() / 2 if tensor.is_floating_point() else tensor


def prove_thirds(parity: Parity, task: Any, plan: Plan, prove: Prove) -> None:
    """Adds to `parity` the proof of the plan with three ranks of an axis. `prove`: (task, plan) -> `Parity`.

    If a plan is refused, the next axis is tried; if values on the grid are not finite, the same plan without the grid.
    """
    extents = _extents(task)
    for third in _thirds(plan):
        for less, grid in dict.fromkeys([(extents, True), (extents, False), (frozenset(), True), (frozenset(), False)]):
            try:
                second = prove(OddTask(task, grid, less), third)
            except InputError:  # the task fails with so few samples, such extents or such values
                continue
            # another axis may be possible with three ranks
            if second.refused:
                continue
            # on the grid results may be infinite or NaN: then the plan is tried without it before it is blamed
            if not grid or second.parity or (not second.unproven and _finite(second)):
                parity.further.append(second)
                parity.notes.append(f"not met: {_not_met(third, grid, less)}")
                return
    parity.notes.append("not met: a third rank of any axis, since each such plan is refused")


def own_steps(plan: Plan) -> int:
    """Returns the number of steps of a proof in the plan's own precision: few, since one epsilon shows in each."""
    return SCALED_STEPS if plan.precision == "fp16" else OWN_STEPS


def add_precision(parity: Parity, own: Parity) -> None:
    """Adds to `parity` its proof in the plan's own precision, or only a note if that proof shows nothing.

    That is so if rounding explains its errors, since float64 has proven the same layout.
    """
    if own.equal and own.unproven:
        parity.notes.append(f"not met: errors of {own.precision} as small as rounding: {own.unproven[0]}")
    else:
        parity.further.append(own)


def _finite(parity: Parity) -> bool:
    """Whether the loss error is a finite number; with infinite or NaN values nothing can be compared."""
    return parity.loss_error is not None and math.isfinite(parity.loss_error)


def _thirds(plan: Plan) -> Iterator[Plan]:
    """Yields plans with 3 in the place of one 2, at last the plan itself."""
    changes: list[dict[str, Any]] = [{axis: 3} for axis in AXES if getattr(plan, axis) == 2]
    # a field's tiles: the first dim that has two
    if 2 in plan.domain:
        at = plan.domain.index(2)
        changes.append({"domain": (*plan.domain[:at], 3, *plan.domain[at + 1 :])})
    # experts are dealt over ranks of another axis, which has to grow with ep
    if plan.ep == 2:
        changes += [{axis: 3, "ep": 3} for axis in ("dp_shard", *plan.along) if getattr(plan, axis) == 2]
    # plans that no rule refuses; at the end the plan itself, which is known to be possible
    for change in changes:
        try:
            check(plan.with_(**change))
        except RefusedPlan:
            continue
        yield plan.with_(**change)
    yield plan


def _not_met(plan: Plan, grid: bool, extents: frozenset[int]) -> str:
    """Returns a phrase on what the second proof did not cover."""
    # only with a third rank do sums and messages pass through a rank in between
    twos = [
        axis for axis in (*AXES, "ep", "domain") if getattr(plan, axis) == 2 or (axis == "domain" and 2 in plan.domain)
    ]
    missing = [f"a third rank of {', '.join(twos)}"] if twos else []
    missing += [] if grid else ["ties and exact zeros"]
    missing += [] if extents else ["sequences or fields of other extents"]
    return "; ".join([*missing, f"a step after the third, other widths, more than {plan.world_size} ranks"])
