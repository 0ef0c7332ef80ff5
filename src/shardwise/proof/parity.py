"""`verify(task, plan)`: prove in float64 that a plan equals one process on this task (oracle, rank, compare_records).

One process in float64 and N ranks under the plan take the same optimizer steps on the same global batches. Compared
by name, after every step and on every rank: the loss and the gradient's norm, every gradient, every parameter as the
module uses it, every buffer, and the optimizer's state (`compare`).

Compiled blocks (`compile=true`) are left to a second proof, in the plan's own precision (`own_precision`).

What this does not prove: the plan's own precision (both sides run in float64), its speed, or other batch shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardwise.errors import InputError, RefusedPlan, RunError, ShardwiseError, first_line
from shardwise.layout import Plan, check
from shardwise.layout.dealing import enough_samples
from shardwise.progress import Say, silent
from shardwise.proof.outcome import Parity
from shardwise.task import Task
from shardwise.task_names import refuse_while_imported, resolve_task

NO_ROOM = (
    ". A proof holds the whole model in one process, in float64: prove one of fewer blocks (--shrink) or a narrower "
    "one; `shardwise plan` says where this one fits"
)


def verify(
    task: Task | str | Callable[[], Task],
    plan: Plan | str,
    *,
    steps: int = 2,
    seed: int = 0,
    clip_norm: float | None = None,
    device: str = "cpu",
    backend: str | None = None,
    shrink: bool = False,
    thorough: bool = False,
    pool: Any = None,
    timeout_s: float = 600.0,
    say: Say = silent,
) -> Parity:
    """Returns the `Parity` of a plan on a task; of a refused plan it has the reason in `refused`.

    steps      optimizer steps on both sides;  seed  of weights, masks and sources;  clip_norm  None: not clipped
    device     of both sides: "cpu", or an accelerator's type ("cuda", "xpu"), which ranks share if there are too few
    backend    the accelerator's own ("nccl"), for ranks that share a device; None: these use gloo
    shrink     whether to prove a small plan instead: least degrees, blocks and samples that keep the structure
    thorough   whether to add a proof with 3 ranks of an axis of 2, 3 steps, odd batches, ties and zeros, and one in the
               plan's own precision; three and a half times the cost
    pool       a `RankPool` to run in; None: one is made and closed
    timeout_s  seconds after which a job of ranks fails;  say  called with a line on what is being done
    Raises `InputError` for a task that fails in one process too, `RunError` if a rank fails.
    """
    # here and below imported late: `import shardwise` does not import torch
    from shardwise.device import check_device, check_own_backend
    from shardwise.proof.settings import Settings

    refuse_while_imported("verify")
    if steps < 1:
        raise InputError(f"verify needs at least 1 step, got {steps}")
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm must be positive, got {clip_norm}")
    check_device(device)
    if backend is not None:
        check_own_backend(backend, "backend")
    settings = Settings(steps=steps, seed=seed, clip_norm=clip_norm, device=device, own_backend=backend is not None)
    return _prove(task, Plan.parse(plan), settings, pool, timeout_s, say, shrink=shrink, thorough=thorough)


def _prove(
    task: Any, chosen: Plan, settings: Any, pool: Any, timeout_s: float, say: Say, *, shrink: bool = False,
    thorough: bool = False,
) -> Parity:  # fmt: skip
    """Returns the `Parity` of `verify`; arguments as there, but `settings` for the run's, without micro-batches."""
    from shardwise.look.samples import check_data

    parity = Parity(str(chosen), chosen.world_size)
    try:
        check(chosen)
    except RefusedPlan as refusal:
        parity.refused = str(refusal)
        return parity
    resolved = resolve_task(task)
    check_data(resolved)
    if shrink:
        small = _shrunk(task, resolved, chosen)
        task, chosen, resolved = small.task, small.plan, small.task()
        parity.notes += small.notes
        parity.proven = str(chosen)
        parity.world_size = chosen.world_size
    settings = replace(settings, accumulate=chosen.step_microbatches)
    if chosen.precision == "fp32":  # in other precisions a run casts a half-precision batch itself
        _refuse_half(resolved, settings)
    say(f"verify: {settings.steps} steps of {resolved.name} in one process, float64")
    oracle, settings = _one_process(resolved, settings, parity)
    settings = replace(settings, limits=tuple(oracle.limits))
    try:
        with _told_beside(oracle):
            record = _many(task, resolved, chosen, settings, parity, pool, timeout_s, say)
        _refuse_other_samples(resolved, settings, record)
        _judge(parity, resolved, settings, oracle, record)
        if chosen.compile and parity.equal:
            say("verify: steps with compiled blocks, in the plan's precision")
            parity.further.append(_in_own_precision(task, chosen, settings, pool, timeout_s))
    except RefusedPlan as refusal:
        parity.refused = str(refusal)
        return parity
    if not parity.equal and parity.exceeded:
        say("verify: running both again, to find where they differ first")
        _locate(parity, oracle, record, (task, chosen, settings), pool, timeout_s)
    if thorough and parity.equal:
        _prove_thoroughly(parity, task, chosen, settings, pool, timeout_s, say)
    return parity


