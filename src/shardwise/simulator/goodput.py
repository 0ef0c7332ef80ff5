"""How much of the time a long run makes progress when devices fail: Young-Daly, and by simulation.

    loss of a share of time = C / T + (T / 2 + R) / M        T between checkpoints, C a checkpoint's stall, R restart
    the best T is about sqrt(2 C M)                          M = mean time between failures of all devices

Sources: Young 1974; Daly 2006.
"""

from __future__ import annotations

import math
import random
from typing import Any

SIMULATED_FAILURES = 2000


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
        "share_by_formula": formula, "share_by_simulation": drawn,
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
        f"({found['checkpoint_every_steps']} steps, Young-Daly)",
        f"  progress {found['share_by_formula']:.1%} of the time by formula, {found['share_by_simulation']:.1%} by "
        f"{SIMULATED_FAILURES} drawn failures",
    ]
