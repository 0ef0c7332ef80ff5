"""`read_run`: reads the files of a run's folder for a report, also of a run that has not ended."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import InputError
from shardwise.layout import Plan


@dataclass
class RunFiles:
    """The content of one run folder; a file that is missing leaves its field empty.

    name       of the folder
    plan       the plan of a run that has not ended; else None, since `summary` has it
    steps      the record of each optimizer step, from metrics.jsonl
    held_out   the record of each evaluation, from metrics.jsonl
    summary    summary.json; {} if the run has not ended
    versions   {"shardwise", "torch", "python", "device", ...: text}
    settings   {key of the configuration: (value as TOML, its source)}
    wire       collectives of one step, each a dict with op, tag, calls, bytes
    profile    {"ranks": [{kind: milliseconds of a step} of each rank]}; {} if it was not profiled
    """

    name: str
    plan: Plan | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    wire: list[dict[str, Any]] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """Returns the name of the run's task, or "" if no file has it."""
        return str(self.summary.get("task") or self.settings.get("task.name", ('""', ""))[0].strip('"'))

    @property
    def unit(self) -> str:
        """Returns the unit of the run's speed: "tokens" if its steps count tokens, else "samples"."""
        return "tokens" if self.steps and "tokens_per_s" in self.steps[0] else "samples"

    def column(self, name: str, of_steps: bool = True) -> list[tuple[float, float]]:
        """Returns (step, value) of each record with a number under `name`; `of_steps`: of steps, not evaluations."""
        rows = self.steps if of_steps else self.held_out
        return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]


def read_run(folder: Path) -> RunFiles:
    """Returns the files of a run folder; raises `InputError` if it is none, has no step yet, or a file is damaged."""
    if not folder.is_dir():
        is_file = f"{folder} is a file; give the run's folder"
        raise InputError(f"report: {is_file if folder.exists() else f'there is no folder {folder}'}")
    if (folder / "error.log").is_file() and not (folder / "metrics.jsonl").is_file():
        raise InputError(f"report: {folder} failed before its first step: its error.log says why")
    if not (folder / "metrics.jsonl").is_file():
        raise InputError(f"report: {folder} is no run: it has no metrics.jsonl; give a folder below runs/")
    run = RunFiles(folder.resolve().name)
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that is under way, or was killed
        if not isinstance(record, dict):
            continue
        (run.held_out if "eval_loss" in record else run.steps).append(record)
    if not run.steps:
        raise InputError(f"report: {folder} has no step yet")
    run.summary, run.versions = _json(folder / "summary.json"), _json(folder / "versions.json")
    run.wire = _json(folder / "ledger.json").get("collectives", [])
    run.profile = _json(folder / "profile" / "table.json")
    if "plan" not in run.summary and (folder / "plan.toml").is_file():  # a run that has not ended writes no summary
        run.plan = Plan.from_toml(folder / "plan.toml")
    if (folder / "config.toml").is_file():
        run.settings = settings((folder / "config.toml").read_text(encoding="utf-8", errors="replace"))
    return run


def _json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} if there is no file, `InputError` if it is no JSON."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise InputError(f"report: {path} is damaged ({error}): remove it, and the report is made without it") from None
    return found if isinstance(found, dict) else {}


def settings(text: str) -> dict[str, tuple[str, str]]:
    """Returns {key: (value, source)} of a configuration's text, whose lines read `key = value  # source`."""
    values, table = {}, ""
    for line in text.splitlines():
        if head := re.fullmatch(r"\[([\w.]+)\]\s*(#.*)?", line.strip()):
            table = f"{head[1]}."
        elif pair := re.fullmatch(r"([\w.]+) = (.*?)(?:\s+# (.*))?", line.strip()):
            values[table + pair[1]] = (pair[2], pair[3] or "default")
    return values
