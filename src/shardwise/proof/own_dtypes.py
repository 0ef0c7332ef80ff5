"""Dtypes of one step of a task in the plan's own precision, on a rank and in one process; `dtypes` compares them.

`verify TASK` proves values in float64, in which every dtype is the same. So the ranks run one step more in the plan's
own precision, with the decisions made for the float64 engine, and one process runs a micro-batch. Only the dtypes of
what is sent, summed, kept and returned are compared.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils._pytree import tree_map_only

from shardwise.engine.engine import on_mesh
from shardwise.layout import Plan
from shardwise.mesh import Mesh
from shardwise.proof.dtypes import SeenDtypes, named, of_states, returned, said, watched
from shardwise.proof.literal import bounds, count_of, optimizer_of, samples_of
from shardwise.proof.oracle import needs_closure, plain_module
from shardwise.proof.own_precision import loss_in
from shardwise.proof.settings import Settings, global_batch
from shardwise.random import BatchDims, GlobalRandom, Samples
from shardwise.task import Task


def rank_dtypes(task: Task, plan: Plan, settings: Settings, mesh: Mesh) -> SeenDtypes:
    """Returns the dtypes of this rank's first step under the plan, on the mesh of the float64 engine. Collective."""
    engine = on_mesh(task, plan, replace(mesh, plan=plan), seed=settings.seed, randomness="global",
                     clip_norm=settings.clip_norm)  # fmt: skip
    with watched(engine) as seen:
        engine.step(global_batch(task, settings, 0))
    return seen


def single_dtypes(task: Task, plan: Plan, settings: Settings) -> SeenDtypes:
    """Returns the dtypes of one process: of modules in one micro-batch, and of the optimizer's state after a step."""
    compute, master, _ = said(plan)
    module = plain_module(task, replace(settings, dtype=torch.promote_types(master, torch.float32)))
    params = [param for param in module.parameters() if param.requires_grad]
    masters = [torch.nn.Parameter(_in(param.detach(), master)) for param in params]
    for param in module.parameters():
        # as a rank has it: the forward on weights in the compute dtype, the optimizer on masters of their own
        param.data = _in(param.data, compute)
    batch, device = global_batch(task, settings, 0), torch.device(settings.device)
    first, last = bounds(count_of(batch), settings.accumulate)[0]
    part = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), samples_of(batch, first, last))
    # random masks as in one process, for all samples of the part
    random, seen = GlobalRandom(BatchDims()), SeenDtypes()
    random.begin(settings.seed, 0, 0, Samples(0, last - first, last - first))
    with random.watching(module), returned(module, seen.given) as seen.returned:
        _, objective = loss_in(task, module, part, compute, settings, 0, seen.read)
        objective.backward()
    seen.returned = dict(seen.returned)
    for param, own in zip(params, masters, strict=True):
        own.grad = None if param.grad is None else _in(param.grad, master)
    optimizer = optimizer_of(task.optimizer, masters)
    # LBFGS and its kind call a closure for the loss; a constant is enough for the dtypes of their state
    optimizer.step(*[lambda: objective.detach()] if needs_closure(optimizer) else [])
    seen.states = of_states(optimizer)
    seen.held = {name: named(buffer) for name, buffer in module.named_buffers()}
    return seen


def _in(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy in a dtype (a complex tensor's parts have it); integers keep theirs."""
    of = dtype.to_complex() if tensor.is_complex() else dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(of, copy=True)
