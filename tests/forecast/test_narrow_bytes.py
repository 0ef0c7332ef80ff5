"""Forecasts of state that rests by a code: bytes of a run within 2%, of decoders by hand."""

from __future__ import annotations

import pytest
import torch

from shardwise import parallelize, simulate
from shardwise.cluster import Cluster
from shardwise.costs.coded_state import decoded, resting
from shardwise.costs.layout import Layout
from shardwise.costs.memory import states
from shardwise.costs.software import STATES, software
from shardwise.models import tasks
from shardwise.planner.decoders import decoder_by_name
from shardwise.tiers import CODECS, HALVES, subgroups

NODE = "8 h100-sxm-80gb"
NARROW = ["optimizer_state=bf16", "optimizer_state=8bit", "precision=bf16,masters=split",
          "precision=bf16,optimizer_state=8bit,masters=split"]  # fmt: skip


@pytest.mark.parametrize("plan", NARROW)
def test_bytes_at_rest_are_those_of_a_run(plan: str) -> None:
    torch.set_num_threads(1)
    task = tasks.decoder()
    engine = parallelize(task, plan)
    engine.step(task.batch(0))
    machine = Cluster.parse("1 l40s")
    forecast = simulate("shardwise.models.tasks:decoder", plan, machine).worst.terms
    held = engine.memory()
    assert forecast["optimizer"] == pytest.approx(held["optimizer"], rel=0.02)
    assert forecast["weights"] + forecast.get("master", 0) == pytest.approx(held["parameters"], rel=0.02)


def test_codes_have_the_bytes_that_forecasts_count() -> None:
    count = 1 << 20
    for name, codec in CODECS.items():
        rests = resting(STATES["fp32"], Layout(optimizer_state=name))
        assert rests.optimizer == 2 * codec.size(count) / count
        assert resting(STATES["fp32"], Layout(optimizer_state=name), 1.0).optimizer == 4 + codec.size(count) / count
    assert resting(STATES["bf16"], Layout(masters="split")).master == HALVES.size(count) / count
    assert decoded(STATES["fp32"], Layout(optimizer_state="8bit"), 1e9, 1e6) == subgroups.SUBGROUP_BYTES


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_decoder_by_its_numbers(zero: int) -> None:
    plain, lean = (
        states({"dense": 1.0, "experts": 0.0}, layout, software("shardwise"))
        for layout in (
            Layout(shard=8, zero=zero), Layout(shard=8, zero=zero, optimizer_state="8bit", masters="split"),
        )
    )  # fmt: skip
    share = 8 if zero else 1
    assert plain["optimizer"] * share == 8 and lean["optimizer"] * share == 2 * (1 + 4 / 256)
    assert plain["master"] * share == 4 and lean["master"] * share == 2.125
    assert {**lean, "optimizer": 0, "master": 0} == {**plain, "optimizer": 0, "master": 0}


def test_a_forecast_needs_fewer_bytes_and_reads_more() -> None:
    text = "dp_shard=8,zero=1,precision=bf16,remat=full"
    asked = {"global_batch": 64, "seq": 4096}
    plain, lean = (
        simulate("llama3-8b", f"{text}{end}", NODE, **asked) for end in ("", ",optimizer_state=8bit,masters=split")
    )
    saved = decoder_by_name("llama3-8b").parameters / 8 * (8 - 2 * (1 + 4 / 256) + 4 - 2.125)
    assert plain.worst.allocated - lean.worst.allocated == pytest.approx(saved, rel=0.02)
    assert lean.parts["optimizer"] > plain.parts["optimizer"]
