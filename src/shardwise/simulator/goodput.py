"""Share of time in which a long run makes progress when devices fail (Young-Daly, simulation). Called by cli/foresee.

    lost share of time = C / T + (T / 2 + W + R) / M         T between checkpoints, C a checkpoint's stall, R restart
    the best T is about sqrt(2 C M), and at least W          M = mean time between failures of all devices
                                                             W = until a checkpoint is on the disk

A checkpoint in the background stalls a step while the rank copies what it writes, into a buffer of as many bytes in the
host's memory. The stall that a run measured (`checkpoints` of its summary) may be used instead, in proportion to the
bytes. A run can resume from a checkpoint once it is on the disk, and the next checkpoint waits for that.

Sources: Young 1974; Daly 2006. COPY_BYTES_PER_S: 0.17 to 0.19 s for 516 MB on two virtual cores (docs/checkpoints.md).
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from shardwise.costs.layout import Layout
from shardwise.costs.memory import MemoryLedger
from shardwise.errors import InputError

SIMULATED_FAILURES = 2000  # number of random failures
COPY_BYTES_PER_S = 2.8e9


def saved_bytes(memory: list[MemoryLedger], layout: Layout) -> float:
    """Returns the bytes that a rank writes to a checkpoint: masters and optimizer state, each element by one rank.

    memory  a ledger for each stage, of which the one with the most bytes counts
    """

    def written(ledger: MemoryLedger) -> float:
        sharded = layout.shard_ranks if layout.sharded.state else 1
        masters = ledger.terms.get("master", 0.0) * sharded
        whole = masters or ledger.terms.get("weights", 0.0) * (layout.shard_ranks if layout.sharded.weights else 1)
        return (whole + ledger.terms.get("optimizer", 0.0) * sharded) / layout.gradient_ranks

    return max(map(written, memory))


def stall_of(run: str | Path) -> tuple[float, float]:
    """Returns (seconds that a checkpoint stopped a step, bytes that each rank wrote) from a run folder's summary.

    Raises `InputError` if the summary has no checkpoints.
    """
    path = Path(run) / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        checkpoints = summary["checkpoints"]
        stall, rank_bytes = float(checkpoints["stall_s"]), float(checkpoints["bytes"]) / int(summary["world_size"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"{path} does not tell what a checkpoint cost: give a run that saved twice or more") from error
    if rank_bytes <= 0:
        raise InputError(f"{path} does not tell what a checkpoint cost: its ranks wrote no bytes")
    return stall, rank_bytes


def writing_s(saved: float, writers: int, disk_gbps: float | None) -> float | None:
    """Returns the seconds in which `writers` ranks write `saved` bytes each to one disk; None if its rate is None."""
    return None if disk_gbps is None else saved * writers / (disk_gbps * 1e9)


def goodput(
    step_s: float,
    devices: int,
    device_mtbf_s: float,
    restart_s: float,
    checkpoint_s: float,
    seed: int = 0,
    write_s: float | None = None,
) -> dict[str, Any]:
    """Returns Young-Daly's interval and the share of time that is progress, by formula and by random failures.

    step_s         seconds of a step; `devices`: of the run
    device_mtbf_s  mean seconds between failures of one device
    restart_s      seconds from a failure until the run continues
    checkpoint_s   seconds for which a save stops a step
    write_s        seconds until a save is on the disk, the shortest interval that is proposed; None: unknown

    Keys: mtbf_s (of all devices), checkpoint_every_s, checkpoint_every_steps, checkpoint_s, write_s, bound_by ("disk"
    or "failures": what sets the interval), share_by_formula, share_by_simulation.
    """
    mtbf, written = device_mtbf_s / devices, max(write_s or 0.0, checkpoint_s)
    young = math.sqrt(2 * max(checkpoint_s, 1e-9) * mtbf)
    # a checkpoint cannot begin before the last one is on the disk
    interval = max(step_s, young, written)
    steps = max(1, round(interval / step_s), math.ceil(written / step_s))
    formula = 1.0 / ((1 + checkpoint_s / interval) * (1 + (interval / 2 + written + restart_s) / mtbf))
    drawn = _simulated(interval, checkpoint_s, written, restart_s, mtbf, random.Random(seed))
    return {
        "mtbf_s": mtbf, "checkpoint_every_s": interval, "checkpoint_every_steps": steps, "checkpoint_s": checkpoint_s,
        "write_s": write_s, "bound_by": "disk" if written > max(step_s, young) else "failures",
        "share_by_formula": formula, "share_by_simulation": drawn,
    }  # fmt: skip


def _simulated(interval: float, stall: float, written: float, restart: float, mtbf: float, rng: random.Random) -> float:
    """Returns the share of time that is progress under exponentially distributed failures; arguments in seconds.

    Work after the last checkpoint that had reached the disk is lost at a failure.
    """
    progress = total = 0.0
    for _ in range(SIMULATED_FAILURES):
        until = rng.expovariate(1 / mtbf)
        # intervals whose checkpoint had reached the disk before the failure
        whole = max(0, math.floor((until - written + stall) / (interval + stall)))
        progress += whole * interval
        total += until + restart
    return progress / total


def lines(result: dict[str, Any]) -> list[str]:
    """Returns the result of `goodput` as lines of text."""
    why = "Young-Daly" if result["bound_by"] == "failures" else "as long as the disk takes to write one"
    write = result["write_s"]
    disk = (
        "how long the disk takes is not known of this cluster (disk_gbps), and not counted"
        if write is None
        else f"it is on the disk {write:.3g} s later"
    )
    return [
        f"a failure every {result['mtbf_s'] / 3600:.2f} hours; a checkpoint every {result['checkpoint_every_s']:.0f} s "
        f"({result['checkpoint_every_steps']} steps, {why}), which stops a step for {result['checkpoint_s']:.2g} s; "
        f"{disk}",
        f"  progress {result['share_by_formula']:.1%} of the time by formula, {result['share_by_simulation']:.1%} by "
        f"{SIMULATED_FAILURES} drawn failures",
    ]
