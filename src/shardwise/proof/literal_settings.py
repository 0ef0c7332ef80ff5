"""What a configuration comes to, written again: steps of its epochs, its schedule at every step, the scaled rate.

A proof runs a few steps, so it shares the run's schedule with the plain loop and replaces its length. What these are
over the whole run is compared here with formulas of their own, which import nothing of `training`.
"""

from __future__ import annotations

import math
from typing import Any

MOST_LOOKED_AT = 2000  # steps of a schedule, spread evenly
NEAR = 1e-12


def steps(train: Any, samples: int | None, batch: int) -> int | None:
    """Returns the optimizer steps of `epochs` passes over so many samples; None where steps are asked for.

    The last batch of an epoch holds what is left. A part of an epoch counts its batches, rounded up.
    """
    if train.epochs is None or samples is None:
        return None
    whole, rest = divmod(samples, batch)
    return max(1, math.ceil(train.epochs * (whole + (rest > 0))))


def rate(optimizer: Any, batch: int) -> float:
    """Returns what the learning rate is multiplied by for this batch, of samples or tokens."""
    times = batch / (optimizer.base_batch or 1)
    return {"none": 1.0, "linear": times, "sqrt": times**0.5}[optimizer.scale_lr]


def factor(schedule: Any, total: int, step: int) -> float:
    """Returns the factor on the learning rate at a step, counted from 0."""
    rise = (step + 1) / (schedule.warmup_steps + 1) if step < schedule.warmup_steps else 1.0
    low = schedule.final_factor
    if schedule.name == "constant":
        return rise
    if schedule.name == "wsd":
        length = schedule.decay_steps or max(1, round(schedule.decay_fraction * total))
        left = total - step  # steps from this one to the end, itself included
        return rise if left > length else rise * (low + (1 - low) * left / (length + 1))
    after = max(0, step - schedule.warmup_steps) / (total - schedule.warmup_steps)
    fall = 1 - after if schedule.name == "linear" else (1 + math.cos(math.pi * after)) / 2
    return rise * (low + (1 - low) * fall)


def differences(job: Any, samples: int | None, run_factor: Any, total: int) -> list[str]:
    """Returns a sentence for each thing that a job has settled otherwise.

    samples      of the task's data; None where it makes its batches
    run_factor   the run's schedule: step -> factor
    """
    config, told = job.effective.config, []
    expected = steps(config.train, samples, job.batch_samples)
    if expected is not None and job.steps != expected:
        epochs = f"{config.train.epochs:g} epochs of {samples} samples"
        told.append(f"{epochs} are {expected} steps, and the run has {job.steps}")
    times = rate(config.optimizer, config.train.batch_tokens or job.batch_samples)
    own = job.lr_factor if job.lr is None else job.lr / config.optimizer.lr
    if abs(own - times) > NEAR * times:
        rule = f"scale_lr={config.optimizer.scale_lr}"
        told.append(f"{rule} multiplies the learning rate by {times:g}, the run by {own:g}")
    looked_at = sorted({total * index // MOST_LOOKED_AT for index in range(MOST_LOOKED_AT)} | {total - 1})
    for step in looked_at:
        if abs(run_factor(step) - factor(config.schedule, total, step)) > NEAR:
            told.append(f"the schedule's factor at step {step} is {factor(config.schedule, total, step):g}, in the run "
                        f"{run_factor(step):g}")  # fmt: skip
            break
    return told