def _prove_thoroughly(
    parity: Parity, task: Any, plan: Plan, settings: Any, pool: Any, timeout_s: float, say: Say
) -> None:
    """Adds to `parity` the proofs with three ranks and in the plan's own precision."""
    from shardwise.proof import thorough

    third = replace(settings, steps=max(settings.steps, thorough.STEPS), limits=(), dtypes=False)
    settings = replace(settings, own_steps=thorough.own_steps(plan))
    thorough.prove_thirds(parity, task, plan, partial(_prove, settings=third, pool=pool, timeout_s=timeout_s, say=say))
    # float64 hides casts of a layout; a plan with compiled blocks was proven in its precision before
    if parity.float64 and not plan.compile and plan.precision != "fp64":
        say(f"verify: steps in {plan.precision}")
        thorough.add_precision(parity, _in_own_precision(task, plan, settings, pool, timeout_s))


def _many(
    task: Any, resolved: Task, plan: Plan, settings: Any, parity: Parity, pool: Any, timeout_s: float, say: Say
) -> Any:
    """Returns the `Record` of the plan's ranks; adds notes to `parity`. Raises `RefusedPlan` if the ranks do.

    task  as given, for the ranks;  resolved  the same as a `Task`
    """
    from shardwise.engine.refused_modules import refuse
    from shardwise.proof.dtypes import first_differences
    from shardwise.proof.rank import run_rank
    from shardwise.proof.settings import global_batch
    from shardwise.step.batching import samples_in
    from shardwise.trace.deferred import build

    parity.notes += _notes(plan, parity.float64)
    samples = len(resolved.data) if resolved.data is not None else samples_in(global_batch(resolved, settings, 0))
    enough_samples(samples, plan)
    say(f"verify: the same steps on {plan.world_size} ranks under {plan}")
    # here, since the ranks get the plan in the proof's precision and so miss rules on the plan's own
    refuse(build(resolved.model, settings.seed).module, plan)
    single = _single_dtypes(resolved, plan, settings, parity) if settings.dtypes else None
    # None: one process fails in the plan's precision, so the ranks' dtypes cannot be compared with any
    own = None if single is None else plan.with_(compile=False)
    records = _on_ranks(run_rank, (task, plan, settings, own), parity, pool, timeout_s)
    if single is not None:
        parity.differences += first_differences(plan, [record.dtypes for record in records], single)
    from shardwise.proof.narrow_state import compare_variants, run_variants, variants

    # the proof in float64 ran without keys for codes, split masters and offload, which round or need masters
    if len(variants(plan)) > 1:
        say(f"verify: steps in {plan.precision}, with the state in full and as it rests under the plan")
        compare_variants(parity, plan, _ran(run_variants, (task, plan, settings), pool, timeout_s))
    return _joined(records)


@dataclass(frozen=True)
class _SameTask:
    """Has a job's `build_task`, which returns the given task, resolved."""

    task: Any

    def build_task(self) -> Task:
        return resolve_task(self.task)


def _in_own_precision(task: Any, plan: Plan, settings: Any, pool: Any, timeout_s: float) -> Parity:
    """Returns the proof of a plan in its own precision, by steps of SGD."""
    from shardwise.proof.own_precision import verify_precision

    def on_ranks(function: Any, _: int, *asked: Any) -> list[Any]:
        job, exact, *rest = asked
        return _ran(function, (job, exact, *rest), pool, timeout_s)

    return verify_precision(_SameTask(task), plan, replace(settings, limits=()), on_ranks)


