"""Dtypes of a step: what a plan says of them holds in its collectives and tensors, and a narrower one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mutations.plant import Bug, BuggyPool

from shardwise import Plan, verify
from shardwise.config import Given, load
from shardwise.layout.precisions import PRECISIONS
from shardwise.precision import dtype
from shardwise.proof.dtypes import said
from shardwise.proof.own_precision import verify_precision
from shardwise.proof.settings import Settings
from shardwise.ranks import RankPool
from shardwise.training.job import make_job

NARROW = Path(__file__).parents[1] / "mutations" / "narrow.toml"


def test_what_is_said_of_a_precision_is_what_its_row_says() -> None:
    for name, row in PRECISIONS.items():
        assert said(Plan(precision=name)) == (dtype(row.compute), dtype(row.master), dtype(row.summed))
    assert said(Plan(precision="bf16", reduce_dtype="bf16"))[2] == dtype("bf16")


PLACES = "shardwise."
BUGS = [
    ("precision:Precision.of", 'row.summed if plan.reduce_dtype == "auto" else plan.reduce_dtype', "row.summed",
     "dp_shard=2,zero=3,precision=bf16,reduce_dtype=bf16", "dtype of reduce_scatter of torch: float32, not bfloat16"),
    ("precision:Precision.of", 'row.summed if plan.reduce_dtype == "auto" else plan.reduce_dtype', "row.compute",
     "dp_replicate=2,precision=bf16", "dtype of all_reduce of gradients: bfloat16, not float32"),
    ("precision:Precision.of", "dtype(row.master)", "dtype(row.compute)",
     "dp_shard=2,zero=2,precision=bf16", "dtype of the master of"),
    ("precision:Precision.cast_outputs", "wide = torch.promote_types(self.compute, torch.float32)",
     "wide = self.compute", "dp_replicate=2,precision=bf16", "dtype of what the loss reads: bfloat16"),
    ("comm.collectives:all_reduce", "with tagged(tag):",
     "if tag == 'gradients':\n        short = tensor.bfloat16()\n        dist.all_reduce(short, group=axis.group)\n"
     "        tensor.copy_(short)\n        return Pending(None)\n    with tagged(tag):",
     "dp_replicate=2,precision=bf16", "dtype of all_reduce of torch: bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "old", "new", "plan", "told"), [
    pytest.param(*bug, marks=[pytest.mark.long] if place in (2, 4) else []) for place, bug in enumerate(BUGS)
], ids=["reduce_dtype is ignored", "sums in 16 bits", "masters in 16", "losses of 16", "sent narrow"])  # fmt: skip
def test_a_dtype_that_the_plan_does_not_ask_for_is_told(
    where: str, old: str, new: str, plan: str, told: str, pool: RankPool
) -> None:
    effective = load(NARROW, values=[Given("plan", plan, "the test")])
    ranks = BuggyPool(pool, Bug("", PLACES + where, old, new, "", plan))
    parity = verify_precision(make_job(effective), effective.plan, Settings(clip_norm=0.5), ranks.run)
    assert not parity.parity
    assert any(sentence.startswith(told) for sentence in parity.differences), parity.text()


@pytest.mark.parametrize(("place", "told"), [(1, BUGS[1][4]), (3, BUGS[3][4])])
def test_steps_of_a_task_are_looked_at_in_the_plans_precision(place: int, told: str, pool: RankPool) -> None:
    where, old, new, plan, _ = BUGS[place]
    ranks = BuggyPool(pool, Bug("", PLACES + where, old, new, "", plan))
    parity = verify("shardwise.models.tasks:mlp", plan, steps=1, pool=ranks, timeout_s=100)
    assert any(sentence.startswith(told) for sentence in parity.differences), parity.text()


def test_what_is_sent_narrow_under_a_wide_plan_is_told(pool: RankPool) -> None:
    where, old, new, _, told = BUGS[4]  # float64 keeps such casts wide: values do not show it
    ranks = BuggyPool(pool, Bug("", PLACES + where, old, new, "", "dp_replicate=2"))
    parity = verify("shardwise.models.tasks:mlp", "dp_replicate=2", steps=1, pool=ranks, timeout_s=100)
    assert any(sentence.startswith(told) for sentence in parity.differences), parity.text()


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
def test_messages_of_a_body_under_autocast_are_as_narrow_as_in_one_process(plan: str, pool: RankPool) -> None:
    parity = verify("module_tasks:autocast", plan, steps=1, pool=pool, timeout_s=100)
    assert parity.parity, parity.text()


def test_a_task_that_one_process_cannot_run_in_a_precision_is_told(pool: RankPool) -> None:
    parity = verify("unusual_tasks:glow", "dp_replicate=2,precision=bf16", steps=1, pool=pool, timeout_s=100)
    assert parity.parity and any("dtypes are not proven: one process fails in bf16" in note for note in parity.notes)


def test_the_first_loss_scale_is_chosen_by_the_weight_of_a_whole_step(pool: RankPool) -> None:
    """Of a batch in three micro-batches on two ranks, as the plain loop does: bugs that forget either are told."""
    effective = load(NARROW, values=[Given("plan", "dp_replicate=2,accumulate=3,precision=fp16", "the test")])
    for old in ("", "total * micro_batches"):
        ranks: Any = (
            BuggyPool(pool, Bug("", PLACES + "step.scaler:LossScale.factor", old, "total", "", "")) if old else pool
        )
        parity = verify_precision(make_job(effective), effective.plan, Settings(accumulate=3), ranks.run)
        assert parity.parity != bool(old), parity.text()
        assert not old or any("the loss scale is" in sentence for sentence in parity.differences)
