"""Measure what rounding alone does to each compared number: one process again, all moved by one epsilon.

    noise of a tensor = its largest difference from the first run, over the runs

A module can amplify the last bit of its input a billion times (a choice among equals, a root near zero). No layout of
such a module gives the same gradients, nor do two runs of one process on two machines: the answer is NOT PROVEN.

What this does not do: make such a proof pass. An error of a layout is then as invisible as its absence.
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

ALLOWANCE = 10  # a plan may differ by so many times what one process differs from itself
NUDGES = 3
HOPELESS = 1e-3  # of an error that rounding is to explain: where two runs show less, a third would not show enough

Noise = dict[tuple[str, str], float]  # (kind, name) -> relative difference; kinds "loss" and "norm" have the name ""


def nudged_runs(task: Task, settings: Settings, *, inside: bool = False) -> Iterable[Record]:
    """Yields the records of one process with weights and inputs moved by one epsilon, each element up or down.

    inside  what each module returns, too: samples that are alike (the same word twice) remain alike otherwise, where
            a plan's kernels round each of them in its own way
    """
    return (run_oracle(task, replace(settings, nudge=n, nudge_inside=inside)) for n in range(1, NUDGES + 1))


def add_noise(noise: Noise, record: Record, other: Record) -> None:
    """Raise `noise` to the errors of `other` against `record`, where they are larger."""
    itself = Parity("", 1)
    compare(itself, record, other)
    for which, error in errors_of(itself).items():
        noise[which] = max(noise.get(which, 0.0), error)


def errors_of(parity: Parity) -> Noise:
    """Returns every error of a proof, the loss's and the norm's among them."""
    errors = {(kind, name): error for kind in KINDS for name, error in parity.errors(kind).items()}
    return errors | {("loss", ""): parity.loss_error or 0.0, ("norm", ""): parity.norm_error or 0.0}


def explain_by_rounding(parity: Parity, record: Record, runs: Iterable[Record]) -> None:
    """Make the proof NOT PROVEN where one process differs from itself as much as the plan differs from it.

    Called where a float64 proof found errors beyond their bars. Compared kind by kind: which tensor a choice among
    equals reaches is chance.

    record, runs    of one process, and of it with weights (and inputs) moved by one epsilon
    """
    if parity.differences:  # a tensor that exists on one side alone is no rounding
        return
    errors = errors_of(parity)
    beyond = {which for which, error in errors.items() if error > parity.bar(*which)}
    worst = {kind: max(errors[which] for which in beyond if which[0] == kind) for kind, _ in beyond}
    noise: Noise = {}
    for number, other in enumerate(runs):
        add_noise(noise, record, other)
        own = {kind: max(error for which, error in noise.items() if which[0] == kind) for kind in worst}
        # after two runs: where one process is far from as uncertain as the plan, more runs will not change that
        if number and any(own[kind] < HOPELESS * error for kind, error in worst.items()):
            return
    # the plan differs by more than one process does from itself: no rounding
    if any(error > ALLOWANCE * own[kind] for kind, error in worst.items()):
        return
    parity.noisy |= beyond
    largest = max(worst, key=lambda kind: worst[kind])
    parity.unproven.append(
        f"one process does not agree with itself: with weights and inputs moved by one float64 epsilon its {largest} "
        f"differs by {own[largest]:.1e}, and the plan's by {worst[largest]:.1e}. Look for a choice among equals or a "
        "division by nearly zero, or prove on another batch or fewer steps (--steps 1)"
    )
