"""`verify CONFIG.toml`: compare some steps of `train` with plain_run. `_small` has the settings that a proof changes.

    N ranks       the training loop itself, under the plan, in float64: its loader and workers, schedule, clipping,
                  optimizer, average, evaluations and metrics, over several steps across an epoch's end
    one process   `plain_run`

Compared are the numbers that a run writes for each step and each evaluation, its final weights, buffers and averages,
and its last checkpoint, read as unsharded tensors (`saved`). To keep it short, a source is reduced to the samples that
a few steps read, or read at a few places of its own order (`visited`).

What this does not prove: the plan's own precision (`own_precision` does), and steps beyond those run.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.config import Effective
from shardwise.dataset import Source
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan, check
from shardwise.layout.dealing import cut
from shardwise.proof import literal_settings, literal_sources, own_run
from shardwise.proof.compare_records import number_error, tensor_error
from shardwise.proof.narrow_state import compare_variants, run_variants, variants
from shardwise.proof.outcome import FLOAT64_BARS, NUMBER_BAR, Parity
from shardwise.proof.own_precision import verify_precision
from shardwise.proof.plain_run import RunRecord, RunSettings, plain_run
from shardwise.proof.saved import compare_saved, read_saved
from shardwise.proof.settings import LEAST_EPS, Settings, raise_eps
from shardwise.proof.sizes import small_sizes
from shardwise.proof.visited import starts_of, visiting
from shardwise.proof.zeros import settle
from shardwise.step.task_optimizer import named_groups
from shardwise.task import Task
from shardwise.trace.double import KeepDouble, as_written, default_dtype
from shardwise.training.job import Job, make_job
from shardwise.training.learning_rates import make_schedule
from shardwise.training.loop import EMA_WEIGHTS, WEIGHTS, run_rank

OnRanks = Callable[..., list[Any]]
STEPS = 5
BATCHES = 2.5  # batches in an epoch of a proof, so that the last one is short


@dataclass(frozen=True)
class First:
    """Source with `count` samples of `source`, evenly spread, read with float32 as the default dtype.

    draws   whether reading may use random numbers of torch
    starts  positions in the order that the source defines, at which batches of `batch` samples begin; () without one
    """

    source: Source
    count: int
    draws: bool = True  # so that no thread reads it beside the step, whose default dtype is float64
    starts: tuple[int, ...] = ()
    batch: int = 1

    @property
    def global_shape(self) -> Any:
        """Returns the extents of space, of which ranks read their own tiles; None if the source has none."""
        return getattr(self.source, "global_shape", None)

    def order(self, seed: int) -> Any:
        """Returns the order that the source defines, at the places that a proof reads; None without `starts`."""
        return visiting(self.source, seed, self.starts, self.batch) if self.starts else None

    def __len__(self) -> int:
        return self.count

    def read(self, indices: list[int], region: Any = None) -> Any:
        """Returns the batch of the samples at these indices; `region` as of the source."""
        with as_written(), default_dtype(torch.float32):
            return self.source.read([cut(len(self.source), self.count, index)[0] for index in indices], region)


@dataclass(frozen=True)
class Proving:
    """The changes that a proof makes to a run's task, the same on both sides.

    samples   number of samples of an epoch; 0: all, in the source's own order, in which batches begin at `starts`
    batch     samples of a batch
    watching  records a run in its own precision; None: the run is in float64
    limits    each step's size up to which gradient elements are zeroed, in float64 (zeros)
    """

    samples: int
    starts: tuple[int, ...] = ()
    batch: int = 1
    watching: own_run.Watching | None = None
    limits: tuple[float, ...] = ()

    def task(self, task: Task) -> Task:
        """Returns the task with these changes: fewer samples, eps of at least `LEAST_EPS`, batches read in float32."""
        # so few samples that a few steps reach the end of an epoch
        if task.data is not None:
            count = self.samples or len(task.data)
            task = task.with_(data=First(task.data, count, starts=self.starts, batch=self.batch))
        if task.eval_data is not None:
            task = task.with_(eval_data=First(task.eval_data, len(task.eval_data)))
        if task.batch is not None:
            task = task.with_(batch=_AsDrawn(task.batch))
        # in the run's own precision one step is made to overflow
        if self.watching is not None:
            task = task.with_(loss=self.watching.loss(task.loss))
        return task.with_(optimizer=_Raised(task.optimizer))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context around all that a rank runs: computes in float64, or with `watching` in the run's own precision."""
        if self.watching is not None:
            yield
            return
        with KeepDouble(), default_dtype(torch.float64):
            yield

    @contextmanager
    def around(self, engine: Engine) -> Iterator[None]:
        """Context around the steps of a rank's engine: runs them at the small sizes, or lets `watching` record them."""
        if self.watching is None:
            settle(engine, self.limits)
        with small_sizes() if self.watching is None else self.watching.around(engine):
            yield


