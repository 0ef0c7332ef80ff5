"""Times as they would have been at one pace: a virtual CPU slows down and speeds up while it is probed.

A fixed piece of work is timed before and after each measurement, and what was measured is divided by how much longer
that took than at first. So the pace of the first moment cancels out where a run compares its own with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from shardwise.device import pace_us

Found = TypeVar("Found")
Row = TypeVar("Row", bound=tuple)


@dataclass(frozen=True)
class Pace:
    """Of one rank. `reference`: microseconds of the fixed work; None where a device's pace is its own."""

    device: torch.device
    reference: float | None

    def seconds(self, measure: Callable[[], float]) -> float:
        """What `measure` returns, a time in any unit, at the reference pace."""
        found, slower = self._around(measure)
        return found / slower

    def rows(self, measure: Callable[[], list[Row]]) -> list[Row]:
        """The same for the last cells of the rows that `measure` returns."""
        found, slower = self._around(measure)
        return [(*row[:-1], row[-1] / slower) for row in found]  # type: ignore[misc]

    def _around(self, measure: Callable[[], Found]) -> tuple[Found, float]:
        before = pace_us(self.device)
        found = measure()
        after = pace_us(self.device)
        if before is None or after is None or self.reference is None:
            return found, 1.0
        return found, (before + after) / 2 / self.reference
