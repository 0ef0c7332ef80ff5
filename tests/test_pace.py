"""Times at one pace, whatever the machine does meanwhile."""

from __future__ import annotations

import pytest

from shardwise.planner.pace import pace_beside


def test_a_step_is_told_at_one_pace_though_the_machine_slows_down_halfway() -> None:
    """Every step takes 10 rounds of the fixed work; in the second half, and on one rank alone, those take longer."""
    at = list(range(0, 101, 10))
    even, slow = [1.0] * len(at), [1.0] * 4 + [2.0] * 7
    beside = [max(1.0, 1.0 if i < 30 else min(2.0, 1 + (i - 29.5) / 10)) for i in range(100)]
    steps = [(i, 10 * pace) for i, pace in enumerate(beside)]
    found = pace_beside(steps, at, [even, slow], in_turn=False)
    assert sorted(s for _, s in steps)[50] / found == pytest.approx(10.0, rel=0.02)


def test_ranks_that_work_in_turn_are_as_fast_as_their_mean() -> None:
    steps = [(i, 30.0) for i in range(8)]
    assert pace_beside(steps, [0, 8], [[1.0, 1.0], [2.0, 2.0]], in_turn=True) == pytest.approx(1.5)
    assert pace_beside(steps, [0, 8], [[1.0, 1.0], [2.0, 2.0]], in_turn=False) == pytest.approx(2.0)
