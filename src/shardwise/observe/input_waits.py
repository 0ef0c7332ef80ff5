"""Tell whether a run waits for its input: the share of steps that ranks spent waiting for the next batch.

share = waiting / (waiting + step), over the steps since the last look, of the rank that waited most: with gradients
summed over ranks, the others then wait for it.

What this does not do: count reading that was hidden behind a step; it costs the run nothing.
"""

from __future__ import annotations

from collections.abc import Callable

BOUND = 0.2  # of a step, from which on waiting is worth a word
LEAST_S = 2e-3  # less than that in a step is the price of handing a batch over
FIRST_LOOK, BETWEEN_LOOKS = 8, 50  # steps
SKIPPED = 2  # the first steps wait for whatever starts


class InputWatch:
    """Sums of the seconds that ranks wait for batches and work; `add` gives one warning, where waiting is much."""

    def __init__(self, share_of_all: Callable[[float], list[float]], advice: str) -> None:
        self._share_of_all = share_of_all  # this rank's share -> every rank's; collective
        self._advice = advice
        self._steps = 0
        self._waited_s = self._worked_s = 0.0
        self._warned = False

    def add(self, waited_s: float, worked_s: float) -> str | None:
        """Count one step, on every rank alike; returns a warning, once, where the run waits for input; else None."""
        self._steps += 1
        # the first steps wait for whatever starts, and tell nothing of those that follow
        if self._warned or self._steps <= SKIPPED:
            return None
        self._waited_s += waited_s
        self._worked_s += worked_s
        if (self._steps - FIRST_LOOK) % BETWEEN_LOOKS:
            return None
        shares = self._share_of_all(self._waited_s / max(self._waited_s + self._worked_s, 1e-9))
        steps = min(self._steps - SKIPPED, BETWEEN_LOOKS)
        mean_s = (self._waited_s + self._worked_s) / steps
        self._waited_s = self._worked_s = 0.0
        share = max(shares)
        # handing a batch over takes a little too, which is no reason to warn however short steps are
        if share < BOUND or share * mean_s < LEAST_S:
            return None
        self._warned = True
        return (
            f"input-bound: rank {shares.index(share)} spent {share:.0%} of each step ({mean_s * 1e3:.3g} ms) waiting "
            f"for its batch: {self._advice}"
        )
