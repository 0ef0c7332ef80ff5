"""Experts that are modules of their own in a list, on ranks of `ep`: equal to one process."""

from __future__ import annotations

from typing import Any

import listed_tasks
import pytest
import torch
from torch import Tensor

from shardwise import parallelize, verify
from shardwise.comm import Axis
from shardwise.errors import RefusedPlan, RunError
from shardwise.layout.plan import SCHEDULES
from shardwise.layout.schedule_kinds import KINDS
from shardwise.parallel.expert.two_passes import ListedExperts
from shardwise.ranks import RankPool

KINDS_OF_LISTS = ("by_index", "by_mask", "sorted_rows", "by_choice", "slots", "by_name")
CASES = [
    ("by_index", "dp_shard=2,ep=2"), ("sorted_rows", "dp_shard=4,ep=2,zero=1"), ("by_name", "dp_shard=2,ep=2,zero=0"),
    ("skipping", "dp_shard=2,ep=2,zero=2,accumulate=2"), ("by_mask", "dp_shard=2,ep=2,zero=2,accumulate=4"),
    ("frozen", "dp_shard=2,ep=2"), ("noisy", "dp_shard=2,ep=2,remat=full"), ("jittered", "dp_shard=4,ep=2,zero=1"),
    ("by_index", "tp=2,dp_shard=2,ep=2,zero=2"), ("words", "cp=2,dp_shard=2,ep=4,zero=1"),
    ("kept_losses", "dp_replicate=2,dp_shard=2,ep=2,remat=full"),
]  # fmt: skip
PLANS = [
    *(f"dp_shard=2,ep=2,zero={zero}" for zero in range(4)), *(f"dp_shard=4,ep=2,zero={zero}" for zero in range(4)),
    "dp_replicate=2,dp_shard=2,ep=2", "dp_replicate=2,dp_shard=2,ep=2,zero=1,accumulate=3", "dp_shard=4,ep=4,zero=2",
    "tp=2,dp_shard=2,ep=2", "tp=2,sp=true,dp_shard=2,ep=2,zero=1", "dp_shard=2,ep=2,remat=selective,accumulate=2",
    *(f"pp=2,dp_shard=2,ep=2,schedule={schedule},microbatches=4,zero={zero}" for schedule in SCHEDULES
      for zero in ((2, 0) if KINDS[schedule].split else (3, 1))),
    "pp=2,dp_shard=2,ep=2,remat=full", "pp=2,tp=2,dp_shard=2,ep=2,zero=1",
]  # fmt: skip
INNER = ["cp=2,ep=2", "cp=4,ep=4,zero=1", "cp_ulysses=2,dp_shard=2,ep=4", "cp=2,tp=2,ep=2", "cp=2,dp_shard=2,ep=2,pp=2"]
LONG = [(name, plan) for name in (*KINDS_OF_LISTS, "skipping", "kept_losses", "frozen") for plan in PLANS]
LONG += [(name, plan) for name in ("words", "words_by_mask", "words_with_slots") for plan in INNER]
LONG += [("by_mask", "pp=2,dp_shard=2,ep=2,zero=1")]
LONG += [(name, plan) for name in ("noisy", "jittered") for plan in PLANS[::3]]
LONG += [("words_by_sample", plan) for plan in PLANS[:8]]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_equal_to_one_process(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(f"listed_tasks:{name}", plan, clip_norm=0.5, pool=pool, timeout_s=120)
    assert parity.parity, parity.text()
    assert parity.float64


def losses_of_drawing_experts(plan: str, randomness: Any = "fast") -> list[float]:
    task = listed_tasks.dropout()
    engine = parallelize(task, plan, randomness=randomness)
    return [engine.step(task.batch(step)).loss for step in range(2)]


def test_experts_that_draw_run_where_each_rank_draws_its_own(pool: RankPool) -> None:
    plain, recomputed = (
        pool.run(losses_of_drawing_experts, 2, f"dp_shard=2,ep=2{more}")[0] for more in ("", ",remat=full")
    )
    assert plain == pytest.approx(recomputed, rel=1e-5)  # the same masks in backward
    with pytest.raises(RefusedPlan, match=r"the experts of 'layers.0' draw .*randomness=fast"):
        pool.run(losses_of_drawing_experts, 2, "dp_shard=2,ep=2", "global")


@pytest.mark.parametrize("draws", [True, False])
def test_what_comes_behind_draws_other_bits_than_experts(draws: bool) -> None:
    mixture = listed_tasks.dropout().model().layers[0]
    x = torch.randn(5, listed_tasks.WIDTH)
    listed = ListedExperts("mixture", list(mixture.experts), (0,), Axis.alone("ep"), draws=draws)
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        listed.run(mixture, mixture.forward, (x,), {})
        behind = torch.rand(3)
        torch.set_rng_state(state)
        first = torch.rand(3)
    assert torch.equal(behind, first) != draws


class Later(listed_tasks.ByIndex):
    """From the third forward on, rows of a second forward are others than the first one's."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Later.calls += 1
        return super().forward(x * (1 + 0.01 * Later.calls) if Later.calls > 2 else x)


def test_rows_of_another_value_in_the_second_forward_end_the_step() -> None:
    """The trial cannot meet all that a forward may do."""
    mixture = Later()
    listed = ListedExperts("mixture", list(mixture.experts), (0,), Axis.alone("ep"))
    own, x = mixture.forward, torch.randn(5, listed_tasks.WIDTH)
    assert torch.allclose(listed.run(mixture, own, (x,), {}), mixture.__class__.__mro__[1].forward(mixture, x))
    with pytest.raises(RunError, match="gives its experts other rows when it runs again"):
        listed.run(mixture, own, (x,), {})


@pytest.mark.long
@pytest.mark.parametrize(("name", "plan"), LONG)
def test_equal_to_one_process_in_full(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(f"listed_tasks:{name}", plan, clip_norm=0.5, pool=pool, timeout_s=240)
    assert parity.parity, parity.text()
