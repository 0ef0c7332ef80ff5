"""Finds the run that a command resumes, also in job arrays, and compares settings with it. Without torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from shardwise.checkpoint import manifest, publish
from shardwise.checkpoint.remote import is_remote, place
from shardwise.config import Effective
from shardwise.config.effective import NO_TASK
from shardwise.config.schema import BUILTINS, NOT_TRAINED
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.task_files import is_run

CHECKPOINTS = "checkpoints"
STOPPED = "stopped.json"  # file in the folder of a run that was asked to stop
AUTO, NEW = "auto", "new"
ARRAY_TASK = "array task"  # key in the settings for the index of this job in a job array
# index variables of Slurm, PBS, Grid Engine and LSF; the last two set them outside of arrays too, to `_NO_ARRAY`
_ARRAY_VARIABLES = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "SGE_TASK_ID", "LSB_JOBINDEX")
_NO_ARRAY = ("", "undefined", "0")


def settings_of(effective: Effective) -> dict[str, Any]:
    """Returns {dotted key: value} of the whole configuration, with "plan" and, in a job array, `ARRAY_TASK`."""
    settings: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            settings[prefix] = value

    walk("", effective.config.model_dump(mode="json"))
    return settings | {"plan": str(effective.plan)} | _array_task()


def _array_task() -> dict[str, str]:
    """Returns {ARRAY_TASK: "VARIABLE=index"} in a job array, whose jobs each resume their own run; else {}."""
    variables = [f"{name}={os.environ[name]}" for name in _ARRAY_VARIABLES if name in os.environ]
    mine = next(
        (
            variable
            for variable in variables
            if variable.startswith("SLURM") or variable.partition("=")[2] not in _NO_ARRAY
        ),
        None,
    )
    return {} if mine is None else {ARRAY_TASK: mine}


def task_digest(effective: Effective) -> str | None:
    """Returns the SHA-256 of the Python file that defines the task; None if there is no such file."""
    file, _, _ = effective.config.task.name.rpartition(":")
    path = Path(file if file.endswith(".py") else file.replace(".", "/") + ".py")
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def refuse_default_beside(effective: Effective) -> None:
    """Raises `InputError` if no task is given but `train.out` has runs of a task other than the built-in ones."""
    out = Path(effective.config.train.out)
    if NO_TASK not in effective.notes or not out.is_dir():
        return
    runs = [re.fullmatch(r"\d{8}-\d{6}-(.+?)(-\d+)?", path.name) for path in out.iterdir() if is_run(path)]
    names = sorted({run[1] for run in runs if run is not None} - set(BUILTINS))
    if names:
        raise InputError(
            f"no task is given, and {out} has runs of {', '.join(names)}: give the task, as my_tasks.py:NAME, or "
            f"`{effective.config.task.name}` where the built-in example is meant"
        )


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns a line for each setting that affects training and differs; arguments as `settings_of` returns them."""

    def told(value: Any) -> str:
        return "not set" if value is None else str(value)

    return [
        f"{key} was {told(before.get(key))} and is {told(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not NOT_TRAINED.fullmatch(key)
    ]


def of_another_plan(before: Plan, now: Plan) -> str:
    """Returns a notice on what stays the same in a run that resumes under another plan, and what does not."""
    many, were, same = now.step_microbatches, before.step_microbatches, "the same samples in the same order"
    if many == were:
        return f"another plan than the checkpoint's: {same}, sums in another"
    return (
        f"another plan than the checkpoint's, with {many} micro-batches a step where that had {were}: {same}; masks of "
        "dropout, and what looks at a micro-batch as a whole (batch norm), are others"
    )


