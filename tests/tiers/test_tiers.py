"""A tier changes where the optimizer's state lies, and not one bit of a run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from mutations.tasks import adafactor

from shardwise import Task, parallelize
from shardwise.digest import digest
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.tiers import places, subgroups

LAYOUTS = {
    "dp_replicate=2": 2, "dp_shard=2,zero=1": 2, "dp_shard=2,zero=2": 2, "dp_shard=2,zero=3": 2, "tp=2": 2, "pp=2": 2,
    "cp=2": 2, "tp=2,dp_shard=2,zero=1": 4, "tp=2,dp_shard=2,zero=3": 4, "pp=2,dp_shard=2,zero=2": 4,
}  # fmt: skip
TIERS = ["optimizer:disk", "optimizer", "optimizer:host:0.5|optimizer:disk:0.5", "optimizer:disk:0.4"]
SETTINGS = ["", "accumulate=2", "precision=bf16", "clip"]
STEPS = 3


def ran(name: str | Callable[[], Task], plan: str, clip: float | None, steps: int = STEPS) -> dict[str, Any]:
    """Take steps in small sub-groups, the host's tier forced; returns losses and digests of all that is trained."""
    forced, size = places.has_own_memory, subgroups.SUBGROUP_BYTES
    places.has_own_memory, subgroups.SUBGROUP_BYTES = lambda device: True, 20_000
    try:
        task = getattr(tasks, name)() if isinstance(name, str) else name()
        engine = parallelize(task, plan, clip_norm=clip)
        assert task.batch is not None
        out: dict[str, Any] = {"losses": [engine.step(task.batch(step)).loss for step in range(steps)]}
        out["weights"] = {key: digest(value) for key, value in engine.full_parameters()}
        out["used"] = {key: digest(value) for key, value in engine.used_parameters()}
        out["state"] = {
            f"{key}/{part}": digest(value)
            for key, kept in engine.full_optimizer_state()
            for part, value in kept.items()
            if isinstance(value, torch.Tensor)
        }
        out["held"] = engine.memory()
        out["groups"] = len(engine.state.tier.groups) if engine.state.tier is not None else 0
        out["file"] = engine.state.shards.size if engine.state.shards is not None else 0
        out["notices"] = [notice for notice in engine.notices if "nothing moves for" in notice]
    finally:
        places.has_own_memory, subgroups.SUBGROUP_BYTES = forced, size
    return out


def assert_same(name: Any, layout: str, setting: str, tier: str, pool: RankPool, ranks: int) -> None:
    clip = 0.05 if setting == "clip" else None
    plan = ",".join(filter(None, [layout, "" if setting == "clip" else setting]))
    plain = pool.run(ran, ranks, name, plan, clip)
    moved = pool.run(ran, ranks, name, f"{plan},offload={tier}", clip)
    for without, within in zip(plain, moved, strict=True):
        # a bucket of masters is one unit: of a single one, less than half is nothing
        assert ("parameters" in tier) == (within["file"] > 0)
        if within["file"]:  # padding of each shard aside
            gone = without["held"]["parameters"] - within["held"]["parameters"]
            assert abs(within["file"] - gone) < 0.05 * within["file"] + 4096
        told = "".join(within["notices"])
        assert within["groups"] + within["file"] > 0 or "nothing moves for optimizer:disk:0.4: " in told
        for what in ("losses", "weights", "used", "state"):
            assert within[what] == without[what], f"{what} differ"


QUICK = [
    ("dp_shard=2,zero=1", "precision=bf16", TIERS[2]), ("dp_shard=2,zero=3", "accumulate=2", TIERS[3]),
    ("pp=2", "clip", TIERS[0]),
]  # fmt: skip
CASES = list(product(LAYOUTS, SETTINGS, TIERS))


@pytest.mark.parametrize(("layout", "setting", "tier"), QUICK)
def test_same_bits(layout: str, setting: str, tier: str, pool: RankPool) -> None:
    assert_same("decoder", layout, setting, tier, pool, LAYOUTS[layout])


