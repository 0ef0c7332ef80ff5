"""Forecasts that can be believed: no figure above what a device computes, `plan` and `simulate` agree, guesses lose."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise import Task, plan, simulate
from shardwise.cluster import Cluster
from shardwise.errors import InputError, ShardwiseError
from shardwise.planner import Constraints
from shardwise.planner.propose import search
from shardwise.planner.traced_layouts import traced_subject
from shardwise.planner.traced_task import Traced

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import believable
import no_better_guess

from shardwise.costs.software import software

NODE = Cluster.parse("8 h100-sxm-80gb")


@pytest.mark.parametrize("seed", [2, 6, 7, 10, 1001, 1004, 1006])
def test_random_tasks(seed: int) -> None:
    case = believable.drawn(seed)
    assert not case["wrong"], case


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(40), 1000, 1002, 1003, 1005])
def test_random_tasks_cut_too(seed: int) -> None:
    case = believable.drawn(seed)
    assert not case["wrong"], case


@pytest.mark.parametrize("seed", [1, 2, 3, 8])
def test_no_better_guess_on_odd_clusters(seed: int) -> None:
    case = no_better_guess.drawn(seed)
    assert case["guesses"] and not case["wrong"], case


class Odd(nn.Module):
    """One sample alone meets fewer operations than two do, as in modules that broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x if len(x) == 1 else x * 2)


def odd() -> Task:
    return Task(model=Odd, loss=believable.summed, data=believable.Rows(512, 512))


def test_other_operations_at_one_sample_do_not_make_many_samples_free() -> None:
    """The host's floor is of the operations, whatever the samples; the device's time is of the shapes."""
    subject = traced_subject(odd(), NODE, software("shardwise"), 4096, "bf16", ("none",), cuts=False)
    for text in ("dp_replicate=8", "dp_replicate=8,accumulate=64"):
        layout = next(
            each for each in subject.layouts(8, Constraints()) if each.zero == 0
            and each.n_micro == (64 if "accumulate" in text else 1) and each.replicas == 8
        )  # fmt: skip
        alone = simulate(odd(), f"{text},precision=bf16", NODE, global_batch=4096)
        assert subject.simulate(layout).step_s == pytest.approx(alone.step_s, rel=0.02)
        assert not alone.impossible


def test_two_traces_that_differ_are_never_put_on_a_line() -> None:
    """Planted: the pair that a search used, of one and two samples, is found to differ, and traced at its own size."""
    made = Traced(odd(), NODE, software("shardwise"), "bf16", (1, 2), False)
    model = made.model("none", 8, 64)
    assert model.small.samples == model.large.samples == 64


def test_what_no_device_computes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(model=partial(believable.chain, 2048, 4), loss=believable.summed, data=believable.Rows(2048))
    right = simulate(task, "dp_replicate=8,precision=bf16", NODE, global_batch=65536)
    assert not right.impossible and 0.05 < right.mfu < 1
    assert "a defect of shardwise's forecast" in replace(right, step_s=right.step_s / 100).impossible
    subject = traced_subject(task, NODE, software("shardwise"), 65536, "bf16", ("none",), cuts=False)
    absurd = replace(
        subject, simulate=lambda layout: replace(subject.simulate(layout), step_s=1e-6), exact=None, reading=None
    )
    with pytest.raises(ShardwiseError, match="a defect of shardwise's forecast"):
        search(absurd, NODE)


def test_a_small_network_takes_its_samples_at_once() -> None:
    """A guess was 58 times faster than the plan where micro-batches ended at 64 samples."""
    task = Task(model=partial(believable.chain, 64, 2), loss=believable.summed, data=believable.Rows(64))
    found = plan(task, NODE, global_batch=32768, constraints=Constraints(most=(("tp", 1), ("pp", 1))))
    guess = simulate(task, "dp_replicate=8,precision=bf16", NODE, global_batch=32768)
    assert found.best.forecast.step_s <= guess.step_s * 1.05
    only = Constraints(most=(("tp", 1), ("pp", 1)), fixed=(("accumulate", 1),))
    fixed = plan(task, NODE, global_batch=32768, constraints=only)
    assert fixed.best.plan.accumulate == 1


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="no plan that is looked at has schedule=zbv; there are schedule="):
        plan(
            odd(),
            NODE,
            global_batch=64,
            constraints=Constraints(most=(("tp", 1), ("pp", 1)), fixed=(("schedule", "zbv"),)),
        )


def test_samples_are_not_called_tokens() -> None:
    found = simulate(odd(), "dp_replicate=8,precision=bf16", NODE, global_batch=64)
    assert found.tokens_per_s is None and found.rate == (64 / found.step_s, "samples")
    decoder = simulate("llama3-8b", "dp_shard=8,precision=bf16", NODE, global_batch=8, seq=1024)
    assert decoder.tokens_per_s == pytest.approx(1024 * decoder.samples_per_s)
