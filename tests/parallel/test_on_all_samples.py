"""Modules that mix samples run on those of all ranks, and are one process's; what cannot is refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from mutations.plant import Bug, BuggyPool

from shardwise import parallelize, verify
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool

MIXING = [
    "spread",
    "own_norm",
    "across_samples",
    "balanced",
    "queue",
    "set_by_first",
    "several",
    "quantised",
    "ghosts",
    "chosen",
    "noisy",
    "restarted",
]
PLANS = [
    "dp_replicate=2", "dp_shard=2,zero=3,accumulate=2", "dp_replicate=4,accumulate=3", "dp_replicate=2,remat=full",
    "dp_replicate=2,compile=true", "dp_shard=2,zero=2,precision=bf16", "dp_replicate=2,dp_shard=2,zero=3",
    "tp=2,dp_shard=2",
]  # fmt: skip
FEW = [(task, PLANS[place % len(PLANS)]) for place, task in enumerate(MIXING)]  # each task, and each plan

COMPILED = [(task, "dp_replicate=2,compile=true") for task in ("noisy", "restarted")]  # which hides draws: refused


def assert_equal(task: str, plan: str, pool: RankPool) -> None:
    """Nine samples: parts are unlike, and in three micro-batches on four ranks one has none."""
    parity = verify(f"mixing_tasks:{task}", plan, steps=3, pool=pool, timeout_s=60)
    assert parity.parity, parity.text()
    assert any("mixes the samples of a micro-batch" in note for note in parity.notes)


@pytest.mark.parametrize(("task", "plan"), FEW)
def test_modules_that_mix_samples_are_equal(task: str, plan: str, pool: RankPool) -> None:
    assert_equal(task, plan, pool)


@pytest.mark.long
@pytest.mark.parametrize(("task", "plan"), [pair for pair in product(MIXING, PLANS) if pair not in FEW + COMPILED])
def test_modules_that_mix_samples_are_equal_under_each_plan(task: str, plan: str, pool: RankPool) -> None:
    assert_equal(task, plan, pool)


def test_also_beside_cut_positions(pool: RankPool) -> None:
    assert_equal("quantised", "cp=2,dp_shard=2", pool)


def test_a_buffer_that_is_set_anew_beside_cut_weights_may_be_given_back(pool: RankPool) -> None:
    """An assignment puts a cut tensor in a plain buffer's place."""
    parity = verify("mixing_tasks:own_norm", "tp=2", pool=pool, timeout_s=60)
    assert parity.parity, parity.text()


@pytest.mark.parametrize(
    ("task", "plan", "told"),
    [
        ("all_of_it", "dp_replicate=2", "the loss does not add up over samples"),
        ("own_norm_of_some", "dp_replicate=2", "by other means than batch norm"),
        ("queue", "pp=2,dp_replicate=2", "by other means than batch norm"),
        ("queue", "dp_shard=2,deterministic=true", "by other means than batch norm"),
    ],
)
def test_what_cannot_run_on_all_samples_is_refused(task: str, plan: str, told: str, pool: RankPool) -> None:
    refused = verify(f"mixing_tasks:{task}", plan, pool=pool, timeout_s=60).refused
    assert refused is not None and told in refused


BUGS = {
    "gradients are a rank's own": ("_whole", "summed=True", "summed=False", "dp_replicate=2"),
    "rows are another rank's": ("__call__", "counts[: self.axis.index]", "counts[: 1 - self.axis.index]",
                                "dp_replicate=2"),
    "each runs on its own": ("__call__", "self.axis.size == 1 or", "True or", "dp_replicate=2"),
    "a stand-in's sample counts": ("__call__", "0.0 if self.phase.stand_in else", "", "dp_replicate=4,accumulate=3"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, pool: RankPool) -> None:
    function, old, new, plan = BUGS[bug]
    place = Bug("", f"shardwise.parallel.on_all_samples:OnAllSamples.{function}", old, new, "", "")
    parity = verify("mixing_tasks:own_norm", plan, pool=BuggyPool(pool, place), timeout_s=60)
    assert not parity.parity and parity.refused is None


def evaluated(plan: str) -> tuple[Any, ...]:
    """What is told of nine samples, and of four in three micro-batches, after two steps."""
    from mixing_tasks import several

    task = several()
    assert task.batch is not None
    engine = parallelize(task, plan)
    for step in range(2):
        engine.step(task.batch(step))
    few = {name: value[:4] for name, value in task.batch(3).items()}
    outputs = [output.tolist() for output in engine.predict([task.batch(2), few]) if output is not None]
    return engine.evaluate([task.batch(2), few]), outputs


def test_evaluation_is_one_process(pool: RankPool) -> None:
    ((numbers, outputs),) = pool.run(evaluated, 1, "precision=fp64,accumulate=3")
    first, *others = pool.run(evaluated, 4, "dp_shard=4,zero=3,precision=fp64,accumulate=3")
    assert [told for told, _ in (first, *others)] == [pytest.approx(numbers, rel=1e-12)] * 4
    for mine, alone in zip(first[1], outputs, strict=True):
        assert mine == [pytest.approx(row, rel=1e-12) for row in alone]


def evaluated_otherwise() -> str:
    from mixing_tasks import other_in_evaluation

    task = other_in_evaluation()
    assert task.batch is not None
    engine = parallelize(task, "dp_replicate=2")
    try:
        engine.evaluate([task.batch(0)])
    except RefusedPlan as refusal:
        return str(refusal)
    return ""


def test_rows_of_results_that_no_look_has_seen_are_not_guessed(pool: RankPool) -> None:
    for told in pool.run(evaluated_otherwise, 2):
        assert "first dims of [9, 18] for 9 rows" in told and "makes [9] of them" in told
