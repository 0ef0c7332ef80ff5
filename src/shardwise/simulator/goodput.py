"""How much of the time a long run makes progress when devices fail: Young-Daly, and by simulation.

    loss of a share of time = C / T + (T / 2 + R) / M        T between checkpoints, C a checkpoint's stall, R restart
    the best T is about sqrt(2 C M)                          M = mean time between failures of all devices

A checkpoint in the background stalls a step for the copy of what the rank writes, and its buffer takes as much memory
of the host. What a run measured (`checkpoints` of its summary) may be given instead.

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

SIMULATED_FAILURES = 2000
COPY_BYTES_PER_S = 2.8e9


def saved_bytes(memory: list[MemoryLedger], layout: Layout) -> float:
    """Bytes that a rank of the fullest stage writes: masters and optimizer state, each element once over all ranks."""

    def written(ledger: MemoryLedger) -> float:
        sharded = layout.shard_ranks if layout.zero >= 1 else 1
        masters = ledger.terms.get("master", 0.0) * sharded
        whole = masters or ledger.terms.get("weights", 0.0) * (layout.shard_ranks if layout.zero >= 3 else 1)
        return (whole + ledger.terms.get("optimizer", 0.0) * sharded) / layout.gradient_ranks

    return max(map(written, memory))


def stall_of(run: str | Path) -> tuple[float, float]:
    """(seconds that a checkpoint stopped a step of a run, bytes that all its ranks wrote), from its summary.

    Raises `InputError` where it says nothing of them.
    """
    path = Path(run) / "summary.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["checkpoints"]
        return float(told["stall_s"]), float(told["bytes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not tell what a checkpoint cost: give a run that saved twice or more") from error


def goodput(
    step_s: float, devices: int, device_mtbf_s: float, restart_s: float, checkpoint_s: float, seed: int = 0
) -> dict[str, Any]:
    """Young-Daly's interval and the share of time that is progress, by formula and by drawing failures."""
    mtbf = device_mtbf_s / devices
    interval = max(step_s, math.sqrt(2 * max(checkpoint_s, 1e-9) * mtbf))
    formula = 1.0 / ((1 + checkpoint_s / interval) * (1 + (interval / 2 + checkpoint_s + restart_s) / mtbf))
    drawn = _simulated(interval, checkpoint_s, restart_s, mtbf, random.Random(seed))
    return {
        "mtbf_s": mtbf, "checkpoint_every_s": interval, "checkpoint_every_steps": max(1, round(interval / step_s)),
        "checkpoint_s": checkpoint_s, "share_by_formula": formula, "share_by_simulation": drawn,
    }  # fmt: skip


def _simulated(interval: float, stall: float, restart: float, mtbf: float, rng: random.Random) -> float:
    """Progress over time for failures drawn from an exponential distribution."""
    progress = total = 0.0
    for _ in range(SIMULATED_FAILURES):
        until = rng.expovariate(1 / mtbf)
        whole = math.floor(until / (interval + stall))
        progress += whole * interval
        total += until + restart
    return progress / total


def lines(found: dict[str, Any]) -> list[str]:
    """For a reader."""
    return [
        f"a failure every {found['mtbf_s'] / 3600:.2f} hours; a checkpoint every {found['checkpoint_every_s']:.0f} s "
        f"({found['checkpoint_every_steps']} steps, Young-Daly), which stops a step for {found['checkpoint_s']:.2g} s",
        f"  progress {found['share_by_formula']:.1%} of the time by formula, {found['share_by_simulation']:.1%} by "
        f"{SIMULATED_FAILURES} drawn failures",
    ]
