"""Learning-rate schedules: functions of the step (from 0) that return a factor on the learning rate.

    factor
      1 |      ________          warm-up: (step + 1) / (warmup + 1), so that step `warmup` has factor 1
        |     /        \\         constant, or a fall towards `final`, which step `total` would have
        |    /          \\        wsd: constant, then a linear fall in the last `decay` steps
        +-------------------- step

cosine: Loshchilov and Hutter 2017 (SGDR), equation 5, one period. wsd: warm-up, stable, decay (Hu et al. 2024,
MiniCPM, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwise.config.schema import ScheduleSection
from shardwise.errors import InputError

Schedule = Callable[[int], float]


def warmed_up(step: int, warmup: int) -> float:
    """Returns the factor of the warm-up at `step`: rising linearly before step `warmup`, 1 from there on."""
    return min(1.0, (step + 1) / (warmup + 1))


def constant(step: int, warmup: int = 0) -> float:
    """Returns the factor at `step`: `warmup` steps of warm-up, then 1."""
    return warmed_up(step, warmup)


def cosine(step: int, total: int, warmup: int = 0, final: float = 0.0) -> float:
    """Returns the factor at `step`: `warmup` steps of warm-up, then half a cosine from 1 towards `final` at `total`."""
    done = _progress(step - warmup, total - warmup)
    return warmed_up(step, warmup) * (final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)


def linear(step: int, total: int, warmup: int = 0, final: float = 0.0) -> float:
    """Returns the factor at `step`: `warmup` steps of warm-up, then a line from 1 towards `final` at `total`."""
    done = _progress(step - warmup, total - warmup)
    return warmed_up(step, warmup) * (1 - (1 - final) * done)


def wsd(step: int, total: int, decay: int, warmup: int = 0, final: float = 0.0) -> float:
    """Returns the factor at `step`: `warmup` steps of warm-up, then 1, then a line to `final` in the last `decay`."""
    done = _progress(step - (total - decay) + 1, decay + 1)
    return warmed_up(step, warmup) * (1 - (1 - final) * done)


def _progress(step: int, length: int) -> float:
    """Returns `step` / `length` limited to [0, 1]; for a `length` of 0, 1 from step 1 on."""
    return min(1.0, max(0.0, step / length)) if length > 0 else float(step > 0)


def make_schedule(section: ScheduleSection, total: int) -> Schedule:
    """Returns the schedule (step -> factor) of a `[schedule]` section; `InputError` if `total` steps are too few."""
    warmup, final = section.warmup_steps, section.final_factor
    # the learning rate would never be reached
    if warmup >= total:
        raise InputError(
            f"schedule.warmup_steps = {warmup} does not end within the run's {total} steps: lower it, or train longer"
        )
    if section.name == "constant":
        return lambda step: constant(step, warmup)
    if section.name == "cosine":
        return lambda step: cosine(step, total, warmup, final)
    if section.name == "linear":
        return lambda step: linear(step, total, warmup, final)
    # wsd: the decay's length is given in steps or as a fraction of the run
    decay = section.decay_steps or max(1, round(section.decay_fraction * total))
    if warmup + decay > total:
        raise InputError(
            f"the schedule's warm-up ({warmup} steps) and decay ({decay} steps) do not fit into {total} steps: "
            "lower schedule.warmup_steps, decay_steps or decay_fraction"
        )
    return lambda step: wsd(step, total, decay, warmup, final)


def scaled_lr(lr: float, batch: int, base_batch: int, rule: str) -> float:
    """Returns the learning rate for `batch` if `lr` was chosen for `base_batch`, both in the same unit.

    rule   "none", "linear" or "sqrt"

    linear: Goyal et al. 2017, section 2.1 (for SGD). sqrt: Malladi et al. 2022, definition 5.3 (for Adam, of
    which this is the learning rate's part).
    """
    if rule == "none":
        return lr
    ratio = batch / base_batch
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))
