"""Finds whether a run waits for its input: the share of a step that ranks spend waiting for the next batch.

share = waiting / (waiting + step), over the steps since the last comparison, of the rank that waited most: gradients
are summed over ranks, so the others then wait for it.

What this does not do: count reading that was hidden behind a step; it costs the run nothing.
"""

from __future__ import annotations

from collections.abc import Callable

BOUND = 0.2  # share of a step from which on waiting is reported
LEAST_S = 2e-3  # seconds of waiting in a step that handing a batch over costs anyway
FIRST_LOOK, BETWEEN_LOOKS = 8, 50  # steps before ranks compare first, and then between
SKIPPED = 2  # first steps, which include start-up


class InputWatch:
    """Sums the seconds that this rank waits for batches and works; warns once if the run is input-bound."""

    def __init__(self, share_of_all: Callable[[float], list[float]], advice: str) -> None:
        """`share_of_all` maps this rank's share to the list of all ranks' (collective); `advice` ends the warning."""
        self._share_of_all = share_of_all  # this rank's share -> every rank's; collective
        self._advice = advice
        self._steps = 0
        self._waited_s = self._worked_s = 0.0
        self._warned = False

    def add(self, waited_s: float, worked_s: float) -> str | None:
        """Counts one step, given the seconds that it waited and worked; returns the warning once, else None.

        Called on every rank for every step, since some of the calls are collective.
        """
        self._steps += 1
        # the first steps include start-up and say nothing of later ones
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
