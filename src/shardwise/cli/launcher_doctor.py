"""Checks of `doctor` under a launcher: hosts, versions, clocks, interfaces, and collectives over the plan's axes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.errors import InputError

SMALL, LARGE = 1, 2**20  # float32 elements
ROUNDS = ((SMALL, 20), (LARGE, 4))  # (elements, how often they are all-reduced)


@dataclass(frozen=True)
class Check:
    """One check of the doctor: `what` was checked, what was `found`, and the `problem` with its cure ("": none)."""

    what: str
    found: str
    problem: str = ""


def launcher_checks(plan: str | None) -> Iterator[Check]:
    """Yields checks that all ranks of a launcher run together, the same on every rank. Collective.

    plan   text of a plan whose axes are measured; None: all ranks form one group
    """
    from shardwise.comm import everybody, gather_json
    from shardwise.ranks import alike, join
    from shardwise.ranks.interfaces import CHOSEN
    from shardwise.ranks.launchers import own_device

    _, world = join()
    device = own_device()
    facts = {**alike.facts_here(), "interface": os.environ.get(CHOSEN, ""), "device": str(device)}
    rows = gather_json(facts, everybody(), device)
    times = gather_json(alike.now(), everybody(), device)
    hosts = [row["host"] for row in rows]
    for host in dict.fromkeys(hosts):
        ranks = [number for number, name in enumerate(hosts) if name == host]
        of = rows[ranks[0]]
        over = f", gloo over {of['interface']}" if of["interface"] else ""
        yield Check("host", f"{host}: {len(ranks)} rank(s) from {ranks[0]} on {of['device']}{over}")
    yield Check("alike", "versions and code of all hosts", _differences(rows))
    yield Check("clocks", f"within {max(times) - min(times):.2f} s", "; ".join(alike.clock_notices(rows, times)))
    yield from _axes(plan, world, hosts, device)


def _differences(rows: list[dict[str, Any]]) -> str:
    """Returns a text on how the hosts differ, "" if they do not; `rows`: `alike.facts_here` of each rank."""
    from shardwise.ranks import alike

    try:
        alike.check_alike(rows)
    except InputError as error:
        return str(error)
    return ""


def _axes(plan: str | None, world: int, hosts: list[str], device: Any) -> Iterator[Check]:
    """Yields a check with latency and rate of an all-reduce over each axis of the plan, or all ranks. Collective.

    world   number of ranks; `hosts`: name of each rank's host

    Raises `InputError` if the plan has another number of ranks.
    """
    from shardwise.layout import Plan
    from shardwise.layout.grid import AXES, Grid
    from shardwise.ranks import alike

    groups = {"all ranks": [list(range(world))]}
    if plan is not None:
        parsed = Plan.parse(plan)
        if parsed.world_size != world:
            raise InputError(f"the launcher started {world} rank(s), and plan {parsed} has {parsed.world_size}")
        grid = Grid(parsed)
        groups = {
            f"axis {axis}": sorted({tuple(grid.group(rank, (axis,))) for rank in range(world)})  # type: ignore[misc]
            for axis, degree in zip(AXES, grid.shape, strict=True)
            if degree > 1
        }
    for what, of_axis in groups.items():
        latency_s, rate = _timed([list(group) for group in of_axis], device)
        hosts_of = max(len({hosts[rank] for rank in group}) for group in of_axis)
        where = "between hosts" if hosts_of > 1 else "inside a host"
        size = len(of_axis[0])
        yield Check(what, f"{size} rank(s), {where}: all-reduce {1e6 * latency_s:.0f} us, {rate / 1e9:.3g} GB/s")
    if plan is not None:
        for notice in alike.axis_notices(Plan.parse(plan), hosts):
            yield Check("ranks on hosts", "not as planned", notice)


def _timed(groups: list[list[int]], device: Any) -> tuple[float, float]:
    """Returns (seconds of a small all-reduce, bytes per second of a large one), of the slowest rank. Collective.

    groups   lists of ranks, one of which has this rank; all groups run at the same time
    """
    import torch
    import torch.distributed as dist

    from shardwise.comm import everybody, gather_json

    made = [dist.new_group(ranks) for ranks in groups]
    mine = next(group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks)
    seconds = []
    for elements, count in ROUNDS:
        tensor = torch.ones(elements, device=device)
        dist.all_reduce(tensor, group=mine)  # warm-up, which opens connections
        value = float(tensor[0])  # waits for the device
        began = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor, group=mine)
        value += float(tensor[0])
        seconds.append((time.perf_counter() - began) / count)
    rows = gather_json(seconds, everybody(), device)
    size = len(groups[0])
    return max(row[0] for row in rows), 2 * (size - 1) / size * 4 * LARGE / max(row[1] for row in rows)