@pytest.mark.long
@pytest.mark.parametrize(("layout", "setting", "tier"), [case for case in CASES if case not in QUICK])
def test_same_bits_in_full(layout: str, setting: str, tier: str, pool: RankPool) -> None:
    assert_same("decoder", layout, setting, tier, pool, LAYOUTS[layout])


SHARDED = {
    "dp_shard=2,zero=3": 2, "cp=2,zero=3": 2, "dp_shard=2,dp_replicate=2,zero=3": 4, "tp=2,dp_shard=2,zero=3": 4,
    "pp=2,dp_shard=2,zero=3": 4, "cp=2,dp_shard=2,zero=3": 4, "deterministic=true,dp_shard=2,zero=3": 2,
    "dp_shard=2,zero=3,remat=full": 2,
}  # fmt: skip
WEIGHTS = [
    "parameters:disk", "optimizer:disk|parameters:disk", "optimizer:disk:0.4|parameters:disk:0.5",
    "optimizer:host|parameters:disk|activations:disk",
]  # fmt: skip
QUICK_WEIGHTS = [("dp_shard=2,zero=3", "clip", WEIGHTS[2]), ("dp_shard=2,zero=3", "accumulate=2", WEIGHTS[1])]


@pytest.mark.parametrize(("layout", "setting", "tier"), QUICK_WEIGHTS)
def test_same_bits_of_weights(layout: str, setting: str, tier: str, pool: RankPool) -> None:
    assert_same("decoder", layout, setting, tier, pool, SHARDED[layout])


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "setting", "tier"), [case for case in product(SHARDED, SETTINGS, WEIGHTS) if case not in QUICK_WEIGHTS]
)
def test_same_bits_of_weights_in_full(layout: str, setting: str, tier: str, pool: RankPool) -> None:
    if "deterministic" in layout and setting == "accumulate=2":
        layout = layout.replace("true", "4")
    assert_same("decoder", layout, setting, tier, pool, SHARDED.get(layout, 2))


@pytest.mark.long
@pytest.mark.parametrize("tier", WEIGHTS[:3])
@pytest.mark.parametrize("name", [adafactor, "mlp_frozen_unused", "decoder_tied", "mlp"])
def test_same_bits_of_weights_of_other_modules(name: Any, tier: str, pool: RankPool) -> None:
    """Owners of whole tensors, frozen and unused weights, one weight in two units, shards of unequal size."""
    assert_same(name, "dp_shard=2,zero=3", "", tier, pool, 2)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp_shard=2,zero=1", "dp_shard=2,zero=3,precision=bf16", "dp_shard=2,zero=2"])
def test_whole_tensors_on_their_owners(layout: str, pool: RankPool) -> None:
    assert_same(adafactor, layout, "", "optimizer:disk", pool, 2)


@pytest.mark.long
@pytest.mark.parametrize("name", ["moe", "mlp_frozen_unused"])
@pytest.mark.parametrize("layout", ["dp_shard=2,zero=1,ep=2", "dp_shard=2,zero=3,precision=bf16,ep=2"])
def test_experts_and_unused_parameters(name: str, layout: str, pool: RankPool) -> None:
    layout = layout if name == "moe" else layout.replace(",ep=2", "")
    assert_same(name, layout, "", "optimizer:disk", pool, 2)


def one_weight() -> Task:
    """A single matrix, which one rank of two owns."""
    task = adafactor()
    return Task(
        model=lambda: torch.nn.Linear(4, 4, bias=False), loss=lambda o, b: (o.square().sum(), len(b)),
        batch=lambda step: torch.ones(6, 4) * (step + 1), optimizer=task.optimizer,
    )  # fmt: skip


def test_a_rank_that_updates_nothing_has_nothing_to_move(pool: RankPool) -> None:
    plain = pool.run(ran, 2, one_weight, "dp_shard=2,zero=1", None, 2)
    moved = pool.run(ran, 2, one_weight, "dp_shard=2,zero=1,offload=optimizer:disk", None, 2)
    assert [ranks["weights"] for ranks in moved] == [ranks["weights"] for ranks in plain]
    assert [ranks["groups"] for ranks in moved] == [1, 0] and not any(ranks["notices"] for ranks in moved)
