"""Tables of modules under plans: what a proof says of one cell, rows with numbered reasons, and a table read again."""

from __future__ import annotations

import re
from typing import Any

from shardwise.errors import RunError
from shardwise.proof.parity import verify
from shardwise.ranks import RankPool

BRANCHES = "a branch differs between ranks"  # seen in the first step, before anything is updated
Found = dict[tuple[str, str], tuple[str, str]]  # (module, plan) -> what stands in the cell, and why


_PLACE = re.compile(r"\(/[^()]*/([^/()]+\.py:\d+)\)")  # a line of code, whose folder is another one elsewhere


def cell(target: Any, plan: str, pool: RankPool, timeout_s: float = 300, steps: int = 2) -> tuple[str, str]:
    """(what stands in the cell, the reason where it is not "equal") of one module under one plan."""
    try:
        parity = verify(target, plan, pool=pool, timeout_s=timeout_s, steps=steps)
    except RunError as error:
        first = str(error).splitlines()[0]
        return ("refused", first) if first.startswith(BRANCHES) else ("FAILS", f"RunError: {first}")
    except Exception as error:
        return "FAILS", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if parity.refused:
        return "refused", _PLACE.sub(r"(\1)", " ".join(parity.refused.split()))
    return ("equal", "") if parity.parity else ("WRONG", " ".join(parity.text().split()))


def share(found: Found, names: list[str], plans: list[str]) -> str:
    """How many cells are equal, as `94 of 98`."""
    cells = [found[name, plan][0] for name in names for plan in plans if (name, plan) in found]
    return f"{cells.count('equal')} of {len(cells)}"


def rows(found: Found, names: list[str], plans: list[str], empty: str = "not tried") -> tuple[list[str], list[str]]:
    """(lines of a Markdown table, the reasons to which its cells point), each reason numbered once."""
    numbers: dict[str, int] = {}
    lines = ["| module | " + " | ".join(f"`{plan}`" for plan in plans) + " |", "|---|" + "---|" * len(plans)]
    for name in names:
        cells = []
        for plan in plans:
            what, why = found.get((name, plan), (empty, ""))
            number = numbers.setdefault(why, len(numbers) + 1) if why else 0
            cells.append(what if not why else f"{what} ({number})")
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return lines, [f"{number}. {why}" for why, number in numbers.items()]


def written(table: str) -> Found:
    """The cells of a table that `rows` made, with their reasons."""
    every = table.splitlines()
    reasons = dict(line.split(". ", 1) for line in every if line.partition(". ")[0].isdigit())
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in every if line.startswith("| ")]
    head = next((place for place, line in enumerate(lines) if line[0] == "module"), len(lines))
    plans = [cell.strip("`") for cell in lines[head][1:]] if lines[head:] else []
    found = {}
    for name, *cells in lines[head + 1 :]:
        for plan, cell in zip(plans, cells, strict=True):
            what, _, number = cell.partition(" (")
            found[name.replace(" ", "_"), plan] = what, reasons.get(number.rstrip(")"), "")
    return found
