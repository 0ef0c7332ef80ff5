"""Mixtures that deal rows to stacked weights in their own forward, on ranks of `ep`: equal, or refused with why."""

from __future__ import annotations

from typing import Any

import expert_tasks
import pytest
import stacked_tasks
import torch
from torch import nn

from shardwise import Plan, Task, parallelize, verify
from shardwise.comm import Axis
from shardwise.engine.experts import look_for_experts
from shardwise.errors import RefusedPlan, RunError
from shardwise.layout.plan import SCHEDULES
from shardwise.layout.schedule_kinds import KINDS
from shardwise.parallel.expert.expert_forward import Stack
from shardwise.parallel.expert.expert_program import ExpertProgram
from shardwise.parallel.expert.stacked import StackedExperts
from shardwise.precision import Precision
from shardwise.ranks import RankPool
from shardwise.trace.deferred import build

WAYS = {
    "looped": "one", "written": "one", "dense": "every", "dense_in_turn": "one", "slots": "every",
    "given_slots": "every", "sorted_rows": "one", "picked": "picked", "picked_one": "picked", "raw_router": "one",
    "noisy": "one", "one_of_four": "one", "whole_model": "one", "words": "one", "words_picked": "picked",
    "heads": "one", "picked_in_sequences": "picked", "summed_by_einsum": "every", "soft": "every",
    "shared_norm": "one", "shared_norm_words": "one", "casting": "one", "by_keyword": "picked",
}  # fmt: skip
CASES = [
    ("looped", "pp=2,dp_shard=2,ep=2,schedule=zbv,microbatches=4,zero=2"),
    ("written", "tp=2,dp_shard=2,ep=2"), ("slots", "dp_shard=4,ep=2,zero=1"),
    ("picked", "dp_shard=2,ep=2,zero=2,accumulate=3"), ("words", "cp=2,dp_shard=2,ep=4,zero=1"),
    ("noisy", "dp_shard=2,ep=2,remat=selective"), ("whole_model", "dp_shard=2,ep=2,zero=0"),
    ("sorted_rows", "dp_shard=2,ep=2"), ("given_slots", "dp_shard=4,ep=4,zero=2"),
    ("soft", "dp_shard=2,ep=2,zero=1"), ("picked_in_sequences", "tp=2,dp_shard=2,ep=2"),
    ("summed_by_einsum", "dp_shard=2,ep=2"), ("casting", "dp_shard=2,ep=2"), ("by_keyword", "dp_shard=2,ep=2"),
    ("shared_norm", "tp=2,dp_shard=2,ep=2,zero=1"), ("shared_norm_words", "cp=2,ep=2"),
]  # fmt: skip
PLANS = [
    *(f"dp_shard=2,ep=2,zero={zero}" for zero in range(4)), "dp_shard=4,ep=2", "dp_shard=4,ep=4,zero=1",
    "dp_replicate=2,dp_shard=2,ep=2,zero=1,accumulate=3", "tp=2,dp_shard=2,ep=2", "tp=2,sp=true,dp_shard=2,ep=2,zero=1",
    "dp_shard=2,ep=2,remat=selective,accumulate=2", "pp=2,dp_shard=2,ep=2,remat=full",
    "pp=2,tp=2,dp_shard=2,ep=2,zero=1",
    "dp_shard=2,ep=2,precision=bf16", "dp_shard=2,ep=2,compile=true",
]  # fmt: skip
INNER = ["cp=2,ep=2", "cp=4,ep=4,zero=1", "cp_ulysses=2,dp_shard=2,ep=4", "cp=2,tp=2,ep=2", "cp=2,dp_shard=2,ep=2,pp=2"]
LONG = [(name, plan) for name in WAYS for plan in PLANS if not (name == "whole_model" and "pp=" in plan)]
LONG += [(name, plan) for name in ("words", "words_picked", "shared_norm_words") for plan in INNER]
LONG += [
    (name, f"pp=2,dp_shard=2,ep=2,schedule={schedule},microbatches=4,zero={2 if KINDS[schedule].split else 3}")
    for name in ("looped", "slots", "picked") for schedule in SCHEDULES
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_equal_to_one_process(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(f"stacked_tasks:{name}", plan, clip_norm=0.5, pool=pool, timeout_s=120)
    assert parity.parity, parity.text()


@pytest.mark.long
@pytest.mark.parametrize(("name", "plan"), LONG)
def test_every_way_equals_one_process(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(f"stacked_tasks:{name}", plan, clip_norm=0.5, pool=pool, timeout_s=240)
    assert parity.parity, parity.text()


def found(task: Task, ep: int = 2) -> list[Stack]:
    plan = Plan(dp_shard=ep, ep=ep)
    return look_for_experts(task, plan, Precision.of(plan), build(task.model, 0), task.batch(0))


@pytest.mark.parametrize("name", WAYS)
def test_mixtures_are_found(name: str) -> None:
    stacks = found(getattr(stacked_tasks, name)())
    assert {ExpertProgram.decoded(stack.program).way for stack in stacks} == {WAYS[name]}
    assert len(stacks) == (1 if name == "whole_model" else 2)
    assert not any("heads" in weight or "scores" in weight for stack in stacks for weight in stack.names)


@pytest.mark.parametrize(("name", "reason"), [
    ("in_two_loops", "do not all run the same operations, or rows go through them twice"),
    ("dropping", "do not all run the same operations, or rows go through them twice"),
    ("own_autocast", "run under torch.autocast or torch.no_grad of the mixture's own"),
    ("without_gradients", "run under torch.autocast or torch.no_grad of the mixture's own"),
    ("channels", "no experts were found"),
    ("penalised", "read by other operations than their experts' own"),
])  # fmt: skip
def test_what_is_refused_says_why(name: str, reason: str) -> None:
    with pytest.raises(RefusedPlan, match=reason):
        found(getattr(stacked_tasks, name)())


def test_experts_must_divide() -> None:
    with pytest.raises(RefusedPlan, match="there are 4 experts, which cannot be dealt evenly over 3 ranks"):
        found(stacked_tasks.looped(), ep=3)


class Turning(stacked_tasks.Looped):
    """Reads its weights otherwise from the second forward on."""

    penalty = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        return made + self.w1.square().mean() if self.penalty else made


def test_weights_read_otherwise_than_at_the_look_are_named() -> None:
    mixture = Turning()
    experts = StackedExperts("mixture", mixture, ["w1", "b1", "w2", "b2"], stacked_tasks.EXPERTS, Axis.alone("ep"))
    x = torch.randn(5, stacked_tasks.WIDTH)
    assert torch.allclose(experts.run(mixture, mixture.forward, (x,), {}), mixture(x), atol=1e-5)
    mixture.penalty = True
    with pytest.raises(RunError, match=r"ep=1: 'mixture': stacked weights are read by other operations .*; use ep=1"):
        experts.run(mixture, mixture.forward, (x,), {})
    assert isinstance(mixture.w1, nn.Parameter), "weights are there again"


def grouped(x: torch.Tensor, stacked: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, stacked, offs=offs)


class GroupedProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = stacked_tasks.weights(4, 16, 32), stacked_tasks.weights(4, 32, 16)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        offs = counts.cumsum(0, dtype=torch.int32)
        inner = torch.nn.functional.silu(grouped(rows.bfloat16(), self.up.bfloat16(), offs))
        return grouped(inner, self.down.bfloat16(), offs).to(rows.dtype)


def test_grouped_products_are_dealt() -> None:
    mixture, counts = GroupedProducts(), torch.tensor([3, 0, 4, 1])
    rows = torch.randn(8, 16)
    experts = StackedExperts("mixture", mixture, ["up", "down"], 4, Axis.alone("ep"))
    made = experts.run(mixture, mixture.forward, (rows, counts), {})
    assert experts.program is not None and experts.program.way == "sorted"
    torch.testing.assert_close(made, mixture(rows, counts), rtol=0.02, atol=0.02)


def shares(plan: str) -> Any:
    task = stacked_tasks.looped()
    engine = parallelize(task, plan)
    engine.step(task.batch(0))
    return {name: tuple(param.shape) for name, param in engine.module.named_parameters() if ".w1" in name}


def test_each_rank_holds_its_experts_alone(pool: RankPool) -> None:
    held = pool.run(shares, 2, "dp_shard=2,ep=2,zero=0")
    assert held[1]["layers.0.w1"] == (stacked_tasks.EXPERTS // 2, stacked_tasks.WIDTH, stacked_tasks.INNER)


def test_the_forward_of_the_page_is_dealt(pool: RankPool) -> None:
    parity = verify("expert_tasks:routed_on_the_page", "dp_shard=2,ep=2", pool=pool, timeout_s=120)
    assert parity.parity, parity.text()


def test_rows_dealt_by_masks_without_a_choice_are_found(pool: RankPool) -> None:
    assert [stack.path for stack in found(expert_tasks.dealt())] == ["0.experts"]
    parity = verify("expert_tasks:dealt", "dp_shard=2,ep=2", pool=pool, timeout_s=120)
    assert parity.parity, parity.text()


@pytest.mark.parametrize("kind", [stacked_tasks.Looped, stacked_tasks.Written, stacked_tasks.Dense])
def test_any_number_of_rows_is_followed(kind: Any) -> None:
    """As many rows as a width, too: forms are remembered by everything but their number."""
    mixture = kind()
    names = [name for name, param in mixture.named_parameters() if name != "gate.weight"]
    experts = StackedExperts("mixture", mixture, names, stacked_tasks.EXPERTS, Axis.alone("ep"))
    for rows in (3, 5, 6, 10, 12, 2, 20):
        x = torch.randn(rows, stacked_tasks.WIDTH)
        assert torch.allclose(experts.run(mixture, mixture.forward, (x,), {}), mixture(x), atol=1e-5), rows
