"""`LaunchEngine`: how an engine's files and command lines are made; `ENGINES`: the module of each engine.

A new engine needs a module with `ENGINE`, an entry in `ENGINES`, and its name in the help of cli/launch (`--on`).
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
SHORTEST = 6  # shorter values of secret variables are not looked for in files, since they may occur by chance
SUBMIT_S = 600.0  # seconds that a client may take to submit a job


@dataclass(frozen=True)
class LaunchEngine:
    """An engine that runs jobs (Slurm, Kubernetes, ...): how its files and its client's command lines are made.

    render      job -> {file name: text}, the file to submit first
    submit      (job, path of the first file) -> words of the command that submits it
    takes       fields among `OPTIONAL` that it uses; others are refused if they are given
    needs       (field that must be given, advice for the message if it is not)
    status, follow, stop   commands, with {name} for the job's name: its state, its ranks' output, its end; "": none
    waits       Whether the submitting client ends with the job, so that its output is shown and its exit code counts
    remarks     job -> lines for the user
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
    """Returns the engine of this name, one of `ENGINES`; `InputError` that suggests the nearest for any other."""
    if name not in ENGINES:
        raise InputError(f"--on {name!r} is not one of {', '.join(ENGINES)}{did_you_mean(name, ENGINES)}")
    made: LaunchEngine = importlib.import_module(f"shardwise.launch.{ENGINES[name]}").ENGINE
    return made


def files_of(chosen: LaunchEngine, job: LaunchJob) -> dict[str, str]:
    """Returns {file name: text} of a job; `InputError` for fields that the engine refuses or lacks, or secrets."""
    # a field that the engine does not use would be dropped silently
    for field in OPTIONAL:
        if getattr(job, field) and field not in chosen.takes:
            takers = ", ".join(name for name in ENGINES if field in engine(name).takes)
            raise InputError(f"{option(field)} is not for {chosen.name}: it is for {takers}")
    for field, remedy in chosen.needs:
        if not getattr(job, field):
            raise InputError(f"{chosen.name} needs {option(field)}: {remedy}")
    files = chosen.render(job)
    _refuse_secrets(files)
    return files


def option(field: str) -> str:
    """Returns the command-line option, such as "--time", that sets a field of `LaunchJob`."""
    return _OPTION.get(field, f"--{field}")


def _refuse_secrets(files: dict[str, str]) -> None:
    """Raises `InputError` if a text contains the value of an environment variable whose name looks like a secret's."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SHORTEST and any(value in text for text in files.values()):
            raise InputError(
                f"the value of {name} would be written into a file, and its name tells of a secret: leave it out of "
                f"the words, and hand the variable on by its name, --env {name}"
            )


def write(files: dict[str, str], folder: Path) -> list[Path]:
    """Writes files (name -> text) into a folder; returns their paths in order; `InputError` if that fails."""
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
    """Submits a job with the engine's client; returns (exit code, the client's output).

    path   of the file to submit

    Raises `InputError` if the client is not installed, `RunError` with its output if it refuses the job.
    """
    words = chosen.submit(job, str(path))
    if shutil.which(words[0]) is None:
        raise InputError(
            f"{chosen.name}: {words[0]} is not installed here, and it is what takes the job: the files are in "
            f"{path.parent}; submit them where it is, by: {' '.join(words)}"
        )
    # this client runs until the job ends and writes to the terminal itself, so it has no time limit
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
    """Runs the client's command for `what` ("status", "follow" or "stop") on the job `name`; returns its exit code.

    After Ctrl-C, which ends the client and not the job, it is 0. Raises `InputError` if there is no such command, or
    the client is not installed.
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
    """Returns the last three lines of a client's output as one, the reason of a refusal."""
    lines: Sequence[str] = [line.strip() for line in said.splitlines() if line.strip()]
    return "; ".join(lines[-3:]) or "it gave no reason"
