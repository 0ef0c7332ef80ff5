"""Sequence parallelism in the recipe: which dims of a batch are positions, found by trying, on every rank alike.

A size that dims of the batch share is that of the positions if the module runs on half of it, and if a rehearsal of
forward and backward on shares of it, without values and without sending, comes to its end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

import shardwise.parallel.domain  # noqa: F401 - what functions do along cut dims
from shardwise.comm import Ledger
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.layout import Plan
from shardwise.mesh import Mesh
from shardwise.parallel.sequence import Positions, candidates, shortened
from shardwise.parallel.tensor import Derived, Stage, TensorParallel
from shardwise.precision import Precision
from shardwise.step.batching import samples_in
from shardwise.step.forward import run_alone
from shardwise.task import Task
from shardwise.trace.deferred import Built
from shardwise.trace.fake import unlogged


def find_positions(
    task: Task, mesh: Mesh, precision: Precision, built: Built, batch: Any, tensor: TensorParallel | None
) -> Positions:  # fmt: skip
    """The positions of the task's batches, cut over the mesh's inner axes.

    batch  a few samples, the same on every rank
    Raises `RefusedPlan` where no dim can be cut, with what stopped each.
    """
    names = tuple(keystr(path).strip("[]'") or "the batch" for path, _ in tree_flatten_with_path(batch)[0])
    plan = mesh.plan
    axes = ",".join(f"{axis.name}={axis.size}" for axis in mesh.inner)
    stopped: list[str] = []
    for dims in candidates(batch, samples_in(batch)):
        positions = Positions(dims, mesh.inner, names, least=plan.tp if plan.sp else 1)
        size = _size(batch, dims)
        if not _runs(Stage(built, shortened(batch, dims), run_alone(task, precision), precision.held)):
            stopped.append(f"of dims of {size}, the module does not run on half")
            continue
        derived = tensor.derived if tensor is not None else Derived()
        errors = (_rehearse(task, plan, precision, built, batch, positions, derived, last) for last in (False, True))
        error = next((error for error in errors if error is not None), None)
        if error is None:
            return positions
        stopped.append(f"dims of {size} cannot be cut: {error}")
    raise RefusedPlan(
        f"{axes}: no dim of the batch can be cut as a sequence: "
        + ("; ".join(stopped) if stopped else "no tensor has a dim behind the samples")
    )


def _rehearse(
    task: Task, plan: Plan, precision: Precision, built: Built, batch: Any, positions: Positions, derived: Derived,
    last: bool,
) -> RefusedPlan | None:  # fmt: skip
    """What stops a forward and backward of the first (or last) rank of the axes, without sending: alike on all ranks.

    Shares may be uneven and what is cut off one end of a sequence is cut off one rank's share, so both ends are tried.
    """
    axes = tuple(replace(a, index=a.size - 1 if last else 0, rehearsal=Ledger()) for a in positions.axes)
    run = run_alone(task, precision, replace(positions, axes=axes))
    ledger = derived.ledger
    try:
        return Stage(built, batch, run, precision.held).rehearse(derived, plan.tp, plan.sp, axes)
    except RefusedPlan as refused:
        return refused
    finally:
        derived.ledger = ledger


def _size(batch: Any, dims: tuple[tuple[int, ...], ...]) -> int:
    leaves = [leaf for _, leaf in tree_flatten_with_path(batch)[0]]
    return next(leaf.shape[along[0]] for leaf, along in zip(leaves, dims, strict=True) if along)


def _runs(stage: Stage) -> bool:
    """Whether the module runs on a batch at all."""
    try:
        with unlogged(), torch.no_grad(), stage.playing(stage.make) as (_, batch):
            stage.run(stage.built.module, batch)
    except ShardwiseError:
        raise
    except Exception:  # whatever the module says to a batch of half the size
        if stage.fake is None:
            return False
        stage.fake = None  # it may be tensors without values that it cannot use
        return _runs(stage)
    return True
