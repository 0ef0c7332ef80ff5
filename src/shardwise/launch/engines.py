"""`LaunchEngine`: how one engine takes a job; `ENGINES` by name. A new one: a module, a row here, cli/launch (`--on`).

render   {file name: text} of a job, without the engine
client   the command that submits a rendered file, and how
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import InputError, RunError, did_you_mean
from shardwise.launch.launch_job import SECRET, LaunchJob

ENGINES = {"slurm": "slurm", "pbs": "pbs", "ray": "ray", "k8s": "kubernetes", "sky": "sky", "torchrun": "torchrun",
           "hosts": "hosts"}  # fmt: skip
SHORTEST = 6  # characters of a secret's value that is looked for in what is written
SUBMIT_S = 600.0


@dataclass(frozen=True)
class LaunchEngine:
    """An engine that runs jobs (Slurm, Kubernetes, ...): how its files and its client's command lines are made.

    render      a job's files, by name, the one that is submitted first
    submit      (job, first file) -> words of the client that submits it
    takes       fields of a job that it needs or uses, beside those that all do; others are refused where they are given
    needs       the same, of which it needs a value: (field, what to do)
    status, follow, stop   the client's words, with {name}: where a job stands, what its ranks say, and to end it
    waits       whether the client ends with the job, so that its output is shown and its exit code is the job's
    """

    name: str
    render: Callable[[LaunchJob], dict[str, str]]
    submit: Callable[[LaunchJob, str], list[str]]
    takes: tuple[str, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    status: str = ""
    follow: str = ""
    stop: str = ""
    waits: bool = False
    remarks: Callable[[LaunchJob], list[str]] = lambda job: []


OPTIONAL = ("minutes", "queue", "account", "image", "hosts", "extra", "volume", "accelerator")
_OPTION = {"minutes": "--time", "queue": "--partition", "hosts": "--host"}


def engine(name: str) -> LaunchEngine:
    """Returns the engine of this name; `InputError` with the nearest for another."""
    if name not in ENGINES:
        raise InputError(f"--on {name!r} is not one of {', '.join(ENGINES)}{did_you_mean(name, ENGINES)}")
    made: LaunchEngine = importlib.import_module(f"shardwise.launch.{ENGINES[name]}").ENGINE
    return made


def files_of(chosen: LaunchEngine, job: LaunchJob) -> dict[str, str]:
    """Returns the job's files by name; `InputError` for what the engine cannot take, or a secret in a text."""
    # a field of an engine that does not take it would be dropped silently
    for field in OPTIONAL:
        if getattr(job, field) and field not in chosen.takes:
            takers = ", ".join(name for name in ENGINES if field in engine(name).takes)
            raise InputError(f"{option(field)} is not for {chosen.name}: it is for {takers}")
    # what an engine cannot find out by itself
    for field, remedy in chosen.needs:
        if not getattr(job, field):
            raise InputError(f"{chosen.name} needs {option(field)}: {remedy}")
    files = chosen.render(job)
    _refuse_secrets(files)
    return files


def option(field: str) -> str:
    """Returns the option of the command line that sets a job's field."""
    return _OPTION.get(field, f"--{field}")


def _refuse_secrets(files: dict[str, str]) -> None:
    """Raise `InputError` where the value of a variable that may be secret stands in a text."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SHORTEST and any(value in text for text in files.values()):
            raise InputError(
                f"the value of {name} would be written into a file, and its name tells of a secret: leave it out of "
                f"the words, and hand the variable on by its name, --env {name}"
            )


def write(files: dict[str, str], folder: Path) -> list[Path]:
    """Write the files into a folder; returns their paths, the one to submit first; `InputError` where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, text in files.items():
            path = folder / name
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if text.startswith("#!") else 0o644)
            paths.append(path)
        return paths
    except OSError as error:
        raise InputError(f"cannot write the job's files into {folder}: {error.strerror}") from None


def submit(chosen: LaunchEngine, job: LaunchJob, path: Path) -> tuple[int, str]:
    """Hand a job to the engine by its own client; returns (exit code, what the client said).

    Raises `InputError` where the client is not installed, `RunError` with its own words where it refuses the job.
    """
    words = chosen.submit(job, str(path))
    if shutil.which(words[0]) is None:
        raise InputError(
            f"{chosen.name}: {words[0]} is not installed here, and it is what takes the job: the files are in "
            f"{path.parent}; submit them where it is, by: {' '.join(words)}"
        )
    # this client stays with the job and writes to the terminal itself: no limit of time, and nothing to pass on
    if chosen.waits:
        return subprocess.run(words, check=False).returncode, ""
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=SUBMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"{chosen.name}: {' '.join(words)} said nothing in {SUBMIT_S:g} s: is it reachable?") from None
    if ran.returncode:
        raise RunError(f"{chosen.name} did not take the job ({' '.join(words)}): {_reason(ran.stderr or ran.stdout)}")
    return 0, ran.stdout.strip()


def ask(chosen: LaunchEngine, what: str, name: str) -> int:
    """Run the client's words for `what` ("status", "follow", "stop") of a job; returns its exit code, 0 after ctrl-C.

    Raises `InputError` where the client has no such words, or is not installed here.
    """
    text: str = getattr(chosen, what)
    if not text:
        where = "its client stays with the job, and shows it" if chosen.waits else f"use {chosen.status}"
        raise InputError(f"{chosen.name} has no client for --{what}: {where}")
    words = shlex.split(text.format(name=name))
    if shutil.which(words[0]) is None:
        raise InputError(f"{chosen.name}: {words[0]} is not installed here: run it where it is: {shlex.join(words)}")
    try:
        return subprocess.run(words, check=False).returncode
    except KeyboardInterrupt:  # the job goes on
        return 0


def _reason(said: str) -> str:
    """Returns the reason in a client's refusal, on one line."""
    lines: Sequence[str] = [line.strip() for line in said.splitlines() if line.strip()]
    return "; ".join(lines[-3:]) or "it gave no reason"
