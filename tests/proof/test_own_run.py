"""What a run writes in its own precision is held against its own weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mutations.plant import Bug, BuggyPool

from shardwise.config import Given, load
from shardwise.proof.outcome import Parity
from shardwise.proof.verify_run import _own_run, _small
from shardwise.ranks import RankPool
from shardwise.training.job import make_job

NARROW = Path(__file__).parents[1] / "mutations" / "narrow.toml"


def differences(plan: str, pool: Any, config: Path = NARROW) -> list[str]:
    effective = load(config, values=[Given("plan", plan, "the test")])
    parity = Parity(plan, effective.plan.world_size)
    small, settings = _small(make_job(effective), 5, parity)
    _own_run(small, effective.plan, settings, partial(pool.run, timeout_s=100), parity)
    assert "an overflow that the proof made in step 3 was skipped" in parity.notes[-1]
    return parity.differences


@pytest.mark.parametrize("plan", [
    "dp_replicate=2,precision=bf16", "dp_shard=2,zero=2,precision=fp16,accumulate=2",
    *(pytest.param(plan, marks=pytest.mark.long) for plan in (
        "dp_shard=2,zero=3,precision=bf16,reduce_dtype=bf16", "tp=2,precision=bf16-full", "dp_shard=3,zero=3",
        "pp=2,microbatches=2,precision=bf16", "dp_replicate=2,dp_shard=2,zero=1,precision=bf16")),
])  # fmt: skip
def test_a_run_writes_what_its_weights_say(plan: str, pool: RankPool) -> None:
    assert not differences(plan, pool)


@pytest.mark.long
def test_with_batch_norms_too(pool: RankPool) -> None:
    assert not differences("dp_replicate=2", pool, NARROW.with_name("run.toml"))


BUGS = {
    "a swap that does not publish": (
        "engine.ema:Ema._swap", "self.technique.publish()", "pass", "ema_eval_loss after step"),
    "weights are rounded before they are averaged": (
        "engine.ema:Ema.update", "master.detach() for master", "master.detach().bfloat16().float() for master",
        "the average of 'layers.0.weight' is off"),
    "the file is rounded": (
        "engine.weights_file:WeightsFile.add", "tensor.detach().resolve_conj()", "tensor.detach().bfloat16().float()",
        "the file of weights: 'layers.0.weight' is not"),
    "the best weights are the worst": (
        "training.loop:_Rank._keep_best", 'loss < best["eval_loss"]', 'loss > best["eval_loss"]', "the best weights"),
    "a skipped step goes into the average": (
        "training.loop:_Rank._step", "self.ema is not None and not result.skipped", "self.ema is not None",
        "the average of 'layers.0.weight' is off"),
}  # fmt: skip
QUICK = ("weights are rounded before they are averaged", "the best weights are the worst")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
                                  for name in BUGS])  # fmt: skip
def test_what_is_not_is_told(name: str, pool: RankPool) -> None:
    where, old, new, told = BUGS[name]
    plan = "dp_replicate=2,precision=bf16"
    found = differences(plan, BuggyPool(pool, Bug(name, f"shardwise.{where}", old, new, "", plan)))
    assert any(sentence.startswith(told) for sentence in found), found
