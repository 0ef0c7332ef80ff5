"""`parallelize` and its `Engine`. An option: step/state, config/schema, training/rank_parts, proof/settings.

The order in which a plan is applied stands in `assemble` and `recipe`, what a step does in `step/train_step`.
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
    """Spread a task over the ranks of the running process group, as the plan says. Collective.

    seed          initial weights and masks; they depend on it alone, not on the plan
    randomness    "global": random numbers equal to one process's, followed where a look at a few samples finds some;
                  "fast": torch's generators, distinct by data rank
    clip_norm     largest global norm of the gradient
    schedule      optimizer step (from 0) -> factor on each group's learning rate
    on_nonfinite  a non-finite loss or gradient raises `RunError`, or skips the update and counts it
    device        of this rank; None: the accelerator of its local rank, else the CPU
    check_loss    look at a few samples before the first step

    Raises `InputError` for a wrong task or world size, `RefusedPlan` for what would not equal one process.
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
    lie_on_host(plan, device)  # raises where that gains nothing, before anything is built
    mesh = build_mesh(plan, device)
    return on_mesh(
        task, plan, mesh, seed=seed, randomness=randomness, clip_norm=clip_norm, schedule=schedule,
        on_nonfinite=on_nonfinite, check_loss=check_loss,
    )  # fmt: skip


def _takes_groups(task: Task, plan: Plan, error: Exception) -> bool:
    """Whether a look failed on a few samples for want of more: one process runs on whole micro-batches alone.

    Every rank asks itself alike. Not of pipeline stages, of which one may fail where others do not.
    """
    if plan.pp > 1 or task.batch is None or f"on {SAMPLES} samples" not in str(error):
        return False
    batch = task.batch(0)
    return runs_on_more(task, Precision.of(plan), a_few(batch), first_micro_batch(batch, plan, plan.data_ranks))


