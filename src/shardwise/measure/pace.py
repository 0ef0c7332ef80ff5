"""Correct times for the pace of the CPU while they were measured: a virtual one slows down and speeds up.

    pace      . work .  . work .  . work .          a fixed piece of work, a few times, every so often
    steps      |---|----|---|-----|---|----|        of a run or of a reference module, on all ranks at once
    figures    op op . op op . op op . op op        of a probe, each between two looks at the pace

What was measured is divided by how long the fixed work took beside it, so a forecast and a run are compared at one
pace, though one core may be two thirds faster than the other and than itself a second later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from shardwise.device import pace_us

BRIEF = 5  # rounds of the fixed work: a millisecond or two
EVERY_S = 0.05  # between two looks while steps are taken
MANY = 100  # looks, after which they are half as often, again and again: a long run is not held up

Found = TypeVar("Found")


@dataclass(frozen=True)
class Budget:
    """A deadline for a whole measurement, from when this is made; valid in other processes of the host too."""

    seconds: float
    began: float = field(default_factory=time.time)  # when it was made; seconds of the host's clock

    def left_s(self, device: torch.device | None = None) -> float:
        """Returns the seconds that are left, below 0 once over, the mean over ranks, alike on all. Collective."""
        return over_ranks(self.began + self.seconds - time.time(), device)

    def part(self, share: float, device: torch.device | None = None) -> Budget:
        """Returns a budget of a share of what is left, from now on. Collective."""
        return Budget(share * max(0.0, self.left_s(device)))


def within(
    budget: Budget, figures: Sequence[Callable[[float], Found]], least: int, device: torch.device | None = None
) -> list[Found]:
    """Returns the results of `figures`, called in turn while there is time, the first `least` always. Collective.

    Each is told how many seconds it may take: an equal share of those that are left.
    """
    results: list[Found] = []
    for at, figure in enumerate(figures):
        left = budget.left_s(device)
        if at >= least and left <= 0:
            break
        results.append(figure(max(0.0, left) / (len(figures) - at)))
    return results


def ends_first(sizes: Sequence[int]) -> list[int]:
    """Returns sizes as a measurement takes them that may be cut short: the ends, then the middles of what is left."""
    last = len(sizes) - 1
    places, gaps = [0, *([last] if last else [])], [(0, last)]
    for low, high in gaps:
        if high - low > 1:
            middle = (low + high) // 2
            places.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [sizes[place] for place in places]


@dataclass(frozen=True)
class Pace:
    """A rank's measure of its CPU's pace. `reference`: microseconds of the fixed work; None: no correction."""

    device: torch.device
    reference: float | None

    def seconds(self, measure: Callable[[], float]) -> float:
        """Returns the time that `measure()` returns, in its unit, corrected to the reference pace."""
        if self.reference is None:
            return measure()
        before = pace_us(self.device, BRIEF)
        measured = measure()
        after = pace_us(self.device, BRIEF)
        assert before is not None and after is not None
        return measured * self.reference * 2 / (before + after)


@dataclass
class Beat:
    """Measures the pace between the steps of a run; every rank has to measure before the same steps.

    every   steps from one look to the next; twice as many after each `MANY` looks
    """

    device: torch.device
    every: int = 1
    at: list[int] = field(default_factory=list)  # steps before which the pace was measured
    us: list[float] = field(default_factory=list)  # what was measured there, microseconds

    def before(self, step: int) -> None:
        """Measures the pace before a step, where it is time to: into `at` the step, into `us` microseconds.

        Nothing on a device with a constant pace.
        """
        if step % self.every == 0:
            self._look(step)

    def end(self, steps: int) -> None:
        """Measures the pace a last time, after `steps` steps."""
        self._look(steps)

    def _look(self, step: int) -> None:
        """Measure the pace once, and look less often after many times."""
        us = pace_us(self.device, BRIEF)
        if us is not None:
            self.at.append(step)
            self.us.append(us)
            if len(self.us) % MANY == 0:
                self.every *= 2

    def spread(self, step_s: float) -> None:
        """Measures every `EVERY_S` seconds from now on, where a step takes `step_s`, the same number on all ranks."""
        self.every = max(1, math.ceil(EVERY_S / step_s))


def pace_beside(
    steps: Sequence[tuple[int, float]], at: Sequence[int], ranks: Sequence[Sequence[float]], in_turn: bool
) -> float:
    """Returns microseconds of the fixed work beside the median step.

    steps     (index, seconds)
    at        the steps before which it was looked, the last one after all
    ranks     what each rank saw then
    in_turn   ranks work one after another, so that their mean counts; else the slowest is waited for

    Each step is divided by the pace at its own time: the median of what is left is a step at one pace.
    """
    seen = np.mean(ranks, axis=0) if in_turn else np.max(ranks, axis=0)
    beside = np.interp([index + 0.5 for index, _ in steps], at, seen)
    times = [seconds for _, seconds in steps]
    return median(times) / median(np.divide(times, beside).tolist())


def over_ranks(value: float, device: torch.device | None = None) -> float:
    """Returns the mean of `value` over ranks, by tensors on `device` (None: the CPU), alike on all. Collective."""
    if not dist.is_initialized():
        return value
    row = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(row)
    return float(row) / dist.get_world_size()


def slower(ranks: Sequence[Sequence[tuple]]) -> tuple[tuple, ...]:
    """Returns all ranks' rows, alike but for the time at their end, as one list, with times of the slowest rank.

    Times are the ranks' mean, scaled by how much longer the slowest takes on the whole. The largest time of each row
    would be of a rank that was late just then, and their sum too slow.
    """
    times = np.array([[row[-1] for row in rows] for rows in ranks])
    if not times.size:
        return ()
    mean = times.mean(axis=0)
    most = float(np.median(times / mean, axis=1).max())
    return tuple((*row[:-1], float(f"{most * took:.4g}")) for row, took in zip(ranks[0], mean, strict=True))
