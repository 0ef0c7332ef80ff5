"""Pipeline schedules: every table can run, and what is counted from it equals the formulas of the papers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.main import call
from shardwise.errors import RefusedPlan
from shardwise.layout.drawing import as_svg, as_text
from shardwise.layout.plan import SCHEDULES, Plan
from shardwise.layout.rules import check
from shardwise.layout.schedule_kinds import KINDS, Op, in_flight
from shardwise.layout.schedules import (
    Times,
    make_schedule,
    schedule_of,
)

ranks = st.integers(2, 6)
TIMES = [Times(), Times(2.0, 2.0, 1.5), Times(3.0, 3.5, 2.0)]  # W takes no longer than F and I in any model


@given(st.sampled_from(SCHEDULES), ranks, st.integers(1, 20), st.integers(2, 4))
def test_every_table_does_each_op_once_in_an_order_that_can_run(name: str, p: int, m: int, v: int) -> None:
    per_rank, m = fitting(name, p, m, v)
    schedule = make_schedule(name, p, m, per_rank)  # validates
    assert schedule.stages == p * per_rank
    assert sorted(s for r in range(p) for s in schedule.stages_of(r)) == list(range(schedule.stages))
    assert all(0 < count <= m * per_rank for count in schedule.live())
    assert any(op.kind == "I" for row in schedule.rows for op in row) == KINDS[name].split


def fitting(name: str, p: int, m: int, v: int) -> tuple[int, int]:
    """(stages on each rank, micro-batches) that the schedule takes, near to those given."""
    per_rank = v if KINDS[name].placed == "around" else KINDS[name].stages_per_rank
    return per_rank, next(n for n in range(m, m + 3 * p) if KINDS[name].misfit(p, n, per_rank) is None)


@given(st.sampled_from(SCHEDULES), ranks, st.integers(1, 20), st.integers(2, 4))
def test_micro_batches_in_flight_are_those_of_the_tables(name: str, p: int, m: int, v: int) -> None:
    """Micro-batches in flight on each rank, as counted; no fewer where the pipeline is never full."""
    per_rank, m = fitting(name, p, m, v)
    schedule = make_schedule(name, p, m, per_rank)
    told = [in_flight(name, p, m, per_rank, rank) for rank in range(p)]
    counted = [live / per_rank for live in schedule.live()]
    assert all(more >= least - 1e-9 for more, least in zip(told, counted, strict=True))
    assert m < 2 * p or told == pytest.approx(counted)


def test_a_wrong_table_is_told() -> None:
    right = make_schedule("1f1b", 3, 4)
    rows = [list(row) for row in right.rows]

    def told(rank: int, row: list[Op]) -> str:
        changed = tuple(tuple(row if r == rank else old) for r, old in enumerate(rows))
        with pytest.raises(RefusedPlan) as raised:
            replace(right, rows=changed).validate()
        return str(raised.value)

    assert "F2.3 is missing" in told(2, [op for op in rows[2] if op != Op("F", 2, 3)])
    assert "stands in it twice" in told(2, [*rows[2], rows[2][0]])
    assert "too many" in told(2, [*rows[2], Op("F", 2, 4)])
    assert "wait for each other in a circle" in told(2, list(reversed(rows[2])))
    swapped = (tuple(rows[1]), tuple(rows[0]), tuple(rows[2]))
    with pytest.raises(RefusedPlan, match=r"F1\.0 stands on rank 0, not 1"):
        replace(right, rows=swapped).validate()


# --- the formulas


@pytest.mark.parametrize("times", TIMES, ids=str)
@given(p=ranks, more=st.integers(0, 12))
def test_gpipe_and_1f1b_wait_for_p_minus_1_micro_batches(times: Times, p: int, more: int) -> None:
    """Huang et al. (2019), section 2.3; Narayanan et al. (2021), section 2.2.1."""
    m = p + more
    for name in ("gpipe", "1f1b"):
        schedule = make_schedule(name, p, m)
        assert schedule.bubble(times) == pytest.approx((p - 1) / (m + p - 1))
        assert schedule.inner_bubble(times) == pytest.approx((p - 1) * (times.forward + times.of("B")))


@given(p=ranks, rounds=st.integers(1, 4), v=st.integers(2, 4))
def test_interleaving_divides_the_bubble(p: int, rounds: int, v: int) -> None:
    """Narayanan et al. (2021), section 2.2.2: (p - 1)(F + B) / v; activations after Megatron-LM's warm-up."""
    m, times = p * rounds, Times()
    schedule = make_schedule("interleaved1f1b", p, m, v)
    assert schedule.inner_bubble(times) == pytest.approx((p - 1) * 3)  # in times of a stage, 1/v of a rank's layers
    assert schedule.bubble(times) == pytest.approx((p - 1) / (v * m + p - 1))
    ahead = [2 * (p - r - 1) + (v - 1) * p + 1 for r in range(p)]
    assert schedule.live() == tuple(min(held, m * v) for held in ahead)


@given(p=ranks, more=st.integers(0, 8))
def test_memory_of_schedules_with_one_stage(p: int, more: int) -> None:
    m = 2 * p + more
    assert make_schedule("gpipe", p, m).live() == (m,) * p
    assert make_schedule("1f1b", p, m).live() == tuple(p - r for r in range(p))
    assert make_schedule("zbh1", p, m).live() == (p,) * p  # Qi et al. (2024), table 1: p M_B
    assert make_schedule("zbh2", p, m).live() == (2 * p - 1,) * p  # (2p - 1) M_B


