"""Expert parallelism in the recipe: which modules hold experts, found from one forward, on every rank alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.comm import Axis
from shardwise.engine.forward import Forward
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.mesh import Mesh
from shardwise.parallel.expert import ExpertParallel, find_experts
from shardwise.parallel.tensor import TensorParallel
from shardwise.precision import Precision
from shardwise.task import Task
from shardwise.trace.deferred import Built


def spread_experts(
    task: Task, plan: Plan, mesh: Mesh, precision: Precision, built: Built, tensor: TensorParallel | None, batch: Any
) -> ExpertParallel:
    """The experts over the plan's ep axis. `batch`: a few samples, the same on every rank.

    Raises `RefusedPlan` where there are none, or where they cannot be spread, with the reason.
    """
    alone = Axis.alone("data")

    def run(module: nn.Module, inputs: Any) -> Any:
        return Forward(task, module, precision, torch.device("cpu"), alone).local(inputs)

    def dtype_of(value: torch.Tensor) -> torch.dtype:
        if not value.is_floating_point():
            return value.dtype
        return precision.compute if isinstance(value, nn.Parameter) else precision.buffers

    experts = ExpertParallel(find_experts(built, batch, run, plan.ep, dtype_of), mesh.ep)
    for name in experts.experts if tensor is not None else ():
        cut = tensor.cuts.get(name) if tensor is not None else None
        if cut is not None and cut.dim == 0:
            raise RefusedPlan(
                f"tp={plan.tp} cuts '{name}' by experts, and so does ep={plan.ep}: keep it whole under tp "
                f"(tp_whole={name}), or use one of the two"
            )
    return experts
