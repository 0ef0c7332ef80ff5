"""Writes the Markdown page and the JSON of the command `evidence`."""

from __future__ import annotations

import hashlib
import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise.device import describe, library_versions

NAMES = {True: "yes", False: "**no**", None: "not tried"}


def about(backend: str, ranks: int) -> dict[str, Any]:
    """Returns facts on the machine by name: date, devices, versions, backend, ranks, digest of the code."""
    return {
        "date": date.today().isoformat(), "machine": describe(), "system": platform.platform(),
        "python": platform.python_version(), "torch": torch.__version__, **library_versions(),
        "backend": backend, "ranks": ranks, "shardwise": shardwise.__version__, "code": code_digest(),
    }  # fmt: skip


def code_digest() -> str:
    """Returns the first 16 hex digits of a SHA-256 of all source files of the package."""
    root, found = Path(shardwise.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def page(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Returns the Markdown page; `facts`: as `about` returns them, `rows`: as `machine_evidence.collect` does."""
    tried = [row for row in rows if row["held"] is not None]
    held = sum(row["held"] for row in tried)
    over = f"{facts['ranks']} ranks over {facts['backend']}"
    tally = f"{held} of {len(tried)} held; {len(rows) - len(tried)} not tried. Written by `shardwise evidence`."
    lines = [f"# Evidence: {facts['machine']}, {over}", "", tally, ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items() if value is not None), ""]
    lines += ["| part | what | held | outcome | s |", "|---|---|---|---|---|"]
    for row in rows:
        what = row["what"].replace("|", "/")
        lines.append(f"| {row['part']} | {row['name']} | {NAMES[row['held']]} | {what} | {row['seconds']:.0f} |")
    for row in rows:
        if row["figures"] and row["part"] != "proofs":
            lines += ["", f"## {row['part']}: {row['name']}", "", "| | |", "|---|---|"]
            lines += [f"| {name} | {value:.4g} |" for name, value in row["figures"].items()]
    return "\n".join(lines) + "\n"


def write(folder: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[Path, Path]:
    """Writes the page and the JSON into `folder`; returns their paths. The names have date, ranks and backend."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{facts['date']}-{facts['ranks']}-ranks-{facts['backend']}"
    paths = folder / f"{name}.md", folder / f"{name}.json"
    paths[0].write_text(page(facts, rows), encoding="utf-8")
    paths[1].write_text(json.dumps({"about": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return paths
