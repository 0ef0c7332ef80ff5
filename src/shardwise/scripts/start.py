"""Before a script is prepared: refuses what cannot be, sets the precision, and makes the engine over its model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from shardwise import device
from shardwise.comm import everybody, gather_json
from shardwise.engine.assemble import assemble
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan, check
from shardwise.mesh import Mesh
from shardwise.precision import met
from shardwise.python_seeds import python_restored
from shardwise.ranks import alike, here, join
from shardwise.ranks.launchers import own_device, perhaps_hosts
from shardwise.scripts.entries import Way
from shardwise.scripts.guard import refuse_hooks
from shardwise.scripts.joint_optimizer import members_of
from shardwise.scripts.spread import Named, total_of
from shardwise.task import Domain, Task

_ORDER = ": prepare(model, optimizer, loader, plan=...)"


def check_kinds(model: Any, optimizer: Any) -> None:
    """Raises `InputError` unless `model` is a module and `optimizer` an optimizer."""
    if not isinstance(model, nn.Module):
        raise InputError(f"prepare: the model is of type {type(model).__name__}, expected a torch.nn.Module{_ORDER}")
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"prepare: the optimizer is of type {type(optimizer).__name__}, expected a torch Optimizer, or a list of "
            f"those that train parts of the model{_ORDER}"
        )


def check_given(model: nn.Module, optimizer: Optimizer, plan: Plan, randomness: str, loss_scope: str) -> None:
    """Raises `InputError` or `RefusedPlan` if these arguments of `prepare` do not go together."""
    for one in members_of(optimizer):
        _refuse_wrapped(model, one)
    if randomness not in ("global", "fast"):
        raise InputError(f"prepare: randomness is 'global' or 'fast', got {randomness!r}")
    if loss_scope not in ("sample", "global", "model"):
        raise InputError(f"prepare: loss_scope is 'sample', 'global' or 'model', got {loss_scope!r}")
    if loss_scope != "sample" and plan.cut_positions > 1 and plan.data_ranks > 1:
        raise RefusedPlan(
            f'plan {plan}: loss_scope="{loss_scope}" in prepare beside cp, cp_ulysses or domain: outputs are gathered '
            "over samples or cut along positions, not both yet: leave dp_replicate and dp_shard at 1"
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
    if plan.gradients == "as_made":
        raise RefusedPlan(
            f"plan {plan}: gradients=as_made in prepare: a script reads or clips gradients between backward and "
            "optimizer.step(): describe the run as a Task and call shardwise.parallelize(task, plan).step(batch)"
        )
    # the rules of plans, after what a script alone cannot do, whose messages name the way out
    check(plan)
    refuse_hooks(model, plan)
    # only under axes whose cuts are followed operation by operation
    if waits_for_call(plan) and is_compiled(model):
        raise RefusedPlan(
            f"plan {plan}: the model is compiled, and what is cut is followed operation by operation: give prepare the "
            "model without torch.compile"
        )
    meta = [name for name, param in model.named_parameters() if param.device.type == "meta"]
    if meta:
        raise InputError(f"prepare: parameter '{meta[0]}' is on the meta device: give the model with its weights")


def _refuse_wrapped(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises `InputError` if another library or torch has spread the model already, or wrapped the optimizer."""
    for path, child in model.named_modules():
        kind, where = type(child).__name__, f"the model's '{path}'" if path else "the model"
        # of every base, so that a subclass of a wrapper is found, and by name, so that none is imported for it
        homes = [each.__module__ for each in type(child).__mro__]
        if any(home.startswith("torch.nn.parallel") for home in homes):
            raise InputError(
                f"prepare: {where} is wrapped in {kind}, which deals batches or sums gradients over ranks by itself: "
                f"leave {kind} out and give prepare the module in it (.module), which the plan then spreads"
            )
        # FSDP2 and tensor parallelism of torch change parameters, and not the class
        sharded = any(isinstance(param, DTensor) for param in child._parameters.values())
        if sharded or any(home.startswith("torch.distributed.fsdp") for home in homes):
            raise InputError(
                f"prepare: {where} ({kind}) is sharded already, by FSDP, fully_shard or DTensor, so its parameters are "
                "pieces: leave that out and give prepare the whole model; plan dp_shard=N,zero=3 does the same"
            )
    # by what it holds, whatever its class: the outer one's step would go past the pieces that ranks hold
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise InputError(
                f"prepare: the optimizer is {type(optimizer).__name__} around {type(value).__name__}: give prepare the "
                f"inner one (optimizer.{name}), and call what the outer one does (SAM) in prepared.whole(grads=True)"
            )