def _looked(
    make: Callable[..., RankState], task: Task, tasks: list[Task], plan: Plan, mesh: Mesh, *, masks: bool
) -> tuple[RankState, Findings] | None:
    """Returns the rank's state and what the look found; None where it is to be made again, otherwise than now.

    tasks  has the one that is made last; another is added where operations must meet in one dtype
    Either change is made once, and only where torch refused: a module that runs as it is stays as it is.
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
    """Returns an engine on a mesh, by the parameters of `parallelize`, and raises as it does. Collective.

    The second engine on a mesh, of the same task under the same plan in another precision, takes what was tried for
    the first: cuts, stages, positions, the optimizer's nature. In float32, in which tasks are written, it takes the
    findings of the look too; in 16 bits a task may fail where it did not.
    """
    tasks = [task]  # and the one in which operations meet in one dtype, once that is needed

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
    # A reentrant checkpoint brings a gradient in parts: else a reduction would start with the first of them.
    if findings.reentrant:
        state.technique.expect_pieces()
    # After the look, in which each run has samples of its own.
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
    """One rank's share of a training run. Made by `parallelize`.

    state   everything that a step reads and changes, for whoever needs more than what stands here
    """

    def __init__(self, state: RankState):
        self.state = state
        self._begun = False  # a step was taken

    def step(self, batch: Any) -> StepResult:
        """Take one optimizer step on a GLOBAL batch (a pytree), or on this rank's parts of one (`list[Share]`).

        Collective. Raises `InputError` where, in the first step, ranks are given other global batches, and as
        `train_step` does.
        """
        # what follows looks at the first step alone
        if self._begun:
            return steps.train_step(self.state, steps.dealt(self.state, batch))
        parts = steps.dealt(self.state, batch)
        # a global batch must be alike on all ranks; parts (`list[Share]`) are a rank's own
        if parts is not batch:
            positions = self.state.forward.positions
            # where ranks may read tiles, those that share samples have others of one field
            alike = self.mesh.data if positions is not None and positions.shapes else self.mesh.world
            refuse_unlike(batch, alike, self.device)
        result, self._begun = steps.train_step(self.state, parts), True
        self.notices.extend(not_trained(self.module, (self.task.loss,)))
        return result

    def evaluate(self, batches: Iterable[Any]) -> tuple[float, float]:
        """Returns (sum, weight) of the loss over batches (global, or `list[Share]` each), in eval mode. Collective.

        Extra terms of the loss are left out.
        """
        with evaluation_weights(self.state):
            return steps.evaluate(self.state, (steps.dealt(self.state, batch) for batch in batches))

    def predict(self, batches: Iterable[Any], select: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        """Yields the model's output for each batch, in eval mode and sample order: on rank 0's CPU, elsewhere None.

        batches  global pytrees, or `list[Share]`; as many on every rank
        select   the output -> the tensors that are wanted, samples first; runs before anything is sent

        Collective: every rank goes through the whole iterator. Raises `InputError` for what is not made of samples.
        """
        outputs = predict(self.state, (steps.dealt(self.state, batch) for batch in batches), select)
        return during(evaluation_weights(self.state), outputs) if has_mode(self.state.optimizer) else outputs

    def metrics(self) -> dict[str, float]:
        """Returns {metric: value} of `Task.metrics` over all samples of the last step, or of `evaluate`. Collective."""
        return steps.collect_metrics(self.state)

    # --- whole tensors

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, whole tensor) of every parameter, its master where it has one, then frozen ones. Collective."""
        return whole.full_parameters(self.state)

    def full_parameter(self, name: str) -> torch.Tensor:
        """Returns one whole parameter, its master where it has one. Collective; not under a pipeline."""
        return whole.full_parameter(self.state, name)

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields (name, gradient of the whole parameter, None where unused) of the step just done. Collective.

        It is what the optimizer saw: of all ranks' samples, divided by the global weight, clipped.
        """
        return whole.full_gradients(self.state)

    def full_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of every buffer, as the stage has it that uses it. Collective under a pipeline."""
        return whole.full_buffers(self.state)

    def full_optimizer_state(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yields (name, whole state) of every trained parameter, {} where there is none. Collective.

        Tensors may be the optimizer's own: copy what is to outlive the next step.
        """
        return full_optimizer_state(self.state)

    def used_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, whole tensor) of this rank's stages' parameters, as modules compute with them. Collective.

        Beside `full_parameters`, which tells the masters: under zero=1 and 2 and in mixed precision they are others.
        """
        return whole.used_parameters(self.state)

    def used_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of each buffer that this rank's stages use, as they have it."""
        return whole.used_buffers(self.state)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns whole parameters and persistent buffers on the CPU, under the module's own names. Collective."""
        return weights_out.state_dict(self.state)

    def save_weights(self, path: str | Path) -> None:
        """Write whole weights and buffers as one safetensors file, by rank 0, or `RunError` everywhere. Collective."""
        weights_out.save_weights(self.state, path)

    # --- looking on

    def memory(self) -> dict[str, int | None]:
        """Returns bytes that this rank holds, by "parameters" (with masters), "gradients", "optimizer" and others.

        "peak" is the device's most so far; None where it does not count them.
        """
        return weights_out.memory(self.state)

    @contextmanager
    def observe(self) -> Iterator[Ledger]:
        """Context: yields a ledger of every collective issued inside, by tag, op and mesh axis."""
        ledger = Ledger()
        with Observer(ledger, self.mesh.group_axes):
            yield ledger

    def around(self, part: Part, make: MakeContext) -> AbstractContextManager[None]:
        """Context: `make()` is entered around each such part of a step ("micro_batch", "reduce", "update")."""
        return self.state.hooks.around(part, make)

    def close(self) -> None:
        """Wait for all ranks and end the plan's process groups; the world's stays with whoever made it.

        The engine has taken its last step then.
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
        """Returns the model as this rank has it; with shares of its weights where the plan cuts them."""
        return self.state.module

    @property
    def technique(self) -> DataParallel:
        """Returns the data-parallel technique (replicas, flat shards, FSDP2) that owns the weights' storage."""
        return self.state.technique

    @property
    def optimizer(self) -> Optimizer:
        """Returns the optimizer over this rank's pieces."""
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
        """Returns the number, from 0, of the part of each micro-batch that this rank takes."""
        return self.state.data_rank

    @property
    def data_ranks(self) -> int:
        """Returns how many parts each micro-batch is dealt into."""
        return self.state.data_ranks
