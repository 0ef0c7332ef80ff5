"""Which lists of modules are taken for experts that ep deals, and what is said of those that are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import joined_tasks
import listed_tasks
import pytest
import torch
from torch import nn

from shardwise import Plan, Task
from shardwise.engine.experts import look_for_experts
from shardwise.errors import RefusedPlan
from shardwise.parallel.expert.expert_forward import ExpertCall, Stack
from shardwise.precision import Precision
from shardwise.trace.deferred import build


def found(task: Task, ep: int = 2) -> list[Stack]:
    plan = Plan(dp_shard=ep, ep=ep)
    return look_for_experts(task, plan, Precision.of(plan), build(task.model, 0), task.batch(0))


@pytest.mark.parametrize("make", [
    listed_tasks.by_index, listed_tasks.by_mask, listed_tasks.sorted_rows, listed_tasks.by_choice, listed_tasks.slots,
])  # fmt: skip
def test_experts_in_a_list_are_found(make: Any) -> None:
    stacks = found(make())
    assert [stack.path for stack in stacks] == ["layers.0", "layers.1"]
    assert stacks[1].members == tuple(f"layers.1.experts.{n}" for n in range(4))
    assert len(stacks[0].names) == 12 and all(name.startswith("layers.0.experts.") for name in stacks[0].names)
    assert stacks[0].call == ExpertCall(0), "each row by itself: its own ranks may be given it where positions are cut"


class ByView(listed_tasks.ByIndex):
    """Needs its rows side by side in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(-1, x.shape[-1])).view(x.shape)


def test_rows_lie_in_the_trial_as_in_a_step() -> None:
    stacks = found(joined_tasks.of_words(partial(listed_tasks.Words, ByView)))
    assert [stack.call for stack in stacks] == [ExpertCall(0)] * 2


def test_a_module_that_is_given_choices_may_hold_a_list() -> None:
    stacks = found(listed_tasks.by_name())
    assert [(stack.path, stack.experts, stack.call) for stack in stacks] == [
        ("layers.0.inner", 4, None), ("layers.1.inner", 4, None)
    ]  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), [
    (listed_tasks.drawn_by_python, "draws by Python's generator"),
    (listed_tasks.batch_norms, "more than 1 value per channel"),
    (listed_tasks.chained, "no experts were found"), (listed_tasks.tied_by_norm, "held by several modules"),
    (listed_tasks.weights_outside, "used outside of its module"), (listed_tasks.told_their_number, "other things than"),
    (listed_tasks.all_rows, "no experts were found"),
])  # fmt: skip
def test_what_cannot_be_dealt_is_refused_with_the_reason(make: Any, reason: str) -> None:
    with pytest.raises(RefusedPlan, match=reason):
        found(make())


def test_whether_experts_draw_is_known() -> None:
    drawing = (listed_tasks.dropout, listed_tasks.noisy, listed_tasks.jittered)
    assert [[stack.draws for stack in found(make())] for make in drawing] == [[True] * 2, [False] * 2, [False] * 2]


def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(RefusedPlan, match="there are 4, which cannot be dealt evenly over 3 ranks"):
        found(listed_tasks.by_index(), ep=3)


def test_a_trial_of_large_experts_needs_the_memory_of_one() -> None:
    """Their random weights overlap."""
    from shardwise.parallel.expert.trial_weights import alike_weights

    task = listed_tasks.by_index()
    built = build(task.model, 0)
    members = tuple(f"layers.0.experts.{n}" for n in range(4))
    value = alike_weights(built, "layers.0", members, torch.float64, torch.Generator())
    weights = [value(f"experts.{n}.w1.weight", nn.Parameter(torch.empty(5, 6))) for n in range(4)]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert not torch.equal(weights[0], weights[1])
