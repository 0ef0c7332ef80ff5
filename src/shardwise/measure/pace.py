"""Corrects measured times for the CPU's pace at that moment, since the speed of virtual cores changes.

    pace      . work .  . work .  . work .          a fixed piece of work is timed, a few rounds, again and again
    steps      |---|----|---|-----|---|----|        steps of a run or of a reference module, on all ranks at once
    figures    op op . op op . op op . op op        figures of a probe, with the pace timed before and after each

A measured time is divided by the time of the fixed work around it, so that a forecast and a run are compared at one
pace, although one core may be two thirds faster than another, or than itself a second later.
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

BRIEF = 5  # rounds of the fixed work each time: a millisecond or two
EVERY_S = 0.05  # seconds between two measurements of the pace during steps
MANY = 100  # measurements after which they become half as frequent, so that a long run is not slowed down

Found = TypeVar("Found")


@dataclass(frozen=True)
class Budget:
    """A deadline `seconds` after it is created; valid in other processes of the host too."""

    seconds: float
    began: float = field(default_factory=time.time)  # when it was made; seconds of the host's clock

    def left_s(self, device: torch.device | None = None) -> float:
        """Returns the seconds that are left (negative when over), as the mean over ranks. Collective."""
        return over_ranks(self.began + self.seconds - time.time(), device)

    def part(self, share: float, device: torch.device | None = None) -> Budget:
        """Returns a budget that starts now and has a fraction `share` of the seconds left. Collective."""
        return Budget(share * max(0.0, self.left_s(device)))


def within(
    budget: Budget, figures: Sequence[Callable[[float], Found]], least: int, device: torch.device | None = None
) -> list[Found]:
    """Calls `figures` in order until time is up, the first `least` in any case; returns their results. Collective.

    Each is called with the seconds that it may take, an equal share of those left.
    """
    results: list[Found] = []
    for at, figure in enumerate(figures):
        left = budget.left_s(device)
        if at >= least and left <= 0:
            break
        results.append(figure(max(0.0, left) / (len(figures) - at)))
    return results


def ends_first(sizes: Sequence[int]) -> list[int]:
    """Returns sizes in an order for measurements that may be cut short: both ends, then middles of the gaps."""
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
    """Corrects a rank's times to one pace; `reference`: microseconds of the fixed work at it, None: no correction."""

    device: torch.device
    reference: float | None

    def seconds(self, measure: Callable[[], float]) -> float:
        """Calls `measure` and returns its time, in its unit, corrected to the reference pace."""
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

    every   steps from one measurement to the next, doubled after each `MANY` measurements
    """

    device: torch.device
    every: int = 1
    at: list[int] = field(default_factory=list)  # steps before which the pace was measured
    us: list[float] = field(default_factory=list)  # microseconds of the fixed work at each of these

    def before(self, step: int) -> None:
        """Measures the pace before a step if one is due, and appends to `at` and `us`.

        Does nothing on a device with a constant pace.
        """
        if step % self.every == 0:
            self._look(step)

    def end(self, steps: int) -> None:
        """Measures the pace a last time, after `steps` steps."""
        self._look(steps)

    def _look(self, step: int) -> None:
        """Measures the pace once, and doubles `every` after each `MANY` measurements."""
        us = pace_us(self.device, BRIEF)
        if us is not None:
            self.at.append(step)
            self.us.append(us)
            if len(self.us) % MANY == 0:
                self.every *= 2

    def spread(self, step_s: float) -> None:
        """Sets `every` to about `EVERY_S` seconds; `step_s`: seconds of a step, the same number on all ranks."""
        self.every = max(1, math.ceil(EVERY_S / step_s))


def pace_beside(
    steps: Sequence[tuple[int, float]], at: Sequence[int], ranks: Sequence[Sequence[float]], in_turn: bool
) -> float:
    """Returns the microseconds of the fixed work by which to divide the median step.

    steps     (index, seconds) of each step
    at        steps before which the pace was measured; the last is the number of steps
    ranks     for each rank, the microseconds measured at these steps
    in_turn   whether ranks work one after another, so that their mean counts; if not, the slowest rank counts

    Each step is divided by the pace at its own time, and the median of these quotients is a step at one pace.
    """
    seen = np.mean(ranks, axis=0) if in_turn else np.max(ranks, axis=0)
    # the pace in the middle of each step, between two measurements
    beside = np.interp([index + 0.5 for index, _ in steps], at, seen)
    times = [seconds for _, seconds in steps]
    return median(times) / median(np.divide(times, beside).tolist())


def over_ranks(value: float, device: torch.device | None = None) -> float:
    """Returns the mean of `value` over ranks, reduced on `device` (None: the CPU). Collective."""
    if not dist.is_initialized():
        return value
    row = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(row)
    return float(row) / dist.get_world_size()


def slower(ranks: Sequence[Sequence[tuple]]) -> tuple[tuple, ...]:
    """Merges the rows of all ranks, which differ only in their last cell (a time), into one list; () if empty.

    ranks  the rows of each rank, in the same order

    A time is the ranks' mean, scaled by the ratio of the slowest rank over all rows. The maximum of each row would take
    a rank that was late at that moment, so their sum would be too slow.
    """
    times = np.array([[row[-1] for row in rows] for rows in ranks])
    if not times.size:
        return ()
    mean = times.mean(axis=0)
    most = float(np.median(times / mean, axis=1).max())
    return tuple((*row[:-1], float(f"{most * took:.4g}")) for row, took in zip(ranks[0], mean, strict=True))