def find_run(asked: str | None, effective: Effective, name: str) -> tuple[Path | None, Path | None, list[str]]:
    """Returns (run folder, source, notices) of the run to resume; (None, None, notices) for a new run.

    asked   a run folder, a checkpoint, "auto" (the last run of this name, in a job array of this job), "new" (none), or
            None (the last run of this name and configuration, if it was asked to stop)
    name    the run's name

    The source is a checkpoint or a folder of checkpoints. A run folder of None with a source: a new folder is needed.
    Raises `InputError` for a folder without a checkpoint.
    """
    if asked == NEW:
        return None, None, []
    runs = _runs(effective, name)
    if asked is None:
        last = _stopped_like(effective, runs)
        if last is None:
            return None, None, []
        said = f"{last} was asked to stop: this is the same command, and goes on with it (--resume new begins anew)"
        return last, home_of(effective, last), [said]
    if asked == AUTO:
        mine = _array_task().get(ARRAY_TASK)
        own = (run for run in runs if mine is None or (_settings_in(effective, run) or {}).get(ARRAY_TASK) == mine)
        # `exp-2` may be a second run of `exp` within one second or of a task named so; its checkpoint knows the name
        last = next((run for run in own if _name_in(effective, run) in (name, None)), None)
        if last is None:
            of = f" of array task {mine}" if mine is not None else ""
            return (
                None,
                None,
                [f"{effective.config.train.out} has no run of '{name}'{of} with a checkpoint: a new one begins"],
            )
        return last, home_of(effective, last), []
    path = place(asked)
    # checkpoints lie in the run's folder, or where train.checkpoint_folder puts them
    for home in () if is_remote(path) else (path / CHECKPOINTS, home_of(effective, path)):
        if publish.scan(home):
            return path, home, []
    if not publish.scan(path) and not (path / "manifest.json").exists():
        why = (
            "there is no such folder" + ("" if "/" in asked else "; auto goes on with this task's last run")
            if not path.exists()
            else "it is a run that wrote no checkpoint (by default every 15 minutes, and then at the end too): begin a "
            f"new run with its weights by --init-from {asked}, and let it save by --checkpoint-every"
            if (path / "model.safetensors").exists()
            else "neither it nor its `checkpoints` holds a checkpoint: give a run's folder, or new"
        )
        raise InputError(f"--resume {asked}: {why}")
    # a store holds checkpoints alone, so the run gets a new folder here
    if is_remote(path):
        return None, path, []
    run = next((above for above in (path.parent, path.parent.parent) if (above / CHECKPOINTS).is_dir()), None)
    # a checkpoint outside of a run's folder starts a new run folder
    inside = run is not None and (run / "config.toml").exists()
    return (run if inside else None), path, []


def home_of(effective: Effective, run: Path) -> Path:
    """Returns the folder of the checkpoints of the run in folder `run`: below it, or in train.checkpoint_folder."""
    elsewhere = effective.config.train.checkpoint_folder
    return run / CHECKPOINTS if elsewhere is None else place(elsewhere).absolute() / run.name


def _runs(effective: Effective, name: str) -> list[Path]:
    """Returns the run folders in `train.out` of this name that have a checkpoint, newest first."""
    out = Path(effective.config.train.out)
    kind = re.compile(r"\d{8}-\d{6}-" + re.escape(name) + r"(-\d+)?")
    runs = [path for path in (out.iterdir() if out.is_dir() else ()) if kind.fullmatch(path.name)]
    runs = [path for path in runs if publish.scan(home_of(effective, path))]
    return sorted(runs, key=lambda path: (path.name[:15], len(path.name), path.name), reverse=True)


def _stopped_like(effective: Effective, runs: list[Path]) -> Path | None:
    """Returns the newest of `runs` with this configuration if it was asked to stop, else None.

    Newer runs of other configurations do not count, since jobs of an array share a name.
    """
    settings = settings_of(effective)
    stopped = next((run for run in runs if _stopped_with(run) == settings), None)
    newer = runs[: runs.index(stopped)] if stopped is not None else []
    return None if any(_settings_in(effective, run) == settings for run in newer) else stopped


def _settings_in(effective: Effective, run: Path) -> Any:
    """Returns the settings in a run's newest checkpoint, as `settings_of`; None if it cannot be read."""
    return _fields_in(effective, run).get("settings")


def _name_in(effective: Effective, run: Path) -> Any:
    """Returns the run's name in its newest checkpoint; None if it cannot be read."""
    return (_fields_in(effective, run).get("run") or {}).get("name")


def _fields_in(effective: Effective, run: Path) -> dict[str, Any]:
    try:
        return manifest.read(publish.scan(home_of(effective, run))[0]).fields
    except InputError:
        return {}


def _stopped_with(run: Path) -> Any:
    try:
        return json.loads((run / STOPPED).read_bytes())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def mark_stopped(run: Path, effective: Effective, stopped: dict[str, Any]) -> None:
    """Writes stopped.json, by which the same command finds this run; `stopped`: {"step", "checkpoint", "loss"}."""
    text = json.dumps({**stopped, "settings": settings_of(effective)}, indent=2)
    (run / STOPPED).write_text(text + "\n", encoding="utf-8")


def trim_metrics(path: Path, first: int) -> None:
    """Removes records of steps after `first`, which will be run again, and broken lines from metrics.jsonl."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if int(json.loads(line)["step"]) <= first:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    # an atomic replacement: a rank killed here leaves either the old records or the new ones
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    partial.replace(path)
