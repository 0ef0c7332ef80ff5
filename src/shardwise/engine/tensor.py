"""Tensor parallelism in the recipe: derive the cuts from one forward on tensors without values, on every rank alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.comm import Axis
from shardwise.engine.batching import samples_in, slice_samples
from shardwise.engine.forward import Forward
from shardwise.engine.samples import SAMPLES, few_samples
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.mesh import Mesh
from shardwise.parallel.tensor import TensorParallel, find_cuts
from shardwise.precision import Precision
from shardwise.task import Task
from shardwise.trace.deferred import Built


def cut_tensors(task: Task, plan: Plan, mesh: Mesh, precision: Precision, built: Built) -> TensorParallel:
    """The cuts of the plan's tp axis. Collective (a few samples are read).

    Raises `RefusedPlan` where nothing can be cut, with the reasons.
    """
    sample = few_samples(task, plan, mesh.data, mesh.device)
    batch = slice_samples(sample, 0, min(samples_in(sample), SAMPLES))
    alone = Axis.alone("data")

    def run(module: nn.Module, inputs: Any) -> Any:
        return Forward(task, module, precision, torch.device("cpu"), alone).local(inputs)

    def dtype_of(tensor: torch.Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return precision.compute if isinstance(tensor, nn.Parameter) else precision.buffers

    derived = find_cuts(built, batch, run, plan.tp, plan.tp_whole, sequence=plan.sp, dtype_of=dtype_of)
    tensor = TensorParallel(derived, replace(mesh.tp, sequence=plan.sp))
    if not tensor.cuts:
        reasons = sorted({reason for reason in derived.whole.values() if reason})
        raise RefusedPlan(
            f"tp={plan.tp}: no weight of the module can be cut: " + "; ".join(reasons[:3] or ["it has no products"])
        )
    return tensor