def join_ranks(plan: Plan) -> None:
    """Joins the ranks that a launcher started; `InputError` if their number is not the plan's."""
    # a script may have set up its process group itself
    if not dist.is_initialized() and here() is not None:
        join()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1 and plan.world_size > 1:
        raise InputError(
            f"plan {plan} needs {plan.world_size} ranks, but this script was started as one process: start it with "
            f"shardwise run --nproc {plan.world_size} (or torchrun, srun, mpirun); on several hosts, "
            "`shardwise launch` writes the lines"
        )
    if world > 1 and plan.world_size == 1:
        raise InputError(
            f"prepare was given no plan for the {world} ranks that run: say what they share, such as "
            f'plan="dp_replicate={world}" (samples) or plan="dp_shard={world},zero=3" (weights too)'
        )
    # without a launcher's variables the process group was the script's own doing, and its size is what counts
    place = here()
    if place is not None and world != plan.world_size:
        raise InputError(
            f"plan {plan} needs {plan.world_size} ranks, but {place.named} started {world}: start as many, or change "
            f"the plan's degrees{perhaps_hosts(place, plan.world_size)}"
        )
    # shardwise's own launcher starts all ranks from one place; under others versions or plans may differ by host
    if place is not None and place.launcher != "shardwise":
        facts = alike.facts_here({"plan": str(plan)})
        alike.check_alike(gather_json(facts, everybody(), own_device("cpu")))


ON_THE_HOST = (
    "the model lies on the CPU and is trained there, though this machine has an accelerator: move it there before "
    "prepare, and its batches in the loop"
)


def device_of(model: nn.Module, asked: str | torch.device | None) -> torch.device:
    """Returns this rank's device: as asked; else the CPU for a model that lies there, else the rank's accelerator."""
    kinds = {param.device.type for param in model.parameters()}
    return own_device("cpu" if asked is None and kinds == {"cpu"} else asked)


def waits_for_call(plan: Plan) -> bool:
    """Whether the plan's cuts are derived from the model's first call in training (tp, ep, cut positions)."""
    return plan.tp > 1 or plan.ep > 1 or plan.cut_positions > 1


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a module in it, went through torch.compile."""
    return any(
        hasattr(child, "_orig_mod") or not isinstance(child._compiled_call_impl, Way | None)
        for child in model.modules()
    )


def with_dtype(plan: Plan, model: nn.Module) -> Plan:
    """Returns the plan with the model's own precision if it names none; `RefusedPlan` for mixed dtypes, float16."""
    numbers = (param.dtype for param in model.parameters() if param.is_floating_point() or param.is_complex())
    # complex weights are held as pairs of real ones
    dtypes = {dtype.to_real() for dtype in numbers}
    if len(dtypes) > 1:
        raise RefusedPlan(
            f"prepare: the model's parameters are of {len(dtypes)} dtypes ({', '.join(sorted(map(str, dtypes)))}), and "
            "buckets and shards have one: convert the model (model.float()), and give the precision in the plan"
        )
    own = {torch.float64: "fp64", torch.bfloat16: "bf16-full"}.get(next(iter(dtypes), torch.float32))
    # half weights would also be the masters of the updates, which precision=fp16 keeps in float32
    if torch.float16 in dtypes:
        raise RefusedPlan("prepare: the model is in float16: give it in float32 and precision=fp16 in the plan")
    return plan.with_(precision=own) if own and plan.precision == "fp32" else plan


@contextmanager
def generators_kept() -> Iterator[None]:
    """Context after which torch's, Python's and NumPy's generators stand as before it."""
    with device.generators_kept(), python_restored():
        yield


def make_engine(
    model: nn.Module, plan: Plan, mesh: Mesh, branches: Any, seed: int, spatial: Domain | None,
    call: tuple[tuple, dict] | None, samples: int | None,
) -> Engine:  # fmt: skip
    """Returns the engine over a module that exists already, through a task whose constructor returns that module.

    call     (args, kwargs) of the model, on the CPU and the same on every rank, if cuts are derived from them; else
             None
    samples  that these hold, None if unknown
    The task's loss and optimizer are stand-ins, which the script's own replace.
    """
    positional = len(call[0]) if call is not None else 0
    named = Named(model).of(*call) if call is not None else None
    if named is not None and samples is None:
        samples = next((len(one) for one in tree_flatten(named)[0] if isinstance(one, torch.Tensor) and one.dim()), 0)
    task = Task(
        model=lambda: model,
        loss=lambda output, batch: (total_of(output), 1),
        inputs=lambda named: Named.back(named, positional),
        batch=lambda step: named,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),  # replaced by the script's own
        spatial=spatial,
        branches=branches,
        name="script",
    )
    return Engine(assemble(met(task, plan) or task, plan, mesh, seed, named, samples))
