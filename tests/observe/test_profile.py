"""A profile names where its steps went, and its parts add up to their length by another clock."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import train
from shardwise.errors import InputError
from shardwise.models import tasks
from shardwise.observe.profile import as_text, length, meet, minus, table_of, union
from shardwise.observe.profile_steps import read_steps


@pytest.mark.parametrize(
    ("name", "plan", "axes"),
    [
        ("mlp", "dp_shard=2,zero=3", {"dp_shard"}),
        pytest.param("decoder", "dp_shard=2,zero=3", {"dp_shard"}, marks=pytest.mark.long),
        pytest.param(
            "decoder", "dp_replicate=2,dp_shard=2,zero=1", {"dp_shard", "dp_replicate", "data"}, marks=pytest.mark.long
        ),
    ],
)
def test_the_parts_of_a_profile_add_up(name: str, plan: str, axes: set[str], tmp_path: Path) -> None:
    run = train(getattr(tasks, name), plan, steps=6, profile_steps="3:5", out=str(tmp_path))
    found = json.loads((run.folder / "profile" / "table.json").read_text())
    assert found["steps"] == [3, 4]
    for rank, table in enumerate(found["ranks"]):
        parts = {key: value for key, value in table.items() if key != "measured" and not key.startswith("hidden")}
        # two clocks: what stops the process between their readings, on a busy machine, is in one of them alone
        assert sum(parts.values()) == pytest.approx(table["measured"], rel=0.02, abs=2.0)
        assert all(value >= 0 for value in table.values())
        assert table["compute"] > 0 and table["optimizer"] > 0
        assert {key.split(", ")[1] for key in table if key.startswith("hidden")} == axes
        trace = json.loads((run.folder / "profile" / f"rank{rank}.json").read_text())
        assert sum(event.get("name") == "shardwise.step" and event["ph"] == "X" for event in trace["traceEvents"]) == 2


def event(name: str, start: float, end: float, thread: int = 1, annotation: bool = False) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, thread=thread, time_range=span, is_user_annotation=annotation)


def test_a_table_by_hand() -> None:
    events = [
        event("shardwise.steps", 0, 10500, annotation=True),
        event("shardwise.input", 0, 1000, annotation=True),
        event("shardwise.step", 1000, 10000, annotation=True),
        event("aten::mm", 1000, 4000),
        event("shardwise.issue reduce_scatter dp_shard", 4000, 4500, annotation=True),
        event("shardwise.issue all_reduce dp_replicate", 4500, 4600, annotation=True),
        event("aten::add", 4600, 6600),
        event("shardwise.wait", 6600, 8100, annotation=True),
        event("shardwise.update", 8100, 9100, annotation=True),
        event("aten::addcmul_", 8200, 9000),
        event("gloo:all_reduce", 4200, 6200, thread=7, annotation=True),  # the reduce_scatter, by gloo's name for it
        event("gloo:all_reduce", 6200, 8000, thread=8, annotation=True),
    ]
    expected = {
        "input": 1.0,
        "compute": 5.0,
        "exposed comm, dp_replicate": 1.4,
        "exposed comm, dp_shard": 0.4,
        "exposed comm, waiting for others": 0.3,
        "optimizer": 1.0,
        "idle": 0.9,
        "between steps": 0.5,
        "hidden comm, dp_replicate": 0.4,
        "hidden comm, dp_shard": 1.6,
        "measured": 10.5,
    }
    assert table_of(events, 1, 0.0105) == pytest.approx(expected)
    assert "hidden comm, dp_shard" in as_text([table_of(events, 1, 0.0105)], range(3, 4)).splitlines()[-2]


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))), max_size=8)


@given(SPANS, SPANS)
def test_arithmetic_of_spans(one: list, other: list) -> None:
    a, b = ({point for start, end in spans for point in range(start, end)} for spans in (one, other))
    joined = union(one), union(other)
    for spans, points in ((union(one), a), (meet(*joined), a & b), (minus(*joined), a - b)):
        assert {point for start, end in spans for point in range(int(start), int(end))} == points
        assert length(spans) == len(points)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5:5", "5:5 ends before it begins"),
        ("6:10", "is no part"),
        ("0:30", "is no part|at most 20"),
        ("0:3", r"is no part of the run's 8 steps \(1:9\)"),
    ],
)
def test_steps_that_are_not_there(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_steps(text, 8)


def test_too_many_steps() -> None:
    assert read_steps(None, 8) == range(0) and read_steps("2:4", 8) == range(1, 3)
    assert read_steps("6:9", 8) == range(5, 8)  # the last one
    with pytest.raises(InputError, match="25 steps; at most 20"):
        read_steps("5:30", 100)
