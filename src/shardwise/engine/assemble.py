"""Build a `RankState` from a task, a plan and a seed. Afterwards look/task_look runs it on a few samples.

build       the module without weights                                                        recipe.py
blocks      wrap each block for recompute, then compile it
shard       replicas, flat pieces (ZeRO-1, 2) or FSDP2 units (ZeRO-3); weights put in place
optimizer   over whole parameters or pieces, as a trial of it allows                           optimizer.py
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from shardwise.engine.optimizer import make_optimizer, try_out
from shardwise.engine.recipe import Applied, apply_plan, trainable
from shardwise.layout import Plan
from shardwise.layout.grid import placement
from shardwise.layout.offload import placements
from shardwise.mesh import Mesh
from shardwise.part.pairs import pairs_in
from shardwise.precision import Precision
from shardwise.ranks import local_size
from shardwise.ranks.allocation import give_back_at_once
from shardwise.step.forward import Forward
from shardwise.step.scaler import LossScale
from shardwise.step.state import RankState
from shardwise.task import Task

if TYPE_CHECKING:
    from shardwise.step.staged import StagedForward


def assemble(
    task: Task, plan: Plan, mesh: Mesh, seed: int, few: Any = None, samples: int | None = None,
    enclosed: Collection[str] = (),
) -> RankState:  # fmt: skip
    """Returns one rank of the plan with weights and optimizer in place, before any look at samples. Collective.

    seed      of the initial weights and the masks
    few       batch of a few samples from which cuts are derived, the same on every rank; None: read from the task
    samples   number of samples in `few`, if not all of its tensors have a batch dim; None: taken from its tensors
    enclosed  paths of blocks that zero=3 does not make FSDP2 units, and of parameters that it does not shard

    Raises as `apply_plan` does, and `RefusedPlan` for an optimizer that cannot update shards as the plan needs.
    """
    if any(part.tier == "disk" for part in placements(plan.offload)):
        # before weights are made, since malloc would keep freed blocks between them for itself
        give_back_at_once()
    precision = Precision.of(plan)
    applied = apply_plan(task, plan, mesh, precision, seed, few, samples, enclosed)
    named, pairs = trainable(applied.module), pairs_in(applied.module)
    names = [name for name, _ in named]
    forward, staged = _forward(task, mesh, precision, applied)
    shapes, numbers = _full_shapes(applied, pairs), [param.is_complex() or name in pairs for name, param in named]
    nature = mesh.once("nature of the optimizer", lambda: try_out(task.optimizer, shapes, numbers))
    optimizer, owners = make_optimizer(
        task.optimizer, nature, applied.technique, names, shapes, mesh.shard, plan=plan, tensor=applied.tensor,
        marks=applied.marks,
    )  # fmt: skip
    notices = applied.notices  # the same list: compiled blocks add to it in the first step
    notices += _leaves_node(plan)
    if nature.narrow is not None:
        notices.append(f"the optimizer's own arithmetic runs in {nature.narrow}")
    absent = applied.cut.absent if applied.cut is not None else set()
    return RankState(
        task=task, plan=plan, mesh=mesh, seed=seed, precision=precision,
        module=applied.module, technique=applied.technique, tensor=applied.tensor, experts=applied.experts,
        forward=forward, staged=staged,
        names=names, all_names=applied.trained, held_frozen=set(applied.frozen) - absent, frozen_names=applied.frozen,
        optimizer=optimizer, owners=owners, needs_closure=nature.needs_closure,
        base_lrs=[group.get("lr") for group in optimizer.param_groups],
        scale=LossScale() if precision.scaled else None,
        notices=notices, order=applied.order, chunks=applied.chunks, pairs=pairs, read=applied.read,
        activations=applied.activations, shards=applied.shards,
    )  # fmt: skip


def _forward(task: Task, mesh: Mesh, precision: Precision, applied: Applied) -> tuple[Forward, StagedForward | None]:
    """Returns (what a step calls for the loss, the same object under a pipeline or None without one)."""
    forward = Forward(task, applied.module, precision, mesh.device, mesh.data, applied.positions)
    if applied.cut is None or applied.staged is None:
        return forward, None
    from shardwise.step.staged import StagedForward

    staged = StagedForward(forward, applied.staged, applied.cut, mesh.pp)
    return staged, staged


def _full_shapes(applied: Applied, pairs: Collection[str]) -> list[torch.Size]:
    """Returns the unsharded shape of each trainable parameter of this rank, in order."""
    shapes = []
    for name, param in trainable(applied.module):
        # the last dim of pairs is (real, imaginary)
        shape = param.shape[:-1] if name in pairs else param.shape
        for spread in (applied.tensor, applied.experts):
            shape = shape if spread is None else spread.full_shape(name, shape)
        shapes.append(shape)
    return shapes


def _leaves_node(plan: Plan) -> list[str]:
    """Returns [a warning] if ranks of one tp group lie on several hosts of the launcher, else []."""
    local = local_size(os.environ) if plan.tp > 1 else None
    if not local or "tp" not in placement(plan, local)[1]:
        return []
    return [
        f"tp={plan.tp} leaves its node of {local} ranks: every layer waits for the link between nodes; let "
        "tp divide the ranks of a node, and give the rest to dp_shard or pp"
    ]