def _single_dtypes(task: Task, plan: Plan, settings: Any, parity: Parity) -> Any:
    """Returns the dtypes of one process in the plan's precision; None, with a note, if it fails in it."""
    from shardwise.proof.own_dtypes import single_dtypes

    try:
        return single_dtypes(task, plan, settings)
    except Exception as error:
        parity.notes.append(f"dtypes are not proven: one process fails in {plan.precision}: {first_line(error)}")
        return None


def _refuse_other_samples(task: Task, settings: Any, ranks: Any) -> None:
    """Raises `InputError` if the ranks were given other batches than this process makes."""
    from shardwise.look.samples import OTHER_SAMPLES, checksum_of
    from shardwise.proof.settings import global_batch

    for step, checksum in enumerate(ranks.batches):
        if checksum_of(global_batch(task, settings, step)) != checksum:
            raise InputError(
                f"the batch of step {step + 1} is another in the ranks than in this process: {OTHER_SAMPLES}"
            )


def _judge(parity: Parity, task: Task, settings: Any, single: Any, ranks: Any) -> None:
    """Compares both records into `parity`, and sets apart what rounding alone explains."""
    from shardwise.proof.compare_records import compare
    from shardwise.proof.float32_proof import set_noise_apart
    from shardwise.proof.rounding import explain_by_rounding, nudged_runs

    compare(parity, single, ranks)
    set_noise_apart(parity)  # does nothing in float64, where no noise is measured
    if not parity.equal and parity.float64 and parity.exceeded:
        explain_by_rounding(parity, single, nudged_runs(task, settings, inside=True))


def _locate(parity: Parity, single: Any, ranks: Any, asked: tuple[Any, Plan, Any], pool: Any, timeout_s: float) -> None:
    """Runs both sides a second time and puts the first difference into `parity`; a note if that fails.

    asked  (task, plan, settings) of the first run
    """
    from shardwise.proof.locate import first_step, locate
    from shardwise.proof.oracle import Look, run_oracle
    from shardwise.proof.rank import trace_rank

    task, plan, settings = asked
    look = Look(max(first_step(parity), 0), plan.data_ranks)  # -1 (initial values): any step does
    try:
        run_oracle(resolve_task(task), settings, look)
        traces = _on_ranks(trace_rank, (task, plan, settings, look.step), parity, pool, timeout_s)
    except ShardwiseError as error:
        parity.notes.append(f"the second run, which looks for the first difference, failed: {error}")
        return
    parity.first = locate(parity, single, ranks, look, traces)


def _shrunk(reference: Any, task: Task, plan: Plan) -> Any:
    from shardwise.proof.shrink import shrink

    return shrink(reference, task, plan)


def _one_process(task: Task, settings: Any, parity: Parity) -> Any:
    """Returns (the oracle's `Record`, the `Settings` it ran in: float32 if a kernel has no float64).

    Raises `InputError` if the task fails in plain PyTorch too, `RefusedPlan` if the oracle alone fails.
    """
    try:
        return _oracle(task, settings, parity)
    except ShardwiseError:
        raise
    except Exception as error:
        raise _blamed(task, settings, error) from error


def _oracle(task: Task, settings: Any, parity: Parity) -> Any:
    """Returns (`Record` of one process, its `Settings`), in float64, or in float32 if a kernel has no float64."""
    from shardwise.proof.float32_proof import float32_oracle
    from shardwise.proof.oracle import run_oracle
    from shardwise.trace.deferred import build
    from shardwise.trace.module_state import outside_now
    from shardwise.trace.outside_state import Reached

    outside = outside_now(Reached(build(task.model, settings.seed).module, (task.loss,)))
    try:
        return run_oracle(task, settings), settings
    except ShardwiseError:
        raise
    except Exception as failure:
        return float32_oracle(task, settings, failure, parity)
    finally:
        outside.restore()  # tables that a forward cached there are in float64, and later steps have other dtypes


