"""Times at one pace, whatever the machine does meanwhile."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from functools import partial
from statistics import mean

import pytest
import torch
import torch.distributed as dist

from shardwise.costs.overhead import DRAWS
from shardwise.device import CPU
from shardwise.layout import Plan
from shardwise.measure import overheads, pace
from shardwise.measure.collective_times import collective_times
from shardwise.measure.overheads import (
    AGREE,
    ALIKE,
    LEAST,
    MOST,
    PASSES,
    REFERENCES,
    STEPS,
    _seconds,
    plans,
    step_times,
    steps_within,
)
from shardwise.measure.pace import MANY, Beat, Budget, Pace, ends_first, pace_beside, slower, within
from shardwise.measure.reference_modules import reference_task


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
    calls: list[tuple[str, bool]] = []

    def seconds(task: object, plan: str, pace: Pace, share_s: float, follows: bool) -> float:
        calls.append((plan, follows))
        times = calls.count((plan, follows))
        return 1.0 if Plan.parse(plan).dp_shard == 1 or times <= len(REFERENCES) else AGREE + 0.1

    monkeypatch.setattr(overheads, "_seconds", seconds)
    monkeypatch.setattr(overheads, "large_tasks", lambda ranks: {})
    steps, large = step_times(2, Pace(None, 1.0))
    assert large == {}
    wanted = Counter((plan, name.endswith(DRAWS)) for name, each in plans(2).items() for plan in each)
    for (plan, follows), times in wanted.items():
        again = Plan.parse(plan).dp_shard > 1
        assert calls.count((plan, follows)) == times * (PASSES + again), plan
    for name, each in plans(2).items():
        assert steps[name] == [AGREE + 0.1 if "dp_shard" in plan else 1.0 for plan in each]


def test_a_slow_machine_takes_fewer_steps_and_not_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module takes 3 s whatever is asked for: the first round is whole, the second one ends with the budget."""
    clock = [1000.0]
    monkeypatch.setattr(pace.time, "time", lambda: clock[0])
    shares: list[float] = []

    def seconds(task: object, plan: str, pace: Pace, share_s: float, follows: bool) -> float:
        shares.append(share_s)
        clock[0] += 3.0
        return 1.0 + 0.5 * len(shares)  # no two rounds agree

    monkeypatch.setattr(overheads, "_seconds", seconds)
    monkeypatch.setattr(overheads, "large_tasks", lambda ranks: {})
    told: list[str] = []
    modules = sum(map(len, plans(2).values()))
    step_times(2, Pace(None, 1.0), told.append, budget=Budget(3.0 * modules + 7.0, began=1000.0))
    assert len(shares) == modules + 2  # what is left is less than one module takes
    assert shares[0] == pytest.approx(3.0 + 7.0 / modules) and shares[modules - 1] == pytest.approx(10.0)
    assert "s left at most" in told[0] and f"{modules} of {modules}" in told[modules - 1]


def test_steps_fit_what_is_left() -> None:
    assert steps_within(math.inf, 0.001) == MOST and steps_within(math.inf, 0.1) == STEPS
    assert steps_within(1.0, 0.1) == 10 and steps_within(-3.0, 0.1) == LEAST


def test_a_long_run_is_looked_at_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "pace_us", lambda device, rounds: 1.0)
    beat = Beat(torch.device("cpu"))
    for step in range(100 * MANY):
        beat.before(step)
    assert MANY < len(beat.us) < 10 * MANY
    assert beat.at == sorted(beat.at)


def _left_behind(plans: list[str]) -> tuple[int, int]:
    """Threads and process groups that engines leave behind, all plans together."""
    task = reference_task(2, 1, 4)

    def all_of_them() -> None:
        for plan in plans:
            _seconds(task, plan, Pace(torch.device("cpu"), 1000.0), share_s=0.0)  # the fewest steps

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(dist.distributed_c10d._world.pg_map)

    all_of_them()
    before = held()
    all_of_them()
    return held()[0] - before[0], held()[1] - before[1]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc, which Linux has")
def test_an_engine_that_is_closed_leaves_no_groups_behind(pool) -> None:
    kinds = {each[0] for name, each in plans(2, quick=True).items() if name in ("replicas", "zero3", "pp")}
    found = pool.run(_left_behind, 2, sorted(kinds))
    assert len(kinds) == 3 and found == [(0, 0)] * 2


def test_figures_are_measured_while_there_is_time():
    """The first ones in any case; each is told its share of what is left."""
    told: list[float] = []

    def figure(name: int, may_s: float) -> int:
        told.append(may_s)
        return name

    figures = [partial(figure, name) for name in range(4)]
    assert within(Budget(1000.0), figures, 1) == [0, 1, 2, 3]
    assert told[0] == pytest.approx(250, abs=5) and told[3] == pytest.approx(1000, abs=20)
    told.clear()
    assert within(Budget(-1.0), figures, 2) == [0, 1] and told == [0.0, 0.0]
    assert 0 <= Budget(100.0).part(0.5).left_s() <= 50 and Budget(-5.0).part(0.5).seconds == 0
    assert ends_first([1, 2, 3, 4]) == [1, 4, 2, 3] and ends_first([1, 2]) == [1, 2] and ends_first([1]) == [1]
    assert ends_first(range(9)) == [0, 8, 4, 2, 6, 1, 3, 5, 7]


def _without_time() -> list[tuple[str, int, int, float]]:
    return collective_times(CPU, 2, Pace(CPU, None), Budget(0.0))


def test_collectives_between_the_ends_are_measured_without_time_left(pool) -> None:
    rows = pool.run(_without_time, 2)[0]
    sizes = {op: [size for kind, _, size, _ in rows if kind == op] for op in {row[0] for row in rows}}
    assert len(sizes) == 4 and all(found == [2**10, 2**14, 2**18, 2**22, 2**26] for found in sizes.values())


def test_a_quick_probe_takes_fewer_techniques():
    missing = {name for name in plans(2).keys() - plans(2, quick=True).keys() if not name.endswith(DRAWS)}
    assert missing == ALIKE.keys() and not missing & set(ALIKE.values())
