"""`verify --thorough`: a second proof with a third of what the first has two of.

    ranks    an axis of 2 has 3, the first of `AXES` with which the plan is possible
    steps    3
    samples  an odd number in a batch, so that ranks and micro-batches have unlike shares
    extents  of sequences and fields one less, odd for even and even for odd: those that one process runs on so
    values   in the third step on a grid of halves: ties, and exact zeros

What goes wrong only where a sum passes a third rank, in the third step, or in a share of another size, shows here.

What this does not do: more than one axis of 3 at a time; other widths of the model; dtypes of messages, which the
first proof and the one in the plan's own precision look at.
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
OWN_STEPS, SCALED_STEPS = 4, 10  # in the plan's own precision; a loss scale grows after some more
LEAST = 3  # of an extent that is made one less
AXES = ("dp_shard", "dp_replicate", "pp", "cp", "cp_ulysses", "tp")
Prove = Callable[[Any, Plan], Parity]


@dataclass(frozen=True)
class OddTask:
    """Makes a task with an odd number of samples in each batch, and values on a grid from the third step on.

    extents  sizes: a dim of the batch that has one of these, and counts no samples, is made one shorter
    """

    task: Any
    grid: bool = True
    extents: frozenset[int] = frozenset()

    def __call__(self) -> Task:
        """Returns the odd task."""
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
    """Returns the sizes of a batch's dims behind the first that can be one less without one process failing."""
    resolved, precision, fine = resolve_task(task), Precision.of(Plan()), set[int]()
    # the extents of what a source reads are its own: `OddTask` changes batches alone
    if resolved.batch is None:
        return frozenset()
    leaves = [leaf for leaf in tree_leaves(resolved.batch(0)) if isinstance(leaf, torch.Tensor)]
    # small extents are kinds (channels of a picture), not lengths
    for extent in sorted({n for leaf in leaves for n in leaf.shape[1:] if n > LEAST}):
        less = OddTask(task, False, frozenset({extent}))()
        assert less.batch is not None
        # a model that cannot be copied cannot be tried alone: its extents stay
        with suppress(Untried):
            if failure_alone(less, precision, less.batch(0)) is None:
                fine.add(extent)
    return frozenset(fine)


def _on_grid(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * 2).round() / 2 if tensor.is_floating_point() else tensor


def prove_thirds(parity: Parity, task: Any, plan: Plan, prove: Prove) -> None:
    """Add to `parity` the proof of a plan with three ranks of an axis; `prove` proves a task under a plan.

    A plan that is refused gives way to the next, one whose values are not finite on a grid to those off it.
    """
    extents = _extents(task)
    for third in _thirds(plan):
        for less, grid in dict.fromkeys([(extents, True), (extents, False), (frozenset(), True), (frozenset(), False)]):
            try:
                second = prove(OddTask(task, grid, less), third)
            except InputError:  # so few samples, such extents or values are not for this task
                continue
            # another axis may be possible with three ranks
            if second.refused:
                continue
            # on a grid sums may be infinite or undefined: then the same without it, before the plan is found at fault
            if not grid or second.parity or (not second.unproven and _finite(second)):
                parity.further.append(second)
                parity.notes.append(f"not met: {_not_met(third, grid, less)}")
                return
    parity.notes.append("not met: a third rank of any axis, since each such plan is refused")


def own_steps(plan: Plan) -> int:
    """Returns how many steps a proof in the plan's own precision takes: few, since one epsilon shows in each."""
    return SCALED_STEPS if plan.precision == "fp16" else OWN_STEPS


def add_precision(parity: Parity, own: Parity) -> None:
    """Add to `parity` its proof in the plan's own precision; where that one tells nothing, a note.

    What one epsilon explains was proven in float64, and leaves no doubt about the plan.
    """
    if own.equal and own.unproven:
        parity.notes.append(f"not met: errors of {own.precision} as small as rounding: {own.unproven[0]}")
    else:
        parity.further.append(own)


def _finite(parity: Parity) -> bool:
    """Returns whether every error is a number: beside values that are not, nothing can be compared."""
    return parity.loss_error is not None and math.isfinite(parity.loss_error)


def _thirds(plan: Plan) -> Iterator[Plan]:
    """Yields plans with 3 in the place of one 2, and at last the plan itself."""
    changes: list[dict[str, Any]] = [{axis: 3} for axis in AXES if getattr(plan, axis) == 2]
    # a field's tiles: the first dim that has two
    if 2 in plan.domain:
        at = plan.domain.index(2)
        changes.append({"domain": (*plan.domain[:at], 3, *plan.domain[at + 1 :])})
    # experts are dealt over ranks of another axis, which has to grow with ep
    if plan.ep == 2:
        changes += [{axis: 3, "ep": 3} for axis in ("dp_shard", *plan.along) if getattr(plan, axis) == 2]
    # the first plan that the rules let through is enough; the plan itself, at the end, always does
    for change in changes:
        try:
            check(plan.with_(**change))
        except RefusedPlan:
            continue
        yield plan.with_(**change)
    yield plan


def _not_met(plan: Plan, grid: bool, extents: frozenset[int]) -> str:
    """Returns what the second proof did not meet, in words."""
    # an axis of two has never had a third rank, at which sums and messages pass through somebody else
    twos = [
        axis for axis in (*AXES, "ep", "domain") if getattr(plan, axis) == 2 or (axis == "domain" and 2 in plan.domain)
    ]
    missing = [f"a third rank of {', '.join(twos)}"] if twos else []
    missing += [] if grid else ["ties and exact zeros"]
    missing += [] if extents else ["sequences or fields of other extents"]
    return "; ".join([*missing, f"a step after the third, other widths, more than {plan.world_size} ranks"])
