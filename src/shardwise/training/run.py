"""`train` from Python: makes the job, starts the ranks, returns their summary. A rank's loop: training/loop."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shardwise.config import Config, Effective, Given, from_table, load
from shardwise.config.schema import TrainSection
from shardwise.errors import InputError, RefusedPlan, RunError, ShardwiseError, Stopped
from shardwise.guard.diagnose import Deadlines
from shardwise.layout import Plan, check
from shardwise.layout.elastic import smaller
from shardwise.progress import timing
from shardwise.ranks import LaunchedPlace, here
from shardwise.ranks.attempts import remember, remembered
from shardwise.ranks.launchers import perhaps_hosts
from shardwise.task import Task
from shardwise.task_names import refuse_while_imported
from shardwise.training.go_on import how_to_go_on
from shardwise.training.holding import LOCK, held
from shardwise.training.job import Job, make_job
from shardwise.training.restart import ahead_of, source_of, until_done
from shardwise.training.resume import find_run, home_of, mark_stopped, refuse_default_beside

LOGS = "ranks"
RUN = "run"  # key under which a launcher's ranks remember their run for later attempts (ranks/attempts)


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, and its summary (the content of `summary.json`)."""

    folder: Path
    summary: dict[str, Any]

    @property
    def loss(self) -> float | None:
        """Returns the last step's loss; None if it was not finite."""
        return self.summary["loss"]

    @property
    def eval_loss(self) -> float | None:
        """Returns the loss on held-out data at the end; None for a task without such data."""
        return self.summary["eval_loss"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Returns the records of `metrics.jsonl`, one for each step and each evaluation."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def __str__(self) -> str:
        from shardwise.observe import summary_text

        return summary_text(self.summary)


def train(
    task: str | Task | Callable[[], Task] = "text",
    plan: str | Plan | None = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    nproc: int | None = None,
    resume: str | Path | None = None,
    **overrides: Any,
) -> Run:
    """Trains a task under a plan and returns the finished `Run`.

    task       a builtin ("text", "digits"), "module:callable", a `Task`, or a function that returns one
    plan       a `Plan` or its text; None: the configuration's, else one process
    config     a TOML file, or the same as nested dicts
    nproc      ranks to start; None: the plan's world size, which any number must equal unless train.min_ranks is set
    resume     a run's folder or a checkpoint to resume from; "auto": the last run of this task; "new": none. None: the
               last run of the same configuration if it was asked to stop, else a new one
    overrides  fields of [train] by name (`steps=100`), sections as dicts (`optimizer={"lr": 3e-4}`)

    With `restarts=N` a run whose rank dies, hangs or fails is started again up to N times, from its last checkpoint.
    SIGTERM, SIGUSR1, SIGHUP and Ctrl-C end it after the step under way: the state is saved, and `Stopped` says where.

    With more than one rank, a `Task` is sent to the ranks by pickle: one with lambdas is better given by name.

    Raises `InputError` for a wrong argument or configuration, `RefusedPlan` for a plan that does not run, `RunError` if
    the run fails.
    """
    refuse_while_imported("train")
    task_or_function = task if not isinstance(task, str) else None
    values = [*_from_config(config), Given("task.name", _name_of(task), "the task")]
    if plan is not None:
        values.append(Given("plan", plan, "the plan"))
    values += _from_overrides(overrides)
    path = config if isinstance(config, str | Path) else None
    return execute(load(path, values=values), task_or_function, nproc, None if resume is None else str(resume))


def _name_of(task: Any) -> str:
    """Returns the value of `task.name` for a task in any of `train`'s forms; `InputError` for anything else."""
    if isinstance(task, str):
        return task
    if isinstance(task, Task):
        return f"Task:{task.name}"
    if not callable(task):
        raise InputError(f"train: the task is of type {type(task).__name__}; expected a name, a Task, or a function")
    return f"{getattr(task, '__module__', '')}:{getattr(task, '__qualname__', type(task).__name__)}"


def _from_config(config: Any) -> list[Given]:
    return from_table(config, "config") if isinstance(config, Mapping) else []


def _from_overrides(overrides: Mapping[str, Any]) -> list[Given]:
    """Returns a `Given` for each value in `train`'s keywords: sections as dicts, dotted keys, fields of [train]."""
    nested: dict[str, Any] = {}
    for key, value in overrides.items():
        in_train = key in TrainSection.model_fields and key not in Config.model_fields
        nested[f"train.{key}" if in_train else key] = value
    return from_table(nested, "train()")


def execute(
    effective: Effective,
    task: Task | Callable[[], Task] | None = None,
    nproc: int | None = None,
    resume: str | None = None,
) -> Run:
    """Runs a configuration; returns the finished `Run`.

    One rank without restarts runs in this process, others in new processes; under a launcher this process is one rank.

    task     used in place of the one that the configuration names; None: that one
    nproc    number of ranks to start; None: as many as the plan has
    resume   as in `train`

    Raises `Stopped` if a signal asked the run to stop, and else as `train` does.
    """
    place = here()
    effective = _for_ranks(effective, place.world_size if place is not None else nproc)
    world = effective.plan.world_size
    _check_ranks(effective, nproc, place)
    check(effective.plan)
    refuse_default_beside(effective)
    job = make_job(effective, task, keep=place is not None or world == 1)
    forecast = _forecast(job)  # made on all ranks of a launcher, so that all raise together
    if place is not None:
        return _joined(job, forecast, resume)
    # with restarts even one rank gets a process of its own, which this one can start again
    supervised = world > 1 or effective.config.train.restarts > 0
    job = _placed(job.with_(launched=supervised), resume)
    with held(job.folder) as said, _kept_errors(job, "error.log"):
        job = _with_notes(job, said)
        summary = until_done(job, _launched) if supervised else _here(job)
        _raise_stopped(job, summary)
        return Run(job.folder, _beside(job, forecast, summary))


def _placed(job: Job, resume: str | None) -> Job:
    """Returns the job with its folder, a new one or that of the run that it resumes, and its checkpoint to resume."""
    folder, source, said = find_run(resume, job.effective, job.name)
    if source is None:
        job = job.with_(folder=_new_folder(job))
    else:
        job = job.with_(folder=_new_folder(job) if folder is None else folder, resume=str(source))
    return _with_notes(job, said)


def _with_notes(job: Job, said: Sequence[str]) -> Job:
    return job.with_(effective=replace(job.effective, notes=(*job.effective.notes, *said)))


def _raise_stopped(job: Job, summary: dict[str, Any]) -> None:
    """Raises `Stopped` if the run was asked to stop, and writes stopped.json for the next start."""
    stopped = summary.get("stopped")
    if stopped is None:
        return
    from shardwise.ranks import here

    place = here()
    # under a launcher rank 0 alone writes the file
    if place is None or place.rank == 0:
        mark_stopped(job.folder, job.effective, stopped)
    error = Stopped(
        f"stopped after step {stopped['step']} of {job.steps}, as asked; the state is in {stopped['checkpoint']}, and "
        f"the same command (or --resume {job.folder}) goes on"
    )
    raise error


def _forecast(job: Job) -> dict[str, Any] | None:
    """Returns the forecast of the run, as `foresee`; None if the configuration names no cluster."""
    if job.effective.config.train.cluster is None:
        return None
    from shardwise.training.foresight import foresee

    return foresee(job)


def _beside(job: Job, forecast: dict[str, Any] | None, summary: dict[str, Any]) -> dict[str, Any]:
    """Returns the summary with "forecast" compared with measurements, and rewrites summary.json.

    If `forecast` is None the summary is returned unchanged.
    """
    if forecast is None:
        return summary
    from shardwise.observe import write_json
    from shardwise.training.foresight import beside

    summary = {**summary, "forecast": beside(forecast, summary)}
    write_json(job.folder / "summary.json", summary)
    return summary


def _check_ranks(effective: Effective, nproc: int | None, place: LaunchedPlace | None) -> None:
    """Raises `InputError` if `nproc`, or the launcher's number of ranks, differs from the plan's."""
    plan = effective.plan
    if nproc is not None and nproc != plan.world_size:
        raise InputError(
            f"nproc is {nproc}, but plan {plan} needs {plan.world_size} rank(s): leave nproc out, or change the plan, "
            f"for example to dp_replicate={nproc}"
        )
    if place is not None and place.world_size != plan.world_size:
        raise InputError(
            f"{place.named} started {place.world_size} rank(s), but plan {plan} needs {plan.world_size}: give "
            f"a --plan of {place.world_size}, such as dp_replicate={place.world_size}"
            f"{perhaps_hosts(place, plan.world_size)}"
        )


def _for_ranks(effective: Effective, ranks: int | None) -> Effective:
    """Returns the configuration, with a smaller plan if there are fewer `ranks` and train.min_ranks allows it."""
    least, plan = effective.config.train.min_ranks, effective.plan
    # without train.min_ranks a wrong number of ranks is a mistake, which `_check_ranks` names
    if ranks is None or least is None or not least <= ranks < plan.world_size:
        return effective
    check(plan)
    fewer = smaller(plan, ranks)
    note = f"{ranks} of {plan.world_size} ranks are there: the plan is {fewer} instead of {plan}"
    return replace(effective, plan=fewer, notes=(*effective.notes, note))


def _new_folder(job: Job) -> Path:
    from shardwise.observe import make_folder

    return make_folder(job.effective.config.train.out, job.name)


def _here(job: Job) -> dict[str, Any]:
    from shardwise.training.loop import run_rank

    return run_rank(job)


def _deadlines(config: TrainSection) -> Deadlines:
    return Deadlines(**{
        deadline.name: getattr(config, f"{deadline.name.removesuffix('_s')}_deadline") for deadline in fields(Deadlines)
    })  # fmt: skip


def _launched(job: Job) -> dict[str, Any]:
    """Runs the job on rank processes that this one starts and watches; returns the summary."""
    from shardwise.ranks import launch

    def announce(name: str) -> None:
        sys.stderr.write(f"\n{name}: the step under way is finished and saved; a second signal ends the run at once\n")

    config, world = job.effective.config.train, job.effective.plan.world_size
    asked = announce if config.checkpoint_every != 0 else None
    with ExitStack() as stack:
        stack.enter_context(timing(sys.stderr.isatty(), f"train: starting {world} ranks"))
        results: Sequence[Any] = launch(
            train_rank,
            world,
            (job,),
            log_dir=job.folder / LOGS,
            on_event=lambda event: stack.close(),  # rank 0 shows its own progress from here on
            on_stop=asked,
            deadlines=_deadlines(config),
            imports="shardwise.training.loop",
        )
    return results[0]


def train_rank(job: Job) -> dict[str, Any]:
    """Runs the job on a launched rank; returns the content of `summary.json`."""
    return _here(job)


def _joined(job: Job, forecast: dict[str, Any] | None, resume: str | None) -> Run:
    """Runs one rank of a world that a launcher started; returns the `Run`. Rank 0 chooses the folder for all."""
    from shardwise.comm import everybody, gather_json, refuse_shared_devices
    from shardwise.ranks import join
    from shardwise.ranks.launchers import own_device
    from shardwise.training.hosts_alike import check_folder, check_hosts

    config = job.effective.config.train
    rank, _ = join(deadlines=_deadlines(config))
    device = own_device("cpu" if job.effective.config.train.device == "cpu" else None)
    refuse_shared_devices(device)
    noticed = check_hosts(job, device)
    placed, error = job, ""
    with ExitStack() as stack:
        if rank == 0:
            try:
                placed = _placed_in_turn(job, resume)
                placed = _with_notes(placed, stack.enter_context(held(placed.folder)))
            # sent to all ranks and raised there: otherwise they would wait for the folder
            except (ShardwiseError, OSError) as problem:
                error = str(problem)
        notes = list(placed.effective.notes)
        from_rank_0 = gather_json([str(placed.folder), placed.resume, placed.again, notes, error], everybody(), device)[
            0
        ]
        folder, source, again, notes, error = from_rank_0
        if error:
            raise InputError(error)
        effective = replace(job.effective, notes=(*notes, *noticed))
        job = job.with_(folder=Path(folder), resume=source, again=again, effective=effective)
        check_folder(job, device)
        stack.enter_context(_kept_errors(job, f"error-rank{rank}.log"))
        summary = _beside_others(job)
        _raise_stopped(job, summary)
        return Run(job.folder, _beside(job, forecast, summary) if rank == 0 else summary)


def _beside_others(job: Job) -> dict[str, Any]:
    """Runs a launcher's rank; returns the summary. `RunError` that names lost ranks and how to resume."""
    from shardwise.ranks.lost import named

    try:
        return _here(job)
    except Stopped:
        raise
    except Exception as error:
        lost = named(error)
        if lost is None:
            raise
        raise RunError(f"{lost}\n{how_to_go_on(job)}") from error


def _placed_in_turn(job: Job, resume: str | None) -> Job:
    """Returns the job as `_placed`; if the launcher has started the run again, with the first attempt's folder."""
    before = remembered(RUN)
    if before is not None and Path(json.loads(before)["folder"]).is_dir():
        first_run = json.loads(before)
        folder = Path(first_run["folder"])
        home = home_of(job.effective, folder)
        source = source_of(home, first_run["resume"], {(name, inode) for name, inode in first_run["ahead"]})
        note = f"the launcher started this run again: it goes on in {folder}"
        return _with_notes(job.with_(folder=folder, resume=source, again=True), [note])
    placed = _placed(job, resume)
    ahead = ahead_of(home_of(placed.effective, placed.folder), placed.resume)
    remember(RUN, json.dumps({"folder": str(placed.folder), "resume": placed.resume, "ahead": sorted(ahead)}))
    return placed


@contextmanager
def _kept_errors(job: Job, name: str) -> Iterator[None]:
    """Context that writes an error into file `name` of the run's folder, or removes the new folder of a refused run."""
    folder = job.folder
    # a folder with other files belongs to a run that is resumed, and is never removed
    new = set(os.listdir(folder)) <= {LOCK}
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        metrics = folder / "metrics.jsonl"
        begun = metrics.exists() and metrics.stat().st_size > 0
        refused = isinstance(error, InputError | RefusedPlan)
        # nothing was trained, so nothing is left: test_a_plan_that_the_ranks_refuse_leaves_no_folder
        if refused and new and not begun:
            shutil.rmtree(folder, ignore_errors=True)
        # a resumed run that is refused stays as it was
        elif (new or not refused) and folder.is_dir():  # it may have been moved or deleted meanwhile
            (folder / name).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            setattr(error, "log", folder / name)  # noqa: B010, for the command line to tell
        raise