@dataclass(frozen=True)
class _AsDrawn:
    """Callable that makes a task's batches with float32 as the default dtype.

    In float64 the same generator would give other random numbers.
    """

    batch: Callable[[int], Any]

    def __call__(self, step: int) -> Any:
        with as_written(), default_dtype(torch.float32):
            return self.batch(step)


@dataclass(frozen=True)
class _Raised:
    optimizer: Callable[[list[dict]], torch.optim.Optimizer]

    def __call__(self, groups: list[dict]) -> torch.optim.Optimizer:
        made = self.optimizer(groups)
        raise_eps(made)
        return made


def verify_run(
    effective: Effective, task: Task | Callable[[], Task] | None = None, *, steps: int | None = None, pool: Any = None,
    timeout_s: float = 600.0,
) -> Parity:  # fmt: skip
    """Returns the `Parity` of what `train` does with a configuration; its parameters are weights and their averages.

    steps      to run; None: 5, across an epoch's end if the task has data to read
    pool       a `RankPool` to run in; None: one is made and closed
    timeout_s  seconds after which a job of ranks fails

    For a refused plan `refused` has the reason. Raises `InputError` for train.init_from.
    """
    parity = Parity(str(effective.plan), effective.plan.world_size, bars=dict(FLOAT64_BARS))
    try:
        check(effective.plan)
        job = make_job(effective, task)
        small, settings = _small(job, steps or STEPS, parity)
        single = plain_run(small.build_task(), settings)
        single.kept = _kept(settings.steps)
        small = small.with_(proof=replace(small.proof, limits=single.limits))
        with _ranks(pool, timeout_s) as on_ranks:
            ranks = _run(small, on_ranks)
            own = _second(job, settings, on_ranks)
            parity.further += [] if own is None else [own]
            _own_run(small, job.effective.plan, settings, on_ranks, own or parity)
    except RefusedPlan as refusal:
        parity.refused = str(refusal)
        return parity
    _compare(parity, single, ranks)
    return parity


def _small(job: Job, steps: int, parity: Parity) -> tuple[Job, RunSettings]:
    """Returns (the job of a few steps in float64, the plain loop's settings for it); adds notes to `parity`."""
    effective, train = job.effective, job.effective.config.train
    task = job.build_task()
    if train.init_from is not None:
        raise InputError("verify CONFIG: train.init_from: give the run without it; a proof begins with drawn weights")
    samples = 0
    starts: tuple[int, ...] = ()
    # a source with an order of its own is read at some places of that order, any other at a few samples
    if task.data is not None and visiting(task.data, train.seed, (0,), 1) is not None:
        starts = starts_of(len(task.data), job.batch_samples)
        parity.notes.append(f"scope: of the order that the data defines, batches at {', '.join(map(str, starts))}")
    elif task.data is not None:
        samples = min(len(task.data), math.ceil(BATCHES * job.batch_samples))
        if steps * job.batch_samples <= samples:
            parity.notes.append(f"scope: {steps} steps do not reach the end of the first epoch")
    # at least every second step, so that the few steps of a proof include an evaluation before the end
    every = train.eval_every if train.eval_every is None or train.eval_every < steps else 2
    changed: dict[str, Any] = {
        "steps": steps, "epochs": None, "randomness": "global", "device": "cpu", "eval_every": every, "log_every": 1,
        "checkpoint_every": _kept(steps)[0], "checkpoint_minutes": None, "checkpoint_keep": len(_kept(steps)),
        "checkpoint_folder": None, "profile_steps": None, "cluster": None, "generate": 0, "sinks": [],
    }  # fmt: skip
    config = effective.config.model_copy(update={"train": train.model_copy(update=changed)})
    plan = effective.plan.exact("fp64")
    total = max(job.steps, steps)  # the schedule of the whole run, not one of a few steps
    length = None if task.data is None else len(task.data)
    factor = make_schedule(config.schedule, total)
    parity.differences += literal_settings.differences(job, length, factor, total) + literal_sources.miscounted(task)
    if task.name == effective.config.task.name:  # a built-in task, which splits its data itself
        section = effective.config.task
        parity.differences += literal_sources.leaked(task) + literal_sources.mistokenized(section, task)
        parity.differences += literal_settings.other_sizes(section, task)
    small = job.with_(
        effective=replace(effective, config=config, plan=plan),
        steps=steps,
        scheduled=total,
        proof=Proving(samples, starts, job.batch_samples),
    )
    if effective.plan.precision != "fp64":
        parity.notes.append(f"precision={effective.plan.precision} is proven in float64: the run, not its rounding")
    raised = _raised(task)
    if raised:
        parity.notes.append(f"the optimizer's eps of {raised[0]:g} is {LEAST_EPS:g} on both sides")
    settings = RunSettings(
        steps=steps, seed=train.seed, batch=job.batch_samples, accumulate=plan.step_microbatches,
        factor=factor, clip_norm=train.clip_norm, eval_every=every,
        eval_count=train.eval_samples, decay=train.ema_decay,
    )  # fmt: skip
    return small, settings


