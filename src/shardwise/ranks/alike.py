"""Compares versions, code and clocks of hosts before the first step, and placement of ranks with a plan's layout.

    each rank    host, versions, digests of code, clock, and what its caller adds (plan, settings, data)
    all ranks    gather all of these and judge alike: `InputError` that names hosts that differ, else notices

Bytes: a few hundred for each rank, once.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.layout.grid import AXES, Grid

COMPARED = ("torch", "numpy", "safetensors")
CLOCK_S = 5.0  # seconds by which hosts' clocks may differ without a notice
MOST = 8  # differences that a message lists


def facts_here(more: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns {"host": this host's name, "alike": {name of a fact: text that must be equal on all hosts}}.

    more   further facts of the caller; None: none
    """
    alike = {"python": platform.python_version()}
    for name in COMPARED:
        try:
            alike[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    alike["shardwise"] = own_code()
    for name, path in _own_modules():
        alike[f"the code of {name}"] = _digest(path)
    return {"host": socket.gethostname(), "alike": alike | dict(more or {})}


@cache
def own_code() -> str:
    """Returns 16 hex digits that identify this package's source files."""
    root = Path(__file__).parents[1]
    together = hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        together.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return together.hexdigest()


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _own_modules() -> list[tuple[str, Path]]:
    """Returns (path relative to the working folder, path) of each imported .py module below that folder, sorted."""
    here, installed = Path.cwd(), [Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib", "stdlib")]
    # a virtual environment below the working folder is not the user's code
    installed += [Path(sys.prefix), Path(__file__).parents[1]]
    rows = set()
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/")
        own = path.is_relative_to(here) and not any(path.is_relative_to(folder) for folder in installed)
        # a compiled or zipped module has no source to compare
        if own and path.suffix == ".py" and path.is_file():
            rows.add((str(path.relative_to(here)), path))
    return sorted(rows)


def check_alike(rows: Sequence[dict[str, Any]]) -> None:
    """Raises `InputError` that names each fact that differs between ranks; `rows`: `facts_here` of each rank."""
    differing = []
    for name in dict.fromkeys(name for row in rows for name in row["alike"]):
        values: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            # a fact that a rank lacks (a module that it did not import) counts as a difference
            values.setdefault(row["alike"].get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            differing.append(
                f"{name}: " + ", ".join(f"{value} on {_where(ranks, rows)}" for value, ranks in values.items())
            )
    if differing:
        more = f"; and {len(differing) - MOST} more" if len(differing) > MOST else ""
        raise InputError(
            f"the ranks' hosts differ, so they would not compute alike: {'; '.join(differing[:MOST])}{more}. Give all "
            "hosts the same environment, code and files"
        )


def _where(ranks: Sequence[int], rows: Sequence[dict[str, Any]]) -> str:
    hosts = list(dict.fromkeys(rows[rank]["host"] for rank in ranks))
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks from {ranks[0]}"
    return f"{', '.join(hosts[:3])}{', ...' if len(hosts) > 3 else ''} ({of})"


def clock_notices(rows: Sequence[dict[str, Any]], times: Sequence[float]) -> list[str]:
    """Returns [a notice] if two hosts' clocks differ by more than `CLOCK_S`, else [].

    rows    `facts_here` of each rank
    times   each rank's clock in seconds since the epoch, read right after a barrier
    """
    first, last = times.index(min(times)), times.index(max(times))
    apart = times[last] - times[first]
    if apart <= CLOCK_S or rows[first]["host"] == rows[last]["host"]:
        return []
    return [
        f"the clock of {rows[first]['host']} is {apart:.0f} s behind that of {rows[last]['host']}: times in logs will "
        "not agree"
    ]


def axis_notices(plan: Plan, hosts: Sequence[str], rates: Mapping[str, tuple[float, float]] | None = None) -> list[str]:
    """Returns a notice for each axis whose groups span more hosts than if ranks were started host by host.

    hosts   name of each rank's host, in rank order
    rates   axis -> (GB/s inside a host, GB/s between hosts); None: unknown, and the notice tells no slowdown
    """
    count = len(dict.fromkeys(hosts))
    # one host, or hosts with unequal numbers of ranks: there is no better order to compare with
    if count == 1 or len(hosts) % count:
        return []
    grid, per_host, notices = Grid(plan), len(hosts) // count, []
    for axis, degree in zip(AXES, grid.shape, strict=True):
        if degree == 1:
            continue
        groups = {tuple(grid.group(rank, (axis,))) for rank in range(len(hosts))}
        # the group that spans the most hosts counts, since the others wait for it
        is_on = max(len({hosts[rank] for rank in group}) for group in groups)
        planned = max(len({rank // per_host for rank in group}) for group in groups)
        if is_on > planned:
            notices.append(
                f"{axis}: ranks of a group lie on {is_on} hosts, and would on {planned} if ranks of a host followed "
                f"each other{_cost((rates or {}).get(axis))}: start the ranks host by host "
                "(srun --distribution=block, mpirun --map-by slot)"
            )
    return notices


def _cost(rates: tuple[float, float] | None) -> str:
    if rates is None:
        return ", so that its messages go over the link between hosts"
    inside, between = rates
    return f"; at {between:.3g} GB/s instead of {inside:.3g} its messages take {inside / between:.1f} times as long"


def in_host_order(hosts: Sequence[str]) -> list[int]:
    """Returns, for each rank, its new rank if ranks are numbered host by host (hosts in order of their first rank)."""
    order = list(dict.fromkeys(hosts))
    sorted_ranks = sorted(range(len(hosts)), key=lambda rank: (order.index(hosts[rank]), rank))
    numbers = [0] * len(hosts)
    for number, rank in enumerate(sorted_ranks):
        numbers[rank] = number
    return numbers


def now() -> float:
    """Returns this host's clock, in seconds since the epoch."""
    return time.time()
