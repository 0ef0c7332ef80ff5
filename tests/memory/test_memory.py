"""Bytes at rest and in flight, by rank and stage, against the closed forms. Counted twice: by the engine and here.

P elements over N ranks of dp_shard; AdamW keeps two numbers for each element. fp32 | bf16 with float32 masters:

                  parameters                   gradients    optimizer
    dp_replicate  4 P       | 2 P + 4 P        4 P          8 P
    zero=1        4 P       | 2 P + 4 P/N      4 P          8 P/N
    zero=2        4 P       | 2 P + 4 P/N      4 P/N        8 P/N
    zero=3        4 P/N     | 4 P/N            4 P/N        8 P/N
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import Plan, Task, parallelize
from shardwise.comm import Axis, reduce_scatter
from shardwise.memory.live import LiveBytes, storage_bytes
from shardwise.models import tasks
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.mlp import MLP, MLPConfig
from shardwise.ranks import RankPool

WIDE = MLPConfig(features=12, hidden=64, layers=8, outputs=tasks.CLASSES)
CONFIG = DecoderConfig(vocab=tasks.VOCAB, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, context=16)
PLANS = {
    2: ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3"],
    4: ["dp_replicate=4", "dp_shard=4,zero=1", "dp_shard=4,zero=2", "dp_shard=4,zero=3",
        "dp_replicate=2,dp_shard=2,zero=3"],
}  # fmt: skip
CASES = [(ranks, f"{plan},accumulate=3{dtype}") for ranks, plans in PLANS.items() for plan in plans
         for dtype in ("", ",precision=bf16")]  # fmt: skip
MEASURED = [("mlp", *case) for case in CASES] + [("decoder", *case) for case in CASES if "bf16" not in case[1]]


def batch(step: int) -> tuple[Tensor, Tensor]:
    return tasks.feature_batch(step, samples=12)


def sequences(step: int) -> dict[str, Tensor]:
    return tasks.token_batch(step, samples=12, length=10)


def wide_mlp() -> Task:
    return tasks.mlp().with_(model=partial(MLP, WIDE), batch=batch)


def plain_decoder() -> Task:
    return tasks.decoder().with_(model=partial(Decoder, CONFIG), batch=sequences)


MODELS = {"mlp": wide_mlp, "decoder": plain_decoder}


def elements(model: str) -> int:
    return sum(param.numel() for param in MODELS[model]().model().parameters())


def largest_block(model: str) -> int:
    """Elements of the largest parameter: what may lie unevenly or be padded."""
    return max(param.numel() for param in MODELS[model]().model().parameters())


# --- on the ranks


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def everything_alive() -> dict[int, Any]:
    """Address -> storage of every tensor that Python can reach in this process: a count that asks no engine.

    What is held so keeps its address, which no later storage gets then.
    """
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.device.type == "cpu":
            storage = local(thing).untyped_storage()
            found[storage._cdata] = storage
    return found


def new_bytes(before: dict[int, Any]) -> int:
    return sum(storage.nbytes() for key, storage in everything_alive().items() if key not in before)


def census(model: str, plans: list[str]) -> list[dict[str, Any]]:
    """For each plan, this rank's bytes: at rest as the engine counts and as Python finds, and at points of a step."""
    return [one_census(MODELS[model](), plan) for plan in plans]


def one_census(task: Task, plan: str) -> dict[str, Any]:
    before = everything_alive()
    assert task.batch is not None
    engine = parallelize(task, plan, check_loss=False)
    engine.step(task.batch(0))
    after_forward: list[int] = []
    after_backward: list[int] = []
    full_after_forward: list[bool] = []

    def on_forward(*_: Any) -> None:
        params = list(engine.module.parameters())
        after_forward.append(storage_bytes(params))
        full_after_forward.append(any(local(p).numel() == p.numel() > 64 for p in params))

    finish = engine.technique.finish_micro_batch

    def on_finish() -> set[int]:
        used = finish()
        count = engine.memory()["gradients"]
        assert count is not None
        after_backward.append(count)
        return used

    handle = engine.module.register_forward_hook(on_forward)
    engine.technique.finish_micro_batch = on_finish  # type: ignore[method-assign]
    engine.step(task.batch(1))
    handle.remove()
    del engine.technique.finish_micro_batch
    buffers = storage_bytes(engine.module.buffers())
    return {
        "memory": engine.memory(),
        "alive": new_bytes(before) - buffers,
        "after_forward": after_forward,
        "full_after_forward": full_after_forward,
        "after_backward": after_backward,
    }


