"""The proof in float32, for tasks with a kernel that has no float64; tensors' bars come from one process itself.

The one process runs again: three times with its weights and inputs moved by one float32 epsilon, and once with each
micro-batch accumulated in two halves, which is the same sum in another order if no sample depends on another. The
largest difference of a tensor from the first run is its rounding; the plan may differ by ten times that.

    bar of a tensor = 10 * its own rounding, at least 1e-6 and at most 1e-3

A tensor that differs by more than its bar, but by less than ten times its own rounding, is neither equal nor
different, so the result is NOT PROVEN.

What this does not do: find errors below the bars, which float64 finds.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwise.errors import first_line
from shardwise.proof.oracle import run_oracle
from shardwise.proof.outcome import KINDS, Parity
from shardwise.proof.record import Record
from shardwise.proof.rounding import ALLOWANCE, Noise, add_noise, errors_of, nudged_runs
from shardwise.proof.settings import Settings
from shardwise.task import Task

LEAST_BAR = 1e-6
MOST_BAR = 1e-3
HALVES_AGREE = 1e-4  # relative difference of losses above which the loss is no sum over samples


def float32_oracle(task: Task, settings: Settings, failure: Exception, parity: Parity) -> tuple[Record, Settings]:
    """Returns (one process's record in float32, its settings); puts bars, noise and a note into `parity`.

    `failure`: the error of the float64 run, which is raised if float32 fails too.
    """
    narrow = replace(settings, dtype=torch.float32)
    try:
        record = run_oracle(task, narrow)
    except Exception:  # float64 was not the reason, so the first failure says more
        raise failure from None
    runs = list(nudged_runs(task, narrow))
    halved = run_oracle(task, replace(narrow, halves=True))
    # halves show another order of summation, but only if the loss is a sum over samples
    if all(abs(a - b) <= HALVES_AGREE * abs(b) for a, b in zip(halved.losses, record.losses, strict=True)):
        runs.append(halved)
    noise: Noise = {}
    for other in runs:
        add_noise(noise, record, other)
    parity.float64, parity.noise = False, noise
    parity.own_bars = {which: bar_of(error) for which, error in noise.items()}
    parity.bars = dict.fromkeys(KINDS, LEAST_BAR)
    parity.bars |= {kind: bar_of(noise[kind, ""]) for kind in ("loss", "norm")}
    parity.notes.append(f"compared in float32, since in float64 one process fails with: {first_line(failure)}")
    return record, narrow


def bar_of(noise: float) -> float:
    """Returns the bar for a tensor's error: `ALLOWANCE` times `noise`, its error between runs of one process.

    At least `LEAST_BAR` and at most `MOST_BAR`.
    """
    return min(max(ALLOWANCE * noise, LEAST_BAR), MOST_BAR)


def set_noise_apart(parity: Parity) -> None:
    """Marks errors above their bar but within `ALLOWANCE` times their noise as not proven."""
    for (kind, name), error in errors_of(parity).items():
        noise = parity.noise.get((kind, name), 0.0)
        if parity.bar(kind, name) < error <= ALLOWANCE * noise:
            parity.noisy.add((kind, name))
            parity.unproven.append(
                f"{kind}{f' {name!r}' if name else ''} differs by {error:.1e}, and in float32 one process itself by "
                f"{noise:.1e} when its weights and inputs move by one epsilon; the largest bar is {MOST_BAR:.0e}"
            )