@pytest.mark.parametrize("times", TIMES, ids=str)
@given(p=ranks, more=st.integers(0, 8))
def test_zero_bubble_h1_and_h2(times: Times, p: int, more: int) -> None:
    """Qi et al. (2024), table 1: (p - 1)(F + I - W) and (p - 1)(F + I - 2W) of waiting, where that is positive."""
    m = 2 * p + more
    f, i, w = times.forward, times.input, times.weight
    assert make_schedule("zbh1", p, m).inner_bubble(times) == pytest.approx((p - 1) * (f + i - w))
    assert make_schedule("zbh2", p, m).inner_bubble(times) == pytest.approx(max(0.0, (p - 1) * (f + i - 2 * w)))


@given(p=ranks, more=st.integers(0, 8))
def test_the_v_shapes(p: int, more: int) -> None:
    """Qi et al. (2024), section 6: the memory of 1f1b and no bubble. DualPipeV's page: 2p + 1 activations."""
    m = 2 * p + more
    zbv, dual = make_schedule("zbv", p, m, 2), make_schedule("dualpipev", p, m, 2)
    assert zbv.live() == (2 * p,) * p
    assert zbv.inner_bubble() == 0
    assert dual.live() == (2 * p + 1,) * p
    assert zbv.owner == dual.owner == (*range(p), *reversed(range(p)))
    assert dual.bubble() < make_schedule("interleaved1f1b", p, p * (m // p), 2).bubble()


@given(p=ranks, rounds=st.integers(2, 4))
def test_splitting_the_backward_of_interleaved_stages_helps(p: int, rounds: int) -> None:
    whole, split = (make_schedule(name, p, p * rounds, 2) for name in ("interleaved1f1b", "interleavedzb"))
    assert split.bubble() < whole.bubble()
    assert split.live() == (whole.live()[0],) * p


# --- what cannot be made


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("pp=4,schedule=dualpipev,microbatches=7", "microbatches of at least 2 pp = 8, got 7"),
        ("pp=4,schedule=interleaved1f1b,microbatches=6", "rounds of pp=4: microbatches=6"),
        ("pp=2,schedule=interleavedzb,microbatches=3", "rounds of pp=2: microbatches=3"),
        ("pp=2,stages=a|b|c", "has one stage on each rank, not 2: use interleaved1f1b"),
        ("pp=2,schedule=interleaved1f1b,stages=a", "needs two stages or more on each rank"),
        ("pp=2,schedule=zbv,stages=a|b|c|d|e", "has two stages on each rank, not 3"),
        ("dp_shard=2", "has no pipeline: pp is 1"),
    ],
)
def test_refusals(plan: str, told: str) -> None:
    with pytest.raises(RefusedPlan) as raised:
        schedule_of(Plan.parse(plan))
    assert told in str(raised.value)


# --- drawings


def test_the_picture_in_the_docstring_is_the_table() -> None:
    import shardwise.layout.schedules as room

    drawn = re.findall(r"^    (rank \d.*)$", room.__doc__ or "", re.MULTILINE)
    lines = as_text(make_schedule("1f1b", 3, 4)).splitlines()[:3]
    assert [line.rstrip(" .") for line in lines] == [line.rstrip(" .") for line in drawn]


def test_text_and_picture_show_every_op() -> None:
    schedule = make_schedule("zbv", 3, 6, 2)
    text = as_text(schedule)
    assert all(label in text for label in ("F0", "f5", "i0", "W5"))
    svg = as_svg(schedule)
    assert svg.count("<rect") == sum(len(row) for row in schedule.rows) and svg.endswith("</svg>\n")


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(["show", "schedule", "pp=4,schedule=zbv,microbatches=8"]) == 0
    assert "rank 3  .  .  .  F0 f0" in capfd.readouterr().out
    drawing = tmp_path / "zbv.svg"
    assert call(["show", "schedule", "pp=4,schedule=zbv", "-o", str(drawing)]) == 0
    assert drawing.read_text().startswith("<svg")
    capfd.readouterr()
    assert call(["show", "schedule", "pp=4", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["bubble"] == pytest.approx(3 / 7) and answer["live"] == [4, 3, 2, 1] and answer["stages"] == 4
    assert call(["show", "schedule", "pp=4,schedule=dualpipev,microbatches=4"]) == 3
    assert call(["show", "schedule", "pp=4", "-o", str(tmp_path / "no" / "where.svg")]) == 2
    assert "cannot write" in capfd.readouterr().err


def test_what_a_schedule_says_it_takes_is_what_it_takes() -> None:
    """Every table of small numbers that is no misfit can be made, so plans are refused without making one."""
    for name, kind in KINDS.items():
        for p, v in product(range(2, 6), (1, 2, 3)):
            for m in (*range(1, 2 * p + 3), 5 * p, 5 * p + 1):
                if kind.misfit(p, m, v) is None:
                    make_schedule(name, p, m, v)


def test_a_plan_of_very_many_stages_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table is made: it would have 20,000 rows of 40,000 operations."""
    monkeypatch.setattr("shardwise.layout.schedules.make_schedule", None)
    check(Plan.parse("pp=20000"))
    with pytest.raises(RefusedPlan, match="no order of its forwards and backwards exists"):
        check(Plan.parse("pp=20000,microbatches=3,schedule=dualpipev"))