# --- the closed forms


def formula(plan: Plan, count: int) -> dict[str, float]:
    """Bytes on each rank of a model with `count` elements."""
    shards = plan.dp_shard if plan.zero else 1
    mixed = plan.precision == "bf16"
    whole, piece = 4.0 * count, 4.0 * count / shards
    if plan.zero == 3:
        parameters = piece
    else:
        parameters = 2.0 * count + (piece if plan.zero else whole) if mixed else whole
    return {
        "parameters": parameters,
        "gradients": piece if plan.zero >= 2 else whole,
        "optimizer": 2 * piece,
    }


@pytest.fixture(scope="module")
def measured(pool: RankPool) -> Iterator[Any]:
    """measured(model, ranks): {plan: what each rank found}, measured once."""

    @cache
    def measure(model: str, size: int) -> dict[str, list[dict[str, Any]]]:
        plans = [plan for name, ranks, plan in MEASURED if (name, ranks) == (model, size)]
        by_rank = pool.run(census, size, model, plans, timeout_s=200)
        return {plan: [found[place] for found in by_rank] for place, plan in enumerate(plans)}

    yield measure


# the closed forms know of a model its elements alone, so the second one is measured on two ranks
EACH = pytest.mark.parametrize(
    ("model", "ranks", "text"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[2]}", marks=[pytest.mark.long] * (case[0] != "mlp" and case[1] > 2))
        for case in MEASURED
    ],
)


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer"])
@EACH
def test_bytes_at_rest(model: str, ranks: int, text: str, kind: str, measured: Any) -> None:
    plan = Plan.parse(text)
    expected = formula(plan, elements(model))[kind]
    by_rank = [found["memory"][kind] for found in measured(model, ranks)[text]]
    slack = 4 * largest_block(model) * (2 if kind == "optimizer" else 1) / plan.dp_shard if plan.zero else 0
    for held in by_rank:
        assert held == pytest.approx(expected, rel=0.02, abs=slack)
    assert max(by_rank) <= 1.05 * sum(by_rank) / ranks


@EACH
def test_nothing_else_is_held(model: str, ranks: int, text: str, measured: Any) -> None:
    """What Python can reach between steps is parameters, gradients and optimizer state, as the engine counts them."""
    for found in measured(model, ranks)[text]:
        counted = sum(found["memory"][kind] for kind in ("parameters", "gradients", "optimizer"))
        assert found["alive"] == pytest.approx(counted, rel=0.02, abs=4096)


@pytest.mark.parametrize(("ranks", "text"), CASES, ids=[plan for _, plan in CASES])
def test_in_flight(ranks: int, text: str, measured: Any) -> None:
    plan = Plan.parse(text)
    expected = formula(plan, elements("mlp"))
    slack = 4 * largest_block("mlp")
    for found in measured("mlp", ranks)[text]:
        assert len(found["after_forward"]) == len(found["after_backward"]) == 3
        if plan.zero == 3:
            assert not any(found["full_after_forward"]), "parameters are gathered no longer once forward has ended"
            assert max(found["after_forward"]) <= expected["parameters"] + slack
        if plan.zero >= 2:
            assert max(found["after_backward"]) <= 1.02 * expected["gradients"] + slack, "a whole gradient is left"
            assert min(found["after_backward"]) >= 0.98 * expected["gradients"] - slack, "some are held uncounted"
        if plan.zero == 1:
            assert found["after_backward"][0] <= 1.02 * expected["gradients"] + slack


