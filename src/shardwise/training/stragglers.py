"""Ranks that work longer than the others between collectives, told once each.

A rank's own time is that of its steps without what it waited in collectives. It is compared with the median of the
ranks that do the same work: those of its pipeline stage.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from statistics import median

from shardwise.engine.engine import Engine
from shardwise.guard.points import record

TIMES = 2.0  # the median
LOOKS = 5  # in a row
LEAST_S = 0.005  # a step: below it, what a host does besides decides


class Stragglers:
    """One on each rank. Every rank gives its row and sees all of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._at, self._waited = time.monotonic(), 0.0
        self._slow: Counter[int] = Counter()
        self.told: set[int] = set()

    def row(self, steps: int) -> list[float]:
        """(stage, seconds of this rank's own work for each step) since the last time."""
        mine, now = record(), time.monotonic()
        waited = mine.waited_s if mine is not None else 0.0
        own = max(0.0, now - self._at - (waited - self._waited)) / max(steps, 1)
        self._at, self._waited = now, waited
        return [float(self.engine.mesh.pp.index), own]

    def look(self, rows: list[list[float]]) -> None:
        """Every rank's row, in rank order: whoever is slow `LOOKS` times in a row is told in the notices."""
        stages: dict[float, list[float]] = defaultdict(list)
        for stage, own in rows:
            stages[stage].append(own)
        for rank, (stage, own) in enumerate(rows):
            usual = median(stages[stage])
            slow = len(stages[stage]) > 1 and own > TIMES * usual and own > LEAST_S
            self._slow[rank] = self._slow[rank] + 1 if slow else 0
            if self._slow[rank] == LOOKS and rank not in self.told:
                self.told.add(rank)
                self.engine.notices.append(
                    f"rank {rank} is slow: {1e3 * own:.0f} ms of its own work in a step, where the median is "
                    f"{1e3 * usual:.0f} ms, and the others wait for it"
                )
