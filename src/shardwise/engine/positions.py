"""Sequence parallelism in the recipe: which dims of a batch are positions, found by trying, on every rank alike.

A size that dims of the batch share is that of the positions if the module runs on half of it, and if a rehearsal of
forward and backward on shares of it, without values and without sending, comes to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

import shardwise.parallel.domain  # noqa: F401 - what functions do along cut dims
from shardwise.comm import Ledger
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.layout import Plan
from shardwise.mesh import Mesh
from shardwise.parallel.expert.apply import Stack, on_own_rows
from shardwise.parallel.sequence import Positions, candidates, shortened
from shardwise.parallel.tensor import Derived, Stage, TensorParallel
from shardwise.part.crossing import Along, cuts_of
from shardwise.precision import Precision
from shardwise.step.batching import samples_in
from shardwise.step.forward import run_alone
from shardwise.task import Task
from shardwise.trace.deferred import Built
from shardwise.trace.fake import unlogged


def find_positions(
    task: Task, mesh: Mesh, precision: Precision, built: Built, batch: Any, tensor: TensorParallel | None,
    row_wise: Sequence[Stack] = (),
) -> Positions:  # fmt: skip
    """The positions of the task's batches, cut over the mesh's inner axes.

    batch     a few samples, the same on every rank
    row_wise  modules of experts that are given a rank's own rows
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
        results: dict[tuple[str, int], tuple[Along, ...]] = {}
        errors = (
            _rehearse(task, plan, precision, built, batch, positions, derived, last, results, row_wise)
            for last in (False, True)
        )
        error = next((error for error in errors if error is not None), None)
        if error is None:
            return replace(positions, results=results)
        stopped.append(f"dims of {size} cannot be cut: {error}")
    raise RefusedPlan(
        f"{axes}: no dim of the batch can be cut as a sequence: "
        + ("; ".join(stopped) if stopped else "no tensor has a dim behind the samples")
    )


def _rehearse(
    task: Task, plan: Plan, precision: Precision, built: Built, batch: Any, positions: Positions, derived: Derived,
    last: bool, results: dict[tuple[str, int], tuple[Along, ...]], row_wise: Sequence[Stack],
) -> RefusedPlan | None:  # fmt: skip
    """What stops a forward and backward of the first (or last) rank of the axes, without sending: alike on all ranks.

    Shares may be uneven and what is cut off one end of a sequence is cut off one rank's share, so both ends are tried.
    """
    axes = tuple(replace(a, index=a.size - 1 if last else 0, rehearsal=Ledger()) for a in positions.axes)
    alone = run_alone(task, precision, replace(positions, axes=axes))

    def run(module: nn.Module, batch: Any) -> Any:
        with _noting(module, results), on_own_rows(module, row_wise):
            return alone(module, batch)

    ledger = derived.ledger
    try:
        return Stage(built, batch, run, precision.held).rehearse(derived, plan.tp, plan.sp, axes)
    except RefusedPlan as refused:
        return refused
    finally:
        derived.ledger = ledger


@contextmanager
def _noting(module: nn.Module, results: dict[tuple[str, int], tuple[Along, ...]]) -> Iterator[None]:
    """Notes how the results of submodules' calls are cut."""
    counts: dict[int, int] = {}
    handles = []

    def enter(child: nn.Module, args: tuple, path: str) -> None:
        counts[id(child)] = counts.get(id(child), -1) + 1

    def leave(child: nn.Module, args: tuple, output: Any, path: str) -> None:
        leaves = tree_flatten(output)[0]
        along = tuple(
            tuple((name, dim) for name, dim, _ in cuts_of(leaf)) if isinstance(leaf, torch.Tensor) else ()
            for leaf in leaves
        )
        if any(along):
            results[path, counts[id(child)]] = along

    seen = {id(module)}
    for path, child in module.named_modules():
        if id(child) not in seen:
            seen.add(id(child))
            handles.append(child.register_forward_pre_hook(partial(enter, path=path)))
            handles.append(child.register_forward_hook(partial(leave, path=path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
