"""Modules whose result hangs on how many samples there are, as a whole batch and as ranks' parts of it."""

from __future__ import annotations

import many_tasks
import pytest
import torch
from torch import nn

from shardwise import Plan, parallelize, verify
from shardwise.errors import RefusedPlan
from shardwise.look.watched_run import Seen
from shardwise.look.whole_against_parts import sizes_to_try, too_many
from shardwise.ranks import RankPool

TOGETHER = "puts other samples together on 16 samples"
PLANS = ("dp_replicate=2,tp=2", "dp_shard=2,zero=3", "dp_replicate=2,pp=2,microbatches=1")


def refusals(plan: str) -> dict[str, str]:
    """What is said of each module as it is parallelized, by name."""
    found = {}
    for between in (*many_tasks.UNLIKE, *many_tasks.ALIKE):
        if between is many_tasks.halves and Plan.parse(plan).pp > 1:
            continue  # stages are cut on two samples, of which each half has no variance
        try:
            parallelize(many_tasks.made(between), plan).close()
            found[between.__name__] = ""
        except RefusedPlan as refusal:
            found[between.__name__] = str(refusal)
    return found


@pytest.mark.parametrize("plan", ["dp_replicate=2", *(pytest.param(one, marks=pytest.mark.long) for one in PLANS)])
def test_what_hangs_on_the_number_of_samples_is_refused_before_the_first_step(plan: str, pool: RankPool) -> None:
    for found in pool.run(refusals, Plan.parse(plan).world_size, plan):
        runs = "the loss on a few samples is NaN" if "pp" in plan else "batch norm in 'norm' runs 3 times on 16 samples"
        assert runs in found["ghost"], found["ghost"]
        assert TOGETHER in found.get("halves", TOGETHER), found["halves"]
        for name in ("centred_where_many", "first_eight", "spread_in_groups"):
            assert "hangs on how many there are" in found[name], (name, found[name])
        assert not any(found[between.__name__] for between in many_tasks.ALIKE), found


def first_step_of_rows(name: str) -> str:
    """What a first step says of the samples of a source, of which the task does not say how many a step takes."""
    task = many_tasks.made(getattr(many_tasks, name), batch=None, data=many_tasks.Rows())
    engine = parallelize(task, "dp_replicate=2")
    before = {key: value.clone() for key, value in engine.full_parameters()}
    try:
        engine.step(many_tasks.batch(0))
    except RefusedPlan as refusal:
        assert all(torch.equal(value, before[key]) for key, value in engine.full_parameters())
        return str(refusal)
    return ""


@pytest.mark.parametrize("name", ["ghost", pytest.param("twice", marks=pytest.mark.long)])
def test_a_source_is_looked_at_with_the_first_batch(name: str, pool: RankPool) -> None:
    for said in pool.run(first_step_of_rows, 2, name):
        assert said.startswith("batch norm in 'norm' runs 3 times on 16 samples") == (name == "ghost"), said


@pytest.mark.long
@pytest.mark.parametrize("name", ["normalised_twice", "chunked"])
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_groups_that_are_the_same_on_ranks_parts_are_equal(name: str, plan: str, pool: RankPool) -> None:
    result = verify(f"many_tasks:{name}", plan, pool=pool, timeout_s=60)
    assert result.parity, result.text()


@pytest.mark.parametrize(
    ("name", "plan", "told"),
    [
        ("fours", "dp_replicate=2", ""),
        ("fours", "tp=2", ""),
        ("four_groups", "tp=2", ""),
        ("fours", "pp=2,microbatches=2", ""),
        ("four_groups", "dp_shard=2,zero=3", 'declares loss_scope="model"'),
        ("four_groups_on_all", "dp_shard=2,zero=3", ""),
    ],
)
def test_a_forward_that_takes_samples_in_groups_is_looked_at_in_whole(
    name: str, plan: str, told: str, pool: RankPool
) -> None:
    result = verify(f"many_tasks:{name}", plan, pool=pool, timeout_s=60)
    assert told in (result.refused or "") if told else result.parity, result.refused or result.text()


def test_what_is_too_wide_to_be_looked_at_is_named() -> None:
    seen = Seen(nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 64), nn.ReLU()), nn.Linear(64, 2)))
    with seen.watching():
        seen.module(torch.randn(3, 4))
    assert seen.widest == (3 * 64 * 4, "1.0")
    assert sizes_to_try([8, 8], 2**30) == []
    (told,) = too_many([8, 8], seen.widest[1])
    assert "was not checked: a result of '1.0' takes too much memory" in told and too_many([8, 0], "1.0") == []
