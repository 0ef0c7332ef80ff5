"""Measure the effect of rounding on each compared number, by runs of one process with everything nudged by one epsilon.

    noise of a tensor = its largest difference from the first run, over the runs

A module can amplify the last bit of its input a billion times (a choice among equals, a root near zero). No layout of
such a module gives the same gradients, nor do two runs of one process on two machines, so the result is NOT PROVEN.

What this does not do: make such a proof pass, since an error of the layout would not show either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwise.proof.compare_records import compare
from shardwise.proof.oracle import run_oracle
from shardwise.proof.outcome import KINDS, Parity
from shardwise.proof.record import Record
from shardwise.proof.settings import Settings
from shardwise.task import Task

ALLOWANCE = 10  # factor on the noise of one process by which a plan may differ
NUDGES = 3
HOPELESS = 1e-3  # fraction of an error: if two runs' noise is below it, a third would not explain the error either

Noise = dict[tuple[str, str], float]  # (kind, name) -> relative difference; kinds "loss" and "norm" have the name ""


def nudged_runs(task: Task, settings: Settings, *, inside: bool = False) -> Iterable[Record]:
    """Yields the records of one process with weights and inputs moved by one epsilon, each element up or down.

    inside  whether outputs of childless modules move too. Otherwise samples that are alike (the same word twice) remain
            alike, though a plan's kernels may round them differently
    """
    return (run_oracle(task, replace(settings, nudge=n, nudge_inside=inside)) for n in range(1, NUDGES + 1))


def add_noise(noise: Noise, record: Record, other: Record) -> None:
    """Raises each entry of `noise` to the error of `other` against `record`, if that is larger."""
    itself = Parity("", 1)
    compare(itself, record, other)
    for which, error in errors_of(itself).items():
        noise[which] = max(noise.get(which, 0.0), error)


def errors_of(parity: Parity) -> Noise:
    """Returns every error of a proof, those of the loss and the norm included."""
    errors = {(kind, name): error for kind in KINDS for name, error in parity.errors(kind).items()}
    return errors | {("loss", ""): parity.loss_error or 0.0, ("norm", ""): parity.norm_error or 0.0}


def explain_by_rounding(parity: Parity, record: Record, runs: Iterable[Record]) -> None:
    """Makes the proof NOT PROVEN if one process differs from itself about as much as the plan differs from it.

    Called when a float64 proof found errors beyond their bars. Compared kind by kind, since it is random which tensor a
    choice among equals affects.

    record, runs    of one process, and of it with weights and inputs moved by one epsilon
    """
    if parity.differences:  # such as a tensor on one side alone, which rounding cannot explain
        return
    errors = errors_of(parity)
    beyond = {which for which, error in errors.items() if error > parity.bar(*which)}
    worst = {kind: max(errors[which] for which in beyond if which[0] == kind) for kind, _ in beyond}
    noise: Noise = {}
    for number, other in enumerate(runs):
        add_noise(noise, record, other)
        own = {kind: max(error for which, error in noise.items() if which[0] == kind) for kind in worst}
        # after two runs: if the noise is far below the plan's error, a third run will not change that
        if number and any(own[kind] < HOPELESS * error for kind, error in worst.items()):
            return
    # the plan differs by more than one process does from itself, which is not rounding
    if any(error > ALLOWANCE * own[kind] for kind, error in worst.items()):
        return
    parity.noisy |= beyond
    largest = max(worst, key=lambda kind: worst[kind])
    parity.unproven.append(
        f"one process does not agree with itself: with weights and inputs moved by one float64 epsilon its {largest} "
        f"differs by {own[largest]:.1e}, and the plan's by {worst[largest]:.1e}. Look for a choice among equals or a "
        "division by nearly zero, or prove on another batch or fewer steps (--steps 1)"
    )
