"""`parallelize` and its `Engine`. A new option: step/state, config/schema, training/rank_parts, proof/settings too.

`assemble` and `recipe` have the order in which a plan is applied, `step/train_step` what a step does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.comm import Ledger, Observer, barrier
from shardwise.engine import weights_out, whole
from shardwise.engine.assemble import assemble
from shardwise.engine.experts import refuse_draws
from shardwise.engine.moved_parameters import lie_on_host
from shardwise.engine.optimizer_state import full_optimizer_state
from shardwise.engine.predict import predict
from shardwise.engine.tiers import make_tier
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan, check
from shardwise.look.deterministic import fix_threads, refuse_shared
from shardwise.look.first_samples import Findings
from shardwise.look.one_process import runs_on_more
from shardwise.look.samples import IN_WHOLE, SAMPLES, a_few, first_micro_batch, refuse_unlike
from shardwise.look.task_look import LOOK, as_looked, follow_draws, make_and_look
from shardwise.look.unowned import not_trained
from shardwise.mesh import Mesh, build_mesh
from shardwise.parallel.batchnorm import batch_norm_modules, joins_batch_norms, sync_module
from shardwise.parallel.slots import DataParallel
from shardwise.precision import Precision, met_at, told_met
from shardwise.random import BatchDims, Randomness
from shardwise.ranks import here, join
from shardwise.ranks.launchers import own_device
from shardwise.step import joined_buffers
from shardwise.step import train_step as steps
from shardwise.step.as_made import AsMade
from shardwise.step.hooks import MakeContext, Part
from shardwise.step.optimizer_modes import during, evaluation_weights, has_mode
from shardwise.step.result import StepResult
from shardwise.step.state import RankState
from shardwise.task import Task


def parallelize(
    task: Task,
    plan: Plan | str = "single",
    *,
    seed: int = 0,
    randomness: Randomness = "global",
    clip_norm: float | None = None,
    schedule: Callable[[int], float] | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    device: str | torch.device | None = None,
    check_loss: bool = True,
) -> Engine:
    """Returns this rank's `Engine` for a task under a plan, over the ranks of the process group. Collective.

    task          model, data, loss and optimizer
    plan          degrees of the axes, such as "dp_shard=4,tp=2", or "single"
    seed          initial weights and masks; they depend on it alone, not on the plan
    randomness    "global": random numbers equal to one process's, with a cost only if the model is seen to use some;
                  "fast": torch's generators, seeded differently on each data rank
    clip_norm     largest global norm of the gradient
    schedule      optimizer step (from 0) -> factor on each group's learning rate
    on_nonfinite  if loss or gradients are not finite: "raise" `RunError`, or "skip" the update and count it
    device        of this rank; None: the accelerator of its local rank, else the CPU
    check_loss    whether to check on a few samples, before the first step, that the loss adds up over samples

    Raises `InputError` for a wrong task or world size, `RefusedPlan` if the result would differ from one process's.
    """
    if not isinstance(task, Task):
        raise InputError(
            f"parallelize takes a shardwise.Task, got {type(task).__name__}: give Task(model=..., loss=..., data=...); "
            "a script that has a model, an optimizer and a loader of its own gives them to shardwise.prepare"
        )
    plan = Plan.parse(plan)
    check(plan)
    if on_nonfinite not in ("raise", "skip"):
        raise InputError(f"on_nonfinite is 'raise' or 'skip', got {on_nonfinite!r}")
    if randomness not in ("global", "fast"):
        raise InputError(f"randomness is 'global' or 'fast', got {randomness!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm must be positive, got {clip_norm}")
    if not dist.is_initialized() and here() is not None:
        join()  # a launcher started this process
    device = own_device(device)
    lie_on_host(plan, device)  # raises, before anything is built, if weights on the host would save no memory
    mesh = build_mesh(plan, device)
    return on_mesh(
        task, plan, mesh, seed=seed, randomness=randomness, clip_norm=clip_norm, schedule=schedule,
        on_nonfinite=on_nonfinite, check_loss=check_loss,
    )  # fmt: skip


def _takes_groups(task: Task, plan: Plan, error: Exception) -> bool:
    """Whether the check failed because one process, too, runs on a whole micro-batch but not on a few samples.

    error  what the check raised
    All ranks get the same answer. False under a pipeline, since one stage may fail where others do not.
    """
    if plan.pp > 1 or task.batch is None or f"on {SAMPLES} samples" not in str(error):
        return False
    batch = task.batch(0)
    return runs_on_more(task, Precision.of(plan), a_few(batch), first_micro_batch(batch, plan, plan.data_ranks))


def _looked(
    make: Callable[..., RankState], task: Task, tasks: list[Task], plan: Plan, mesh: Mesh, *, masks: bool
) -> tuple[RankState, Findings] | None:
    """Returns (the rank's state, findings of the look at a few samples); None if the caller must try once more.

    make   builds the state from `tasks[-1]`
    tasks  `task`, and from a retry on its variant that casts operands to one dtype, which is appended here
    masks  whether random numbers will be dealt by global index, so that the look tries that too
    Before it returns None it either appends that variant, if torch refused mixed dtypes, or notes in `mesh.found` that
    whole micro-batches are needed. Each is done once at most; any other error is raised.
    """
    try:
        return make_and_look(make, masks=masks)
    except (InputError, RefusedPlan) as error:
        if len(tasks) == 1 and (met := met_at(task, plan, error)) is not None:
            tasks.append(met)
        elif IN_WHOLE not in mesh.found and _takes_groups(tasks[-1], plan, error):
            mesh.found[IN_WHOLE] = True
        else:
            raise
    return None


def on_mesh(
    task: Task, plan: Plan, mesh: Mesh, *, seed: int, randomness: Randomness, clip_norm: float | None,
    schedule: Callable[[int], float] | None = None, on_nonfinite: str = "raise", check_loss: bool = True,
) -> Engine:  # fmt: skip
    """Returns an engine on an existing mesh, with the parameters and errors of `parallelize`. Collective.

    A second engine on the mesh, of the same task and plan in another precision, reuses the results of the first one's
    trials (`mesh.found`): cuts, stages, positions, the optimizer's nature. In float32 it reuses the findings of the
    look at a few samples too; in 16 bits it looks again, since the task may fail there.
    """
    tasks = [task]  # `_looked` may append a variant whose operands are cast to one dtype

    def make(enclosed: Collection[str] = ()) -> RankState:
        state = assemble(tasks[-1], plan, mesh, seed, enclosed=enclosed)
        if randomness == "global":
            refuse_draws(state.experts)
        if plan.deterministic:
            fix_threads(state)
        state.clip_norm, state.schedule, state.on_nonfinite = clip_norm, schedule, on_nonfinite
        return state

    if LOOK in mesh.found and Precision.of(plan).compute == torch.float32:
        state = make(mesh.found[LOOK].enclosed)
        findings = as_looked(state, mesh.found[LOOK])
    elif check_loss:
        while (looked := _looked(make, task, tasks, plan, mesh, masks=randomness == "global")) is None:
            pass
        state, findings = looked
        state.notices += [told_met(plan)] if len(tasks) > 1 else []
    else:
        state = make()
        findings = Findings(batch_norm_modules(state.module), BatchDims(), draws=None)
    if plan.deterministic:
        refuse_shared(findings)
    # A reentrant checkpoint adds to a gradient several times; a reduction must not start after the first.
    if findings.reentrant:
        state.technique.expect_pieces()
    # Only after the look, whose runs are on different samples on each rank and must not be joined.
    for module in findings.batch_norms if joins_batch_norms(state.data_ranks, plan) else ():
        sync_module(module, state.mesh.data, state.phase)
    if state.data_ranks > 1:
        joined_buffers.install(state.module, findings.joined, state.mesh.data, state.phase)
    if randomness == "global":
        follow_draws(state, findings)
    elif state.staged is not None and state.staged.cut.shared_draws:
        raise RefusedPlan(
            "random numbers that are drawn in the outermost forward are used by several pipeline stages, which would "
            "each draw their own: use randomness='global', where masks depend on their place alone"
        )
    state.tier = make_tier(state, [state.task.optimizer])
    if plan.gradients == "as_made":
        state.as_made = AsMade(state)
    return Engine(state)


class Engine:
    """One rank of a training run, made by `parallelize`.

    state   the `RankState` that a step reads and changes, with more than the methods here give
    """

    def __init__(self, state: RankState):
        self.state = state
        self._begun = False  # a step was taken

    def step(self, batch: Any) -> StepResult:
        """Takes one optimizer step and returns its `StepResult`. Collective.

        batch  the GLOBAL batch (a pytree, the same on every rank), or this rank's parts of one (`list[Share]`)

        Raises `InputError` if ranks are given different global batches in the first step, and as `train_step` does.
        """
        # the checks below are done in the first step only
        if self._begun:
            return steps.train_step(self.state, steps.dealt(self.state, batch))
        parts = steps.dealt(self.state, batch)
        # a global batch must be alike on all ranks; parts (`list[Share]`) are a rank's own
        if parts is not batch:
            positions = self.state.forward.positions
            # if each rank may read its own tile of a field, only ranks of one tile can be compared
            alike = self.mesh.data if positions is not None and positions.shapes else self.mesh.world
            refuse_unlike(batch, alike, self.device)
        result, self._begun = steps.train_step(self.state, parts), True
        self.notices.extend(not_trained(self.module, (self.task.loss,)))
        return result

    def evaluate(self, batches: Iterable[Any]) -> tuple[float, float]:
        """Returns (sum, weight) of the loss over all samples of `batches`, in eval mode. Collective.

        batches  global pytrees, or `list[Share]`; as many on every rank
        The mean loss is sum / weight. Extra terms of the loss are left out.
        """
        with evaluation_weights(self.state):
            return steps.evaluate(self.state, (steps.dealt(self.state, batch) for batch in batches))

    def predict(self, batches: Iterable[Any], select: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        """Yields the model's output for each batch, in eval mode and sample order: on rank 0's CPU, elsewhere None.

        batches  global pytrees, or `list[Share]`; as many on every rank
        select   function of the model's output that picks the tensors to return, whose first dim is samples; None: all

        Collective: every rank must exhaust the iterator. Raises `InputError` for an output without a dim of samples.
        """
        outputs = predict(self.state, (steps.dealt(self.state, batch) for batch in batches), select)
        return during(evaluation_weights(self.state), outputs) if has_mode(self.state.optimizer) else outputs

    def metrics(self) -> dict[str, float]:
        """Returns {metric: value} of `Task.metrics` over all samples of the last step, or of `evaluate`. Collective."""
        return steps.collect_metrics(self.state)

    # --- whole tensors

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, unsharded master weight) of trained parameters, then frozen weights alike. Collective."""
        return whole.full_parameters(self.state)

    def full_parameter(self, name: str) -> torch.Tensor:
        """Returns one parameter unsharded, a trained one as its master weight. Collective; not under a pipeline."""
        return whole.full_parameter(self.state, name)

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields (name, unsharded gradient, or None if unused) of each trained parameter in the last step. Collective.

        It is the gradient that the optimizer saw: summed over all samples, divided by the global weight, clipped.
        """
        return whole.full_gradients(self.state)

    def full_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of every buffer, from the pipeline stage that uses it. Collective under a pipeline."""
        return whole.full_buffers(self.state)

    def full_optimizer_state(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yields (name, unsharded optimizer state or {}) of every trained parameter. Collective.

        Tensors may be the optimizer's own, so copy those that must outlive the next step.
        """
        return full_optimizer_state(self.state)

    def used_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, unsharded weight) of the parameters of this rank's stages. Collective.

        These are the weights that modules compute with; `full_parameters` gives the masters, which are other tensors
        under zero=1 and 2 and in mixed precision.
        """
        return whole.used_parameters(self.state)

    def used_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of each buffer of which this rank has one process's values; nothing is sent."""
        return whole.used_buffers(self.state)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns whole parameters and persistent buffers on the CPU, under the module's own names. Collective."""
        return weights_out.state_dict(self.state)

    def save_weights(self, path: str | Path) -> None:
        """Writes whole weights and buffers as one safetensors file, by rank 0. Collective.

        Raises `RunError` on every rank if rank 0 cannot write it.
        """
        weights_out.save_weights(self.state, path)

    # --- bytes, collectives, time

    def memory(self) -> dict[str, int | None]:
        """Returns {kind of memory: bytes that this rank holds}.

        Kinds are "parameters" (with masters), "gradients", "optimizer", "peak" (the most on the device so far; None if
        the device does not count), and under an offload "host" and "disk".
        """
        return weights_out.memory(self.state)

    @contextmanager
    def observe(self) -> Iterator[Ledger]:
        """Context: yields a `Ledger` of every collective issued inside, by tag, op and mesh axis."""
        ledger = Ledger()
        with Observer(ledger, self.mesh.group_axes):
            yield ledger

    def around(self, part: Part, make: MakeContext) -> AbstractContextManager[None]:
        """Context in which each `part` of a step ("micro_batch", "reduce" or "update") runs inside `make()`."""
        return self.state.hooks.around(part, make)

    def close(self) -> None:
        """Waits for all ranks, then destroys the plan's process groups, but not the default one. Collective.

        No step can follow.
        """
        if dist.is_initialized():
            barrier(self.mesh.world)
            self.mesh.close()
        for tier in (self.state.tier, self.state.activations, self.state.shards):
            if tier is not None:
                tier.close()

    # --- what it is

    @property
    def task(self) -> Task:
        """Returns the task that is trained."""
        return self.state.task

    @property
    def plan(self) -> Plan:
        """Returns the plan that this engine runs."""
        return self.state.plan

    @property
    def mesh(self) -> Mesh:
        """Returns the `Mesh`: this rank's place on each axis, and its process groups."""
        return self.state.mesh

    @property
    def module(self) -> nn.Module:
        """Returns this rank's module, whose parameters are its shards where the plan shards weights."""
        return self.state.module

    @property
    def technique(self) -> DataParallel:
        """Returns the data-parallel technique (replicas, flat shards, FSDP2) that owns the weights' storage."""
        return self.state.technique

    @property
    def optimizer(self) -> Optimizer:
        """Returns the optimizer, whose parameters are this rank's pieces of the masters."""
        return self.state.optimizer

    @property
    def notices(self) -> list[str]:
        """Returns sentences for the user about this run, so far."""
        return self.state.notices

    @property
    def steps_done(self) -> int:
        """Returns the number of optimizer steps so far, skipped ones included."""
        return self.state.steps_done

    @property
    def device(self) -> torch.device:
        """Returns this rank's device."""
        return self.mesh.device

    @property
    def rank(self) -> int:
        """Returns this process's rank in the run."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Returns how many ranks the run has."""
        return self.plan.world_size

    @property
    def data_rank(self) -> int:
        """Returns the index, from 0, of the part of each micro-batch that this rank computes."""
        return self.state.data_rank

    @property
    def data_ranks(self) -> int:
        """Returns the number of parts into which each micro-batch is split over ranks."""
        return self.state.data_ranks
