"""Times at one pace, whatever the machine does meanwhile."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from shardwise.layout import Plan
from shardwise.planner import overheads
from shardwise.planner.overheads import AGREE, PASSES, REFERENCES, plans, step_times
from shardwise.planner.pace import Pace, pace_beside, slower


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


def test_rows_of_unlucky_ranks_are_not_slower_in_sum() -> None:
    """Each time is 100 but for luck: the largest of four would be 10 too slow on average."""
    draw = random.Random(3)
    ranks = [[("op", at, draw.gauss(100, 10)) for at in range(400)] for _ in range(4)]
    found = slower(ranks)
    assert [row[:2] for row in found] == [("op", at) for at in range(400)]
    assert mean(row[-1] for row in found) == pytest.approx(100, rel=0.02)


def test_rows_are_those_of_a_rank_that_is_slower_on_the_whole() -> None:
    fast = [("op", at, 10.0 + at) for at in range(9)]
    slow = [("op", at, 2.0 * took) for _, at, took in fast]
    assert [row[-1] for row in slower([fast, slow])] == pytest.approx([took for *_, took in slow])
    assert slower([[], []]) == ()


def test_steps_on_which_rounds_disagree_are_measured_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def seconds(task: object, plan: str, pace: Pace) -> float:
        calls.append(plan)
        times = calls.count(plan)
        return 1.0 if Plan.parse(plan).dp_shard == 1 or times <= len(REFERENCES) else AGREE + 0.1

    monkeypatch.setattr(overheads, "_seconds", seconds)
    monkeypatch.setattr(overheads, "large_tasks", lambda ranks: {})
    steps, large = step_times(2, Pace(None, 1.0))
    assert large == {}
    for name, each in plans(2).items():
        again = Plan.parse(each[0]).dp_shard > 1
        assert sum(calls.count(plan) for plan in {*each}) == len(each) * (PASSES + again), name
        assert steps[name] == [AGREE + 0.1 if again else 1.0] * len(each)