def _kept(steps: int) -> list[int]:
    """Returns the steps whose checkpoints a proof's run keeps: one that is due before the last, and the last."""
    return sorted({max(1, steps - 1), steps})


def _raised(task: Task) -> list[float]:
    return raise_eps(task.optimizer(named_groups([torch.nn.Parameter(torch.zeros(2, 2))])))


@contextmanager
def _ranks(pool: Any, timeout_s: float) -> Iterator[OnRanks]:
    """Context that yields a function which runs (function, world size, *args) on ranks, of the pool or of its own."""
    from shardwise.ranks import RankPool

    if pool is not None:
        yield lambda function, world, *args: pool.run(function, world, *args, timeout_s=timeout_s)
        return
    with RankPool() as own:
        yield lambda function, world, *args: own.run(function, world, *args, timeout_s=timeout_s)


def _run(job: Job, on_ranks: OnRanks) -> RunRecord:
    with tempfile.TemporaryDirectory(prefix="shardwise-proof-") as folder:
        on_ranks(prove_rank, job.effective.plan.world_size, job.with_(folder=Path(folder)))
        return _read(Path(folder))


def _second(job: Job, settings: RunSettings, on_ranks: OnRanks) -> Parity | None:
    """Returns the proof in the plan's own precision; None if that is float64 and no block is compiled."""
    plan = job.effective.plan
    if plan.precision == "fp64" and not plan.compile:
        return None
    samples = job.batch_samples if job.build_task().batch is None else 0  # else the task decides its batches' size
    own = Settings(
        steps=STEPS, seed=settings.seed, accumulate=settings.accumulate, clip_norm=settings.clip_norm,
        batch_samples=samples or 1,
    )  # fmt: skip
    parity = verify_precision(job, plan, own, on_ranks)
    if len(variants(plan)) > 1 and not parity.unproven:
        compare_variants(parity, plan, on_ranks(run_variants, plan.world_size, job.build_task, plan, own))
    return parity


def _own_run(small: Job, plan: Plan, settings: RunSettings, on_ranks: OnRanks, parity: Parity) -> None:
    """Runs the training loop in its own precision; differences of its files from its weights go into `parity`.

    `small`: the job of the float64 proof; `plan`: in the run's own precision.
    """
    if parity.unproven:  # one process cannot run in the plan's precision
        return
    task = small.build_task()
    train = small.effective.config.train
    evaluates = task.eval_data is not None and settings.eval_every != 0
    decay = None if settings.decay is None else max(settings.decay, own_run.DECAY)
    settings = replace(settings, decay=decay)
    own = train.model_copy(update={"on_nonfinite": "skip", "keep_best": evaluates, "ema_decay": decay})
    effective = replace(
        small.effective,
        config=small.effective.config.model_copy(update={"train": own}),
        plan=plan.with_(compile=False),
    )
    watching = own_run.watching(task, settings)
    with tempfile.TemporaryDirectory(prefix="shardwise-proof-") as folder:
        job = small.with_(effective=effective, folder=Path(folder), proof=replace(small.proof, watching=watching))
        ranks = on_ranks(prove_rank, plan.world_size, job)
        parity.differences += own_run.differences(task, plan, settings, ranks, Path(folder))
    parity.notes.append(
        f"in {plan.precision}: averages, held-out losses, best weights and the file at the end are those of the run's "
        "own weights"
        + (
            ""
            if watching.spoilt is None
            else f"; an overflow that the proof made in step {watching.spoilt + 1} was skipped, as it should be"
        )
    )


