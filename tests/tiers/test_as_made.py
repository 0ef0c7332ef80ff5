"""`gradients=as_made`: weights are updated within backward, and not one bit of a run changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Task, parallelize
from shardwise.comm.buckets import small_buckets
from shardwise.digest import digest
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.tiers import StateTiers, places, subgroups

STEPS = 3
LAYOUTS = {
    "dp_replicate=1": 1, "dp_replicate=2": 2, "dp_shard=2,zero=1": 2, "dp_shard=2,zero=2": 2, "dp_shard=2,zero=3": 2,
    "tp=2": 2, "cp=2,zero=3": 2, "dp_replicate=2,dp_shard=2,zero=2": 4, "dp_replicate=2,dp_shard=2,zero=3": 4,
    "tp=2,dp_shard=2,zero=1": 4,
}  # fmt: skip
SETTINGS = ["", "precision=bf16", "remat=full", "offload=optimizer:disk", "optimizer_state=8bit",
            "precision=bf16,reduce_dtype=bf16,offload=optimizer:disk:0.5"]  # fmt: skip


class Branches(nn.Module):
    """Uses some of its layers alone, others twice, one of them by a tied weight; one layer has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
        self.empty = nn.Linear(16, 0)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        skipped = set(range(3, 11)) if int(step[0]) % 2 else {2}  # all samples' steps are one
        for place, layer in enumerate(self.layers):
            x = x if place in skipped else torch.tanh(layer(x))
        return self.head(self.layers[1](x)) + self.empty(x).sum()


def branches() -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)), torch.full((8,), step)

    return Task(
        name="branches", model=Branches, batch=batch, inputs=lambda pair: (pair, {}),
        loss=lambda output, pair: (output.square().sum(), len(output)),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )  # fmt: skip


def made(name: str | Callable[[], Task], plan: str, steps: int = STEPS) -> dict[str, Any]:
    """Take steps in small buckets and sub-groups; returns losses, norms, digests, and updates within backward."""
    forced, size, update = places.has_own_memory, subgroups.SUBGROUP_BYTES, StateTiers.update
    early, held = [0], [0]

    def noted(tier: StateTiers, *args: Any) -> Any:
        early[0] += bool(torch._C._current_graph_task_id() != -1)
        return update(tier, *args)

    places.has_own_memory, subgroups.SUBGROUP_BYTES, StateTiers.update = lambda device: True, 20_000, noted
    try:
        task = getattr(tasks, name)() if isinstance(name, str) else name()
        with small_buckets():
            engine = parallelize(task, plan)
        assert task.batch is not None
        results = [engine.step(task.batch(step)) for step in range(steps)]
        return {
            "losses": [result.loss for result in results], "norms": [result.grad_norm for result in results],
            "weights": {key: digest(value) for key, value in engine.full_parameters()},
            "used": {key: digest(value) for key, value in engine.used_parameters()},
            "state": {
                f"{key}/{part}": digest(value)
                for key, kept in engine.full_optimizer_state()
                for part, value in kept.items()
                if isinstance(value, torch.Tensor)
            },
            "early": early[0], "gradients": engine.memory()["gradients"], "held": held[0],
        }  # fmt: skip
    finally:
        places.has_own_memory, subgroups.SUBGROUP_BYTES, StateTiers.update = forced, size, update


def assert_same(name: str | Callable[[], Task], plan: str, ranks: int, pool: RankPool) -> None:
    together, as_made = (pool.run(made, ranks, name, text) for text in (plan, f"{plan},gradients=as_made"))
    for one, other in zip(together, as_made, strict=True):
        for what in ("losses", "norms", "weights", "used", "state"):
            assert one[what] == other[what], f"{what} differ"
        assert not one["early"] and other["early"] >= STEPS
        assert one["gradients"] and other["gradients"] < one["gradients"]


QUICK = [
    ("dp_replicate=1", "offload=optimizer:disk"), ("dp_replicate=2", "precision=bf16"),
    ("dp_shard=2,zero=1", "remat=full"), ("dp_shard=2,zero=2", ""), ("dp_shard=2,zero=3", "offload=optimizer:disk"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "setting"), QUICK)
def test_same_bits(layout: str, setting: str, pool: RankPool) -> None:
    assert_same("decoder", ",".join(filter(None, [layout, setting])), LAYOUTS[layout], pool)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "setting"), [case for case in product(LAYOUTS, SETTINGS) if case not in QUICK])
def test_same_bits_in_full(layout: str, setting: str, pool: RankPool) -> None:
    assert_same("decoder", ",".join(filter(None, [layout, setting])), LAYOUTS[layout], pool)


@pytest.mark.parametrize("layout", ["dp_replicate=1", "dp_shard=2,zero=3"])
def test_layers_left_out_used_twice_and_tied(layout: str, pool: RankPool) -> None:
    """Of some steps whole sub-groups are left out, whose state lies on the disk between others'."""
    assert_same(branches, f"{layout},offload=optimizer:disk", LAYOUTS[layout], pool)


def test_left_out_layers_with_gradients_held(pool: RankPool) -> None:
    plain, on_disk = (
        pool.run(made, 1, branches, f"dp_replicate=1{more}", 4)[0] for more in ("", ",offload=optimizer:disk")
    )
    assert plain["weights"] == on_disk["weights"] and plain["state"] == on_disk["state"]
