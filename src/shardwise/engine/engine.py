"""`parallelize(task, plan)`: the order of application, and the step.

    build       the module without weights                                                        recipe.py
    blocks      recompute, then compile, each block
    shard       replicas, flat pieces (ZeRO-1, 2) or FSDP2 units (ZeRO-3); weights put in place
    optimizer   over whole parameters or pieces, as a trial of it allows                           optimizer.py
    look        a few samples: the loss must add up; batch norms are found and joined over ranks   check.py

A step: each micro-batch's sum is differentiated as it is; ranks' gradients are summed; one control row from each
rank tells the global weight, and gradients are divided by it once, together with clipping.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointError

from shardwise.comm import Ledger, Observer, barrier, gather_json
from shardwise.device import math_attention_only, pick_device, seed_generators
from shardwise.engine import export
from shardwise.engine.batching import parts_of, samples_in, slice_samples
from shardwise.engine.check import Findings, look, wrong_model
from shardwise.engine.control import Agreement, Asked, Tally, agree, gather_reached
from shardwise.engine.forward import Forward
from shardwise.engine.normalise import normalise, square_norm
from shardwise.engine.objective import objective_of
from shardwise.engine.optimizer import make_optimizer, shares_of
from shardwise.engine.optimizer import refuse as refuse_optimizer
from shardwise.engine.pipelined import Pipeline, StagedForward
from shardwise.engine.predict import predict
from shardwise.engine.recipe import apply_plan, trainable
from shardwise.engine.result import StepResult
from shardwise.engine.samples import SAMPLES, costly, few_samples
from shardwise.engine.scaler import LossScale
from shardwise.engine.whole import Whole
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.layout import Plan, check
from shardwise.layout.dealing import Share
from shardwise.layout.grid import placement
from shardwise.mesh import Mesh, build_mesh
from shardwise.parallel.batchnorm import batch_norm_modules, joins_batch_norms, sync_module
from shardwise.parallel.slots import Phase
from shardwise.part import forget
from shardwise.precision import Precision
from shardwise.random import BatchDims, GlobalRandom, Samples, seed_python
from shardwise.ranks import here, join, local_size
from shardwise.task import Task
from shardwise.trace.deferred import seed_of


def parallelize(
    task: Task,
    plan: Plan | str = "single",
    *,
    seed: int = 0,
    randomness: Literal["fast", "global"] = "fast",
    clip_norm: float | None = None,
    schedule: Callable[[int], float] | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    device: str | torch.device | None = None,
    check_loss: bool = True,
) -> Engine:
    """Spread a task over the ranks of the running process group, as the plan says. Collective.

    seed          initial weights and masks; they depend on it alone, not on the plan
    randomness    "fast": torch's generators, distinct by data rank; "global": masks equal to one process's
    clip_norm     largest global norm of the gradient
    schedule      optimizer step (from 0) -> factor on each group's learning rate
    on_nonfinite  a non-finite loss or gradient raises, or skips the update and counts it
    check_loss    look at a few samples before the first step

    Raises `InputError` for a wrong task or world size, `RefusedPlan` for what would not equal one process.
    """
    plan = Plan.parse(plan)
    check(plan)
    if on_nonfinite not in ("raise", "skip"):
        raise InputError(f"on_nonfinite is 'raise' or 'skip', got {on_nonfinite!r}")
    if randomness not in ("fast", "global"):
        raise InputError(f"randomness is 'fast' or 'global', got {randomness!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm must be positive, got {clip_norm}")
    if not dist.is_initialized() and here() is not None:
        join()  # a launcher started this process
    engine = Engine(task, plan, build_mesh(plan, pick_device(device)), seed)
    engine.clip_norm, engine.schedule, engine.on_nonfinite = clip_norm, schedule, on_nonfinite
    if check_loss:
        findings = engine.look(masks=randomness == "global")
    else:
        findings = Findings(batch_norm_modules(engine.module), BatchDims())
    for module in findings.batch_norms if joins_batch_norms(engine.data_ranks, plan) else ():
        sync_module(module, engine.mesh.data, engine.phase)
    if randomness == "global":
        engine.global_random = GlobalRandom(findings.dims)
    elif engine.pipeline is not None and engine.pipeline.cut.shared_draws:
        raise RefusedPlan(
            "random numbers that are drawn in the outermost forward are used by several pipeline stages, which would "
            "each draw their own: use randomness='global', where masks depend on their place alone"
        )
    return engine


def _leaves_node(plan: Plan) -> list[str]:
    """A warning where a group of tp lies on several hosts, as the launcher tells."""
    local = local_size(os.environ) if plan.tp > 1 else None
    if not local or "tp" not in placement(plan, local)[1]:
        return []
    return [
        f"tp={plan.tp} leaves its node of {local} ranks: every layer waits for the link between nodes; let "
        "tp divide the ranks of a node, and give the rest to dp_shard or pp"
    ]


class Engine(Whole):
    """One rank's share of a training run. Made by `parallelize`."""

    def __init__(self, task: Task, plan: Plan, mesh: Mesh, seed: int, few: Any = None):
        self.task, self.plan, self.mesh, self.seed = task, plan, mesh, seed
        self.precision = Precision.of(plan)
        self.phase = Phase()
        self.notices: list[str] = []
        self.clip_norm: float | None = None
        self.schedule: Callable[[int], float] | None = None
        self.on_nonfinite = "raise"
        self.global_random: GlobalRandom | None = None
        self.steps_done = 0
        self.skipped_steps = 0
        self._used: set[int] = set()  # parameters that any rank reached in the last step
        applied = apply_plan(task, plan, mesh, self.precision, seed, few)
        self.module, self.technique, self.tensor = applied.module, applied.technique, applied.tensor
        self.experts = applied.experts
        self.notices += applied.notices + _leaves_node(plan)
        self.names = [name for name, _ in trainable(self.module)]
        self.all_names, self.frozen_names = applied.trained, applied.frozen
        absent = applied.cut.absent if applied.cut is not None else set()
        self.held_frozen = set(self.frozen_names) - absent
        self.forward = Forward(task, self.module, self.precision, mesh.device, mesh.data)
        self.pipeline: Pipeline | None = None
        if applied.cut is not None and applied.staged is not None:
            self.forward = staged = StagedForward(self.forward, applied.staged, applied.cut, mesh.pp)
            self.pipeline = Pipeline(self, applied.cut, staged)
        shapes = [param.shape for _, param in trainable(self.module)]
        if self.tensor is not None:
            shapes = [self.tensor.full_shape(name, shape) for name, shape in zip(self.names, shapes, strict=True)]
        if self.experts is not None:
            shapes = [self.experts.full_shape(name, shape) for name, shape in zip(self.names, shapes, strict=True)]
        zero = plan.zero if plan.dp_shard > 1 else 0
        self.optimizer, self.optimizer_nature, self.owners = make_optimizer(
            task.optimizer,
            self.technique,
            self.names,
            shapes,
            mesh.shard,
            zero=zero,
            shares=shares_of(plan.tp, plan.ep),
        )
        refuse_optimizer(self.optimizer_nature, 0, stages=plan.pp)
        if self.optimizer_nature.narrow is not None:
            self.notices.append(f"the optimizer's own arithmetic runs in {self.optimizer_nature.narrow}")
        self.base_lrs = [group.get("lr") for group in self.optimizer.param_groups]
        self.scale = LossScale() if self.precision.scaled else None

    def look(self, *, masks: bool) -> Findings:
        """Run a few samples before the first step. Collective. Raises what would not equal one process."""
        sample = few_samples(self.task, self.plan, self.mesh.data, self.device)
        self.notices += [] if self.task.batch is None else costly(sample)
        n = min(samples_in(sample), SAMPLES)
        whole = slice_samples(sample, 0, n)
        parts = (slice_samples(sample, 0, 1), slice_samples(sample, 1, n)) if n > 1 else None
        joined = None if self.task.loss_scope == "sample" else self.forward.joined
        try:
            findings = look(
                self.module, self.forward.local, whole, parts, (n, 1, n - 1), joined=joined,
                dtype=self.precision.compute, strict=self.data_ranks > 1, masks=masks, share=self._share,
            )  # fmt: skip
        except ShardwiseError:
            raise
        except Exception as error:
            raise wrong_model(error, n) from error
        self.notices += findings.notices
        self._refuse_writes(findings)
        return findings

    def _refuse_writes(self, findings: Findings) -> None:
        """A forward that writes into parameters is followed where the module's weights are the masters themselves."""
        if findings.written and self.precision.mixed:
            raise RefusedPlan(
                f"the forward writes into parameter '{findings.written[0]}', and precision={self.plan.precision} keeps "
                "its master beside it, so that the next update would undo the write: make it a buffer, or use fp32"
            )
        if findings.assigned and self.technique.in_pieces:
            raise RefusedPlan(
                f"the forward replaces the values of parameter '{findings.assigned[0]}' by assigning to .data, and "
                f"zero={self.plan.zero} holds it as part of a larger buffer: write in place under torch.no_grad() "
                "(copy_), or use zero=0"
            )

    def _share(self, mine: list[str]) -> list[str]:
        """What any stage of the pipeline found, on every stage."""
        if self.pipeline is None:
            return mine
        found = gather_json(mine, self.mesh.pp, self.device)
        return list(dict.fromkeys(one for stage in found for one in stage))

    # --- the step ---

    def step(self, batch: Any) -> StepResult:
        """One optimizer step on a GLOBAL batch (a pytree), or on this rank's parts of one (`list[Share]`)."""
        parts = self._parts(batch)
        self._set_learning_rate()
        if self.optimizer_nature.needs_closure:
            return self._step_with_closure(parts)
        result, gradients_ok = self._gradients(parts)
        if gradients_ok:
            self._update()
        return self._done(result, gradients_ok)

    def _update(self) -> None:
        if self.owners is not None:
            self.owners.collect_gradients(self._used)
        self.optimizer.step()
        if self.owners is not None:
            self.owners.hand_out(self._used)
        self.technique.publish()

    def _step_with_closure(self, parts: list[Share]) -> StepResult:
        results: list[StepResult] = []

        def closure() -> float:
            self.technique.publish()
            result, _ = self._gradients(parts)
            results.append(result)
            return result.loss

        self.optimizer.step(closure)
        self.technique.publish()
        return self._done(results[0], True)

    def _done(self, result: StepResult, updated: bool) -> StepResult:
        if self.steps_done == 0 and self.forward.gathered_bytes:
            received_mb = self.forward.gathered_bytes / 1e6
            self.notices.append(
                f'loss_scope="global": in each step this rank receives {received_mb:.3g} MB of other ranks\' outputs '
                "and batches for the loss"
            )
        if self.tensor is not None:
            forget()
        self.steps_done += 1
        self.skipped_steps += not updated
        return replace(result, metrics=self.metrics()) if self.forward.metrics is not None else result

    def _parts(self, batch: Any) -> list[Share]:
        if isinstance(batch, list) and batch and all(isinstance(part, Share) for part in batch):
            return batch
        pieces = self.plan.step_microbatches
        return parts_of(batch, accumulate=pieces, data_rank=self.data_rank, data_ranks=self.data_ranks)

    def _set_learning_rate(self) -> None:
        if self.schedule is None:
            return
        factor = self.schedule(self.steps_done)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            if base is not None:
                group["lr"] = base * factor

    def _gradients(self, parts: list[Share]) -> tuple[StepResult, bool]:
        """Forward and backward over the micro-batches; gradients end up summed, divided and clipped."""
        self.technique.start_step()
        tally = Tally(self.device)
        if self.pipeline is not None:
            self.pipeline.run(parts, tally)
        for index, part in enumerate(parts if self.pipeline is None else ()):
            self._micro_batch(index, part, tally, last=index == len(parts) - 1)
        agreed = self._finish(tally, tally.reached)
        if not agreed.same_branches and self.data_ranks > 1:
            refuse = self.task.branches == "same"
            used = gather_reached(tally, self.names, self.mesh.data, self.device, refuse=refuse)
            agreed = self._finish(tally, used)
        return normalise(self, agreed)

    def _finish(self, tally: Tally, used: set[int]) -> Agreement:
        """Complete the gradients and exchange control rows.

        Replicas hold the same sums, bit by bit, and so the same norm: their row need not wait for it, and travels
        beside the gradients.
        """
        self._used = used
        if self.pipeline is not None:
            return self.pipeline.finish(tally, used)
        if self.technique.in_pieces:
            self.technique.finish_step(used)
            return agree(tally, square_norm(self), self.mesh.data)
        asked = Asked(tally, 0.0, self.mesh.data)
        self.technique.finish_step(used)
        return replace(asked.answer(), square_norms=[square_norm(self)])

    def _micro_batch(self, index: int, part: Share, tally: Tally, *, last: bool) -> None:
        self.phase.stand_in = part.count == 0
        tally.stood_in |= part.count == 0
        self.seed_masks(index, part)
        self.technique.start_micro_batch(last=last)
        with self.random_context():
            loss = self.forward(part)
            objective, extras = objective_of(self, loss)
            if not objective.requires_grad:
                raise InputError("Task.loss returned a sum that does not depend on any trainable parameter")
            try:
                objective.backward()
            except CheckpointError as error:
                raise RefusedPlan(
                    "a block run again in backward did something else than in forward: a block that changes what it "
                    "is given (a key-value cache: use_cache=False) or keeps state outside the module cannot be "
                    f"recomputed; use remat=none ({str(error).splitlines()[0]})"
                ) from error
        tally.used.append(self.technique.finish_micro_batch())
        tally.add(loss, part.count, extras)

    # --- randomness ---

    def seed_masks(self, micro_batch: int, part: Share, *, alone: bool = True) -> None:
        """Seed the masks of a micro-batch; `alone`: no other one waits for its backward."""
        if self.global_random is not None:
            samples = Samples(part.start, part.count, part.total)
            self.global_random.begin(self.seed, self.steps_done, micro_batch, samples, alone=alone)
            return
        seed = seed_of("fast", self.seed, self.steps_done, micro_batch, self.data_rank)
        seed_generators(seed)
        if self.plan.tp * self.plan.pp > 1:  # ranks that share a sample must take the same ways through the module
            seed_python(seed)

    @contextmanager
    def random_context(self) -> Iterator[None]:
        """Around forwards and backwards: masks by global index, where they were asked for."""
        if self.global_random is None:
            yield
            return
        attention = math_attention_only() if self.device.type != "cpu" else nullcontext()
        with attention, self.global_random.watching(self.module):
            yield

    # --- beside the step ---

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> tuple[float, float]:
        """(sum, weight) of the loss over batches (global pytrees or `list[Share]`), in eval mode. Collective."""
        self.module.eval()
        tally = Tally(self.device)
        try:
            for batch in batches:
                for part in self._parts(batch):
                    tally.add(self.forward(part), part.count, {})
        finally:
            self.module.train()
        agreed = agree(tally, 0.0, self.mesh.data) if self.pipeline is None else self.pipeline.agree(tally, 0.0)
        return agreed.total, agreed.weight

    def predict(self, batches: Iterable[Any], select: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        """The model's output for each batch, in eval mode and sample order: on rank 0's CPU, None on other ranks.

        batches  global pytrees, or `list[Share]`; as many on every rank
        select   the output -> the tensors that are wanted, samples first; runs before anything is sent

        Collective: every rank goes through the whole iterator. Raises `InputError` for what is not made of samples.
        """
        return predict(self, map(self._parts, batches), select)

    def metrics(self) -> dict[str, float]:
        """Task.metrics over all samples since the last step (after `evaluate`: its own). Collective."""
        if self.forward.metrics is None:
            return {}
        found = self.forward.metrics.collect(self.mesh.data)
        if isinstance(self.forward, StagedForward):  # the last stage has them
            found = gather_json(found, self.mesh.pp, self.device)[self.forward.last_owner]
        return found

    def memory(self) -> dict[str, int | None]:
        """Bytes held by this rank now: parameters (masters too), gradients, optimizer state; peak on a GPU."""
        return export.memory(self)

    @contextmanager
    def observe(self) -> Iterator[Ledger]:
        """A ledger of every collective issued inside, by tag, op and mesh axis."""
        ledger = Ledger()
        with Observer(ledger, self.mesh.group_axes):
            yield ledger

    def close(self) -> None:
        """Wait for all ranks and end the plan's process groups; the world's stays with whoever made it.

        The engine has taken its last step then.
        """
        if dist.is_initialized():
            barrier(self.mesh.world)
            self.mesh.close()

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.mesh.device

    @property
    def rank(self) -> int:
        """This rank."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Ranks in the run."""
        return self.plan.world_size

    @property
    def data_rank(self) -> int:
        """Which part of each micro-batch this rank takes."""
        return self.mesh.data.index

    @property
    def data_ranks(self) -> int:
        """Parts that each micro-batch is dealt into."""
        return self.mesh.data.size