def prove_rank(job: Job) -> own_run.Watching | None:
    """Runs the training loop of one rank; returns the job's `Watching`, filled, or None if it has none."""
    run_rank(job)  # builds the task in the dtypes in which it is written
    watching: own_run.Watching | None = job.proof.watching
    return watching


def _read(folder: Path) -> RunRecord:
    """Returns the `RunRecord` in the files of a run's folder: numbers, weights, averages, the last checkpoint."""
    from safetensors.torch import load_file

    record = RunRecord()
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        numbers = {key: math.nan if value is None else value for key, value in json.loads(line).items()}
        step = int(numbers.pop("step")) - 1
        if "eval_loss" in numbers:
            record.evaluations[step] = numbers
        else:
            record.steps.append(numbers)
    record.weights = load_file(folder / WEIGHTS)
    read_saved(folder, record)
    if (folder / EMA_WEIGHTS).exists():
        record.averages = load_file(folder / EMA_WEIGHTS)
    return record


def _compare(parity: Parity, single: RunRecord, ranks: RunRecord) -> None:
    """Compares the run (`ranks`) with the plain loop (`single`) into `parity`: numbers, weights, files."""
    parity.differences += single.differences + ranks.differences
    if len(single.steps) != len(ranks.steps):
        parity.differences.append(f"the run took {len(ranks.steps)} steps, the plain loop {len(single.steps)}")
    if sorted(single.evaluations) != sorted(ranks.evaluations):
        after = [sorted(step + 1 for step in record.evaluations) for record in (ranks, single)]
        parity.differences.append(f"the run evaluated after steps {after[0]}, the plain loop after {after[1]}")
    parity.loss_error, parity.norm_error = 0.0, 0.0
    # as many steps as both have, since another number of steps is reported above
    for step, (mine, theirs) in enumerate(zip(single.steps, ranks.steps, strict=False)):
        parity.loss_error = max(parity.loss_error, number_error(theirs["loss"], mine["loss"]))
        parity.norm_error = max(parity.norm_error, number_error(theirs["grad_norm"], mine["grad_norm"]))
        _compare_numbers(parity, f"step {step + 1}", mine, theirs)
    for step in sorted(single.evaluations.keys() & ranks.evaluations.keys()):
        told = f"the evaluation after step {step + 1}"
        _compare_numbers(parity, told, single.evaluations[step], ranks.evaluations[step])
    # below the learning rate, by which a weight at zero may move, an error is not relative to the weight
    rate = max((abs(numbers["lr"]) for numbers in single.steps), default=0.0)
    both = (("", single.weights, ranks.weights), ("average of ", single.averages, ranks.averages))
    for prefix, ours, runs in both:
        # names of either, since a weight on one side alone is a difference
        for name in sorted(ours.keys() | runs.keys()):
            if name not in ours or name not in runs:
                where = "plain loop" if name in ours else "run"
                parity.differences.append(f"{prefix}'{name}' exists only in the {where}")
                continue
            actual, value = runs[name], ours[name]
            parity.parameter_error[f"{prefix}{name}"] = tensor_error(actual.to(value.dtype), value, max(rate, 1e-300))
    compare_saved(parity, single, ranks, rate)
    moved = [name for name, value in single.initial.items() if not torch.equal(value, single.weights[name])]
    if not moved:
        parity.unproven.append("no weight moved in one process, so no update was seen")
    rows = (*single.steps, *single.evaluations.values())
    parity.notes.append(
        f"compared: {', '.join(sorted({key for row in rows for key in row}))}; "
        f"weights at the end{' and their averages' if single.averages else ''}"
    )


def _compare_numbers(parity: Parity, where: str, mine: dict[str, float], theirs: dict[str, float]) -> None:
    for key, value in mine.items():
        actual = theirs.get(key, math.nan)
        if abs(actual - value) > NUMBER_BAR * max(abs(value), 1e-12) or actual != actual:
            parity.differences.append(f"{key} of {where}: {actual:.9g} in the run, {value:.9g} in the plain loop")
