"""Before a script is prepared: what cannot be is refused, and the engine is made over the model that exists."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import device
from shardwise.engine.assemble import assemble
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan, check
from shardwise.mesh import Mesh
from shardwise.scripts.spread import total_of
from shardwise.task import Task


def check_given(model: Any, optimizer: Any, plan: Plan, randomness: str) -> None:
    """Raise `InputError` or `RefusedPlan` for what cannot be prepared."""
    if not isinstance(model, nn.Module):
        raise InputError(f"prepare: the model is of type {type(model).__name__}, expected a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"prepare: the optimizer is of type {type(optimizer).__name__}, expected a torch Optimizer")
    _refuse_wrapped(model, optimizer)
    if randomness not in ("global", "fast"):
        raise InputError(f"prepare: randomness is 'global' or 'fast', got {randomness!r}")
    if plan.cut_positions > 1:
        raise RefusedPlan(
            f"plan {plan}: cp, cp_ulysses and domain in prepare: a script's batches and losses are not cut along a "
            "sequence or space yet; write the loop with shardwise.parallelize, or use shardwise train"
        )
    if plan.pp > 1:
        raise RefusedPlan(
            f"plan {plan}: pp > 1 in prepare: a pipeline calls parts of the model forward and backward in an order of "
            "its own, which a script's loop cannot follow: describe the run as a Task and call "
            "shardwise.parallelize(task, plan).step(batch)"
        )
    if plan.deterministic:
        raise RefusedPlan(
            f"plan {plan}: deterministic in prepare: a script's loop calls the model on all of a rank's samples, not "
            "piece by piece: describe the run as a Task and call shardwise.parallelize(task, plan).step(batch)"
        )
    check(plan)
    if (plan.tp > 1 or plan.ep > 1) and is_compiled(model):
        raise RefusedPlan(
            f"plan {plan}: the model is compiled, and weights that are cut are followed operation by operation: give "
            "prepare the model without torch.compile"
        )
    meta = [name for name, param in model.named_parameters() if param.device.type == "meta"]
    if meta:
        raise InputError(f"prepare: parameter '{meta[0]}' is on the meta device: give the model with its weights")


def _refuse_wrapped(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `InputError` for what another library, or another part of torch, has spread already."""
    for path, child in model.named_modules():
        kind, where = type(child).__name__, f"the model's '{path}'" if path else "the model"
        homes = [each.__module__ for each in type(child).__mro__]
        if any(home.startswith("torch.nn.parallel") for home in homes):
            raise InputError(
                f"prepare: {where} is wrapped in {kind}, which deals batches or sums gradients over ranks by itself: "
                f"leave {kind} out and give prepare the module in it (.module), which the plan then spreads"
            )
        sharded = any(isinstance(param, DTensor) for param in child.parameters(recurse=False))
        if sharded or any(home.startswith("torch.distributed.fsdp") for home in homes):
            raise InputError(
                f"prepare: {where} ({kind}) is sharded already, by FSDP, fully_shard or DTensor, so its parameters are "
                "pieces: leave that out and give prepare the whole model; plan dp_shard=N,zero=3 does the same"
            )
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise InputError(
                f"prepare: the optimizer is {type(optimizer).__name__} around {type(value).__name__} (its '{name}') "
                "and steps when a library of its own says so: leave the wrapper out and give prepare the inner one"
            )


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a module in it, went through torch.compile."""
    return any(hasattr(child, "_orig_mod") or child._compiled_call_impl is not None for child in model.modules())


def with_dtype(plan: Plan, model: nn.Module) -> Plan:
    """The plan at the model's own precision, where it does not ask for one."""
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    if len(dtypes) > 1:
        raise RefusedPlan(
            f"prepare: the model's parameters are of {len(dtypes)} dtypes ({', '.join(sorted(map(str, dtypes)))}), and "
            "buckets and shards have one: convert the model (model.float()), and give the precision in the plan"
        )
    own = {torch.float64: "fp64", torch.bfloat16: "bf16-full"}.get(next(iter(dtypes), torch.float32))
    if torch.float16 in dtypes:
        raise RefusedPlan("prepare: the model is in float16: give it in float32 and precision=fp16 in the plan")
    return plan.with_(precision=own) if own and plan.precision == "fp32" else plan


@contextmanager
def generators_kept() -> Iterator[None]:
    """What is drawn inside does not move the script's generators."""
    state, plain = random.getstate(), np.random.get_state()
    with device.generators_kept():
        yield
    random.setstate(state)
    np.random.set_state(plain)


def make_engine(
    model: nn.Module, plan: Plan, mesh: Mesh, branches: Any, seed: int, call: tuple[tuple, dict] | None
) -> Engine:  # fmt: skip
    """The engine over a module that exists: its weights are constants of its construction.

    call    (args, kwargs) of the model, on the CPU and the same on every rank, where cuts are derived from them
    """
    task = Task(
        model=lambda: model,
        loss=lambda output, batch: (total_of(output), 1),
        inputs=lambda call: call,
        batch=lambda step: call,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),  # replaced by the script's own
        branches=branches,
        name="script",
    )
    return Engine(assemble(task, plan, mesh, seed, call))