@contextmanager
def _told_beside(single: Any) -> Iterator[None]:
    """Context that turns a non-finite loss or gradient on the ranks into an error that compares it with one process."""
    from shardwise.step.normalise import NotFinite

    try:
        yield
    except NotFinite as error:
        if all(math.isfinite(value) for value in (*single.losses, *single.norms)):
            raise RunError(f"on the ranks alone: {error} In one process it is finite: a defect of shardwise") from error
        raise InputError(f"the task fails in one process too: {error}") from error


def _refuse_half(task: Task, settings: Any) -> None:
    """Raises `InputError` if one process fails on a half-precision batch, which the proof's float64 would hide."""
    import torch
    from torch.utils._pytree import tree_leaves

    from shardwise.look.one_process import Untried, told_alone
    from shardwise.precision import Precision
    from shardwise.proof.settings import global_batch

    batch = global_batch(task, settings, 0)
    dtypes = {getattr(leaf, "dtype", None) for leaf in tree_leaves(batch)}
    if not dtypes & {torch.float16, torch.bfloat16}:
        return
    try:
        failed = told_alone(task, Precision.of(Plan()), batch)
    except Untried:  # a model that exists once
        return
    if failed is not None:
        raise failed


def _blamed(task: Task, settings: Any, error: Exception) -> ShardwiseError:
    """Returns the error to raise if the oracle fails: `InputError` if a plain PyTorch step fails too."""
    from shardwise.device import pick_device
    from shardwise.look.memory_limits import is_out_of_memory
    from shardwise.look.one_process import cured, failure_alone, reason
    from shardwise.precision import Precision
    from shardwise.proof.settings import global_batch
    from shardwise.step.batching import fields_of, told_beside_first

    precision, batch, device = Precision.of(Plan()), global_batch(task, settings, 0), pick_device(settings.device)
    alone = failure_alone(task, precision, batch, device)
    if alone is not None:
        no_room = is_out_of_memory(alone)
        alone, cure = (alone, NO_ROOM) if no_room else cured(task, precision, batch, alone, device)
        return InputError(f"the task fails in one process too: {reason(alone)}{cure}")
    for step in range(1, settings.steps):  # perhaps a later batch has other fields than the first
        try:
            with told_beside_first(fields_of(batch), global_batch(task, settings, step), step):
                raise error
        except InputError as unlike:
            return unlike
        except Exception:  # the error again: this batch is like the first
            continue
    return RefusedPlan(f"the proof's one process fails, though a step in plain PyTorch does not: {reason(error)}")


def _notes(plan: Plan, float64: bool) -> list[str]:
    """Returns notes on what the proof leaves out of the plan."""
    notes = []
    if float64 and plan.precision != "fp64":
        notes.append(f"precision={plan.precision} is proven in float64: the layout, not the rounding")
    if plan.step_microbatches > plan.accumulate:
        notes.append(
            f"one process takes a step in {plan.step_microbatches} micro-batches too, as the plan's stages do: what "
            "looks at one as a whole (batch norm) differs from a plan with fewer"
        )
    return notes


def _on_ranks(function: Any, asked: tuple, parity: Parity, pool: Any, timeout_s: float) -> list[Any]:
    """Returns every rank's result of `function(task, plan, ...)`, the plan in the proof's precision."""
    task, plan, *rest = asked
    return _ran(function, (task, plan.exact("fp64" if parity.float64 else "fp32"), *rest), pool, timeout_s)


def _ran(function: Any, asked: tuple, pool: Any, timeout_s: float) -> list[Any]:
    """Returns every rank's result of `function(task, plan, settings, ...)`; `asked`: its arguments."""
    from shardwise.ranks import RankPool

    _, plan, settings, *_ = asked
    if pool is not None:
        return pool.run(function, plan.world_size, *asked, timeout_s=timeout_s)
    with RankPool(accelerators=settings.device != "cpu", own_backend=settings.own_backend) as own:
        return own.run(function, plan.world_size, *asked, timeout_s=timeout_s)


def _joined(records: list[Any]) -> Any:
    """Returns rank 0's `Record`, to which the other ranks' deviations and differences are added."""
    first, *others = records
    for rank, other in enumerate(others, 1):
        for name, mine, theirs in (("loss", first.losses, other.losses), ("norm", first.norms, other.norms)):
            if mine != theirs:
                first.differences.append(f"the {name} that rank {rank} is told is not that of rank 0")
        first.deviations += other.deviations
    return first