@pytest.mark.parametrize("ranks", [2, 4])
def test_more_ranks_hold_less(ranks: int, measured: Any) -> None:
    found = {plan: measured("mlp", ranks)[f"{plan},accumulate=3"][0]["memory"] for plan in PLANS[ranks]}
    total = {plan: sum(m[k] for k in ("parameters", "gradients", "optimizer")) for plan, m in found.items()}
    stages = [total[plan] for plan in PLANS[ranks][:4]]
    assert stages == sorted(stages, reverse=True) and len(set(stages)) == 4


# --- live bytes: what is allocated, gathered parameters among it


def live_through_a_step(plan: str) -> dict[str, int]:
    """Live bytes after the first unit's forward, after forward and after backward, above those at rest."""
    task = wide_mlp()
    assert task.batch is not None
    with LiveBytes() as live:
        engine = parallelize(task, plan, check_loss=False)
        engine.step(task.batch(0))
        gc.collect()
        rest = live.now
        with torch.no_grad():
            live.reset_peak()
            engine.evaluate([task.batch(1)])
            gc.collect()
            return {"rest": rest, "after": live.now, "peak": live.peak}


def test_forward_under_zero3_never_holds_the_whole_model(pool: RankPool) -> None:
    whole = 4 * elements("mlp")
    for found in pool.run(live_through_a_step, 4, "dp_shard=4,zero=3,accumulate=3"):
        assert found["after"] - found["rest"] < 0.05 * whole, found
        assert found["peak"] - found["rest"] < 0.75 * whole, found


def test_live_bytes_counts_storages_once() -> None:
    with LiveBytes() as live:
        a = torch.zeros(1000)
        view = a[10:20]
        assert live.now == 4000
        b = a + 1
        assert live.now == 8000 == live.peak
        del a
        assert live.now == 8000, "a view keeps the storage"
        del view
        gc.collect()
        assert live.now == 4000 and live.peak == 8000
        live.reset_peak()
        assert live.peak == 4000
        b.untyped_storage().resize_(0)
        assert live.now == 0, "a storage that was given back holds nothing"
        b.untyped_storage().resize_(4000)
        assert live.now == 4000


def test_live_bytes_read_again_what_they_are_told_of() -> None:
    told: list[torch.UntypedStorage] = []
    a, b = torch.zeros(1000), torch.zeros(10)
    with LiveBytes(resized=told) as live:
        live.count([a, b])
        for size in (0, 8000, 400):
            a.untyped_storage().resize_(size)
            told.append(a.untyped_storage())
            assert live.now == size + 40 and not told
        c = b + 1
        assert live.now == 400 + 80 and live.peak == 4040
        a.untyped_storage().resize_(8000)
        told.append(a.untyped_storage())
        del c
        d = b + 1
        assert live.peak == 8080, "an op notes what was resized before it"
        del d


def held_by_collectives() -> list[int]:
    """Live bytes beyond two buckets and their shards: once both are on their way, and after each wait."""
    axis = Axis("world", 2, dist.get_rank(), dist.group.WORLD, (0, 1))
    with LiveBytes() as live:
        full, mine = [torch.ones(1000) for _ in range(2)], [torch.empty(500) for _ in range(2)]
        rest = live.now
        pending = [reduce_scatter(*pair, axis, "gradients", wait=False) for pair in zip(mine, full, strict=True)]
        found = [live.now - rest]
        for one in pending:
            one.wait()
            for _ in range(200):  # gloo's thread lets go of its copy in its own time
                if live.now - rest < found[-1]:
                    break
                time.sleep(0.01)
            found.append(live.now - rest)
    return found


def test_live_bytes_see_the_copy_that_gloo_keeps_until_somebody_waits(pool: RankPool) -> None:
    assert pool.run(held_by_collectives, 2) == [[8000, 4000, 0]] * 2


def test_storage_bytes_counts_views_once() -> None:
    a = torch.zeros(10, dtype=torch.float64)
    assert storage_bytes([a, a[2:4], None, torch.zeros(3)]) == 92
