"""Receipts of proofs: writes what was proven of a script beside it, and makes the line that `prepare` prints of it.

    .shardwise/proofs.json     script's name -> kind of plan -> plan, ranks, steps, verdict, versions, date, and digests
                               of the script and of the modules under its folder that it imports

A proof on two ranks counts for larger degrees of the same axes: what a plan does differs by axis, not by degree.

What this does not do: note what the script reads (data, arguments, the environment).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.layout import Plan
from shardwise.layout.plan import DEGREES
from shardwise.proof.outcome import Parity

FOLDER, FILE = ".shardwise", "proofs.json"


def files_of(script: str) -> dict[str, str]:
    """Returns {path: digest} of a script and of imported modules in its folder, paths relative to that folder."""
    script = os.path.realpath(script)
    home, prefix = (os.path.join(os.path.realpath(folder), "") for folder in (os.path.dirname(script), sys.prefix))

    @cache  # thousands of modules lie in some hundred folders
    def own(folder: str) -> str | None:
        place = os.path.join(os.path.realpath(folder), "")
        # the environment may lie below the script's folder: its packages are no part of the proof
        return place if place.startswith(home) and not place.startswith(prefix) else None

    proofs = {script}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py"):
            folder, file = os.path.split(os.path.realpath(name) if os.path.islink(name) else name)
            # modules below the script's folder, by whatever name they were imported
            if place := own(folder):
                proofs.add(place + file)
    return {path.removeprefix(home): digest_of(Path(path)) for path in sorted(proofs)}


def digest_of(path: Path) -> str:
    """Returns the first 16 hex digits of a file's SHA-256, "" if it is gone."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def write(script: str, plan: Plan, parity: Parity, steps: int, files: dict[str, str]) -> None:
    """Writes a proof into the file beside the script; does nothing if that folder cannot be written.

    steps  optimizer steps compared;  files  as `files_of` gives them
    """
    import torch

    import shardwise

    path = Path(script).resolve().parent / FOLDER / FILE
    notes = _read(path)
    versions = {"shardwise": shardwise.__version__, "torch": torch.__version__, "python": platform.python_version()}
    notes.setdefault(Path(script).name, {})[kind_of(plan)] = {
        "plan": str(plan), "ranks": plan.world_size, "steps": steps, "verdict": parity.verdict, "files": files,
        "date": time.strftime("%Y-%m-%d"), "versions": versions,
    }  # fmt: skip
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(notes, indent=1, sort_keys=True), encoding="utf-8")
        draft.replace(path)


def line_of(script: str, plan: Plan) -> str:
    """Returns one line on whether a script was proven under a plan: when and how far, or the command that proves it."""
    home = Path(script).resolve().parent
    verdict = _read(home / FOLDER / FILE).get(Path(script).name, {}).get(kind_of(plan))
    again = f"shardwise verify {Path(script).name} --plan {plan}"
    if verdict is None:
        return f"not proven: {again}"
    if any(digest_of(home / name) != digest for name, digest in verdict["files"].items()):
        return f"changed since it was proven ({verdict['date']}): {again}"
    if not verdict["verdict"].startswith("EQUAL"):
        return f"{verdict['verdict']} when it was proven ({verdict['date']}): {again}"
    where = "this plan" if verdict["plan"] == str(plan) else f"{verdict['plan']}, which counts for {plan}"
    return f"proven equal under {where} ({verdict['steps']} steps, {verdict['ranks']} ranks, {verdict['date']})"


def kind_of(plan: Plan) -> str:
    """Returns a text that is equal for plans that differ only in degrees above 1 and in precision."""
    plain = plan.exact(Plan().precision)
    degrees = {name: getattr(plain, name) for name in DEGREES}
    return str(plain.with_(**{name: 2 for name, degree in degrees.items() if isinstance(degree, int) and degree > 1}))


def script_under_way() -> str | None:
    """Returns the path of this process's main program, a Python file; None if it is an installed one, or no file."""
    name = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(name, str) or not name.endswith(".py"):
        return None
    path = Path(name).resolve()
    return None if path.is_relative_to(Path(sys.prefix).resolve()) or not path.is_file() else str(path)


def _read(path: Path) -> dict[str, Any]:
    """Returns the object in a receipt file; {} if there is none."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
