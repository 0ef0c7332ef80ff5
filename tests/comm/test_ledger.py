"""Bytes on the wire in the second step, on 2 and 4 ranks, against the formulas that each technique states.

P is the bytes of the trainable parameters in the dtype that travels, N the ranks of dp_shard, R of dp_replicate:

    dp_replicate   2 (R-1)/R P                         for each optimizer step
    zero=1         (N-1)/N P gradients + (N-1)/N P parameters
    zero=2         (N-1)/N P gradients for each micro-batch + (N-1)/N P parameters
    zero=3         3 (N-1)/N P for each micro-batch
    with replicas  2 (R-1)/R P/N more, over dp_replicate, for each optimizer step
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import Plan, Task, parallelize
from shardwise.cluster import Cluster
from shardwise.comm import Axis, Ledger, Observer, all_gather, all_reduce, tagged
from shardwise.costs.block import BlockCosts
from shardwise.costs.kernels import Kernels
from shardwise.costs.layout import Layout
from shardwise.costs.shapes import Shape
from shardwise.costs.software import software
from shardwise.models import tasks
from shardwise.models.decoder import Decoder
from shardwise.models.mlp import MLP, MLPConfig
from shardwise.ranks import RankPool

GRIDS = {
    2: ["dp_replicate=2", "dp_shard=2,zero=0", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3"],
    4: [
        "dp_replicate=4", "dp_shard=4,zero=1", "dp_shard=4,zero=2", "dp_shard=4,zero=3",
        "dp_replicate=2,dp_shard=2,zero=0", "dp_replicate=2,dp_shard=2,zero=1", "dp_replicate=2,dp_shard=2,zero=2",
        "dp_replicate=2,dp_shard=2,zero=3",
    ],
}  # fmt: skip
CASES = [
    (size, f"{plan},accumulate={accumulate}")
    for size, plans in GRIDS.items() for plan in plans for accumulate in (1, 3)
] + [(2, f"{plan},precision=bf16") for plan in GRIDS[2]]  # fmt: skip
NODE = Cluster.parse("8 h100-sxm-80gb")
WIDE = MLPConfig(features=12, hidden=64, layers=4, outputs=tasks.CLASSES)


def batch(step: int) -> tuple[Tensor, Tensor]:
    return tasks.feature_batch(step, samples=12)


def wide_mlp() -> Task:
    return tasks.mlp().with_(model=partial(MLP, WIDE), batch=batch)


def sequences(step: int) -> dict[str, Tensor]:
    return tasks.token_batch(step, samples=12, length=10)


def plain_decoder() -> Task:
    return tasks.decoder().with_(model=partial(Decoder, replace(tasks.TINY_DECODER, layers=2)), batch=sequences)


MODELS = {"mlp": wide_mlp, "decoder": plain_decoder}


def traffic(model: str, plans: list[str]) -> list[dict[str, Any]]:
    """For each plan: bytes that this rank received in the second step, by axis and tag, and the padding at most."""
    task = MODELS[model]()
    found = []
    for plan in plans:
        engine = parallelize(task, plan, check_loss=False)
        engine.step(task.batch(0))  # type: ignore[misc]
        with engine.observe() as ledger:
            engine.step(task.batch(1))  # type: ignore[misc]
        axes = {row["axis"] for row in ledger.rows()}
        tensors = len(list(engine.module.parameters()))
        found.append({
            "axes": {axis: ledger.received(axis=axis) for axis in axes if ledger.received(axis=axis)},
            "control": ledger.received(control=True) - ledger.received(),
            "tags": {row["tag"] for row in ledger.rows()},
            "tensors": tensors,
        })  # fmt: skip
    return found


def elements(model: str) -> int:
    return sum(param.numel() for param in MODELS[model]().model().parameters() if param.requires_grad)


def formula(plan: Plan, count: int) -> dict[str, float]:
    """Bytes that each rank receives in one optimizer step, by axis, of `count` parameters."""
    shards, replicas, micro_batches = plan.dp_shard, plan.dp_replicate, plan.accumulate
    gradients = 4 * count  # summed in float32 under every precision here
    weights = (2 if plan.precision == "bf16" else 4) * count
    if plan.zero == 0:
        ranks = shards * replicas
        axis = "dp_replicate" if shards == 1 else "dp_shard" if replicas == 1 else "data"
        return {axis: 2 * (ranks - 1) / ranks * gradients}
    over_shards = (shards - 1) / shards
    found = {
        1: over_shards * (gradients + weights),
        2: over_shards * (gradients * micro_batches + weights),
        3: over_shards * (gradients + 2 * weights) * micro_batches,
    }
    by_axis = {"dp_shard": found[plan.zero]}
    if replicas > 1:
        by_axis["dp_replicate"] = 2 * (replicas - 1) / replicas * gradients / shards
    return by_axis


@pytest.fixture(scope="module")
def measured(pool: RankPool) -> Iterator[Any]:
    """measured(model, ranks): {plan: what each rank found}, measured once."""

    @cache
    def measure(model: str, size: int) -> dict[str, list[dict[str, Any]]]:
        plans = [plan for ranks, plan in CASES if ranks == size]
        by_rank = pool.run(traffic, size, model, plans, timeout_s=200)
        return {plan: [found[place] for found in by_rank] for place, plan in enumerate(plans)}

    yield measure


# the formula knows of a model its elements alone, so the second one is measured on two ranks
@pytest.mark.parametrize(
    ("model", "ranks", "text"),
    [
        pytest.param(model, *case, id=f"{model}-{case[1]}", marks=[pytest.mark.long] * (model != "mlp" and case[0] > 2))
        for model in MODELS
        for case in CASES
    ],
)
def test_a_step_moves_what_the_formula_says(model: str, ranks: int, text: str, measured: Any) -> None:
    plan = Plan.parse(text)
    expected = formula(plan, elements(model))
    for found in measured(model, ranks)[text]:
        assert found["axes"].keys() == expected.keys()
        padding = 4 * ranks * found["tensors"] * plan.accumulate  # each tensor or bucket is filled up to the ranks
        for axis, received in found["axes"].items():
            assert received == pytest.approx(expected[axis], rel=0.01, abs=padding), axis


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_receives_alike(ranks: int, measured: Any) -> None:
    for found in measured("mlp", ranks).values():
        assert len({tuple(sorted(f["axes"].items())) for f in found}) == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_control_traffic_is_a_few_numbers(ranks: int, measured: Any) -> None:
    for found in measured("mlp", ranks).values():
        assert all(0 < f["control"] < 1024 for f in found)
        assert all(f["tags"] <= {"gradients", "parameters", "control", "torch"} for f in found)


def around_rings() -> tuple[int, int]:
    """Bytes that this rank receives around the rings of a step in bf16, and how many positions it was given in all."""
    from sequence_tasks import grouped

    task = grouped()
    engine = parallelize(task, "cp=2,precision=bf16", check_loss=False)
    batch = task.batch(0)
    with engine.observe() as ledger:
        engine.step(batch)
    rings = sum(row["received_bytes"] for row in ledger.rows() if row["tag"] == "ring")
    return rings, batch["tokens"].numel()


def test_a_ring_moves_what_a_forecast_says(pool: RankPool) -> None:
    """Keys and values forward; again backward, and the sums of their gradients in float32."""
    found = pool.run(around_rings, 2)
    shape = Shape(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=48, vocab=17)
    costs = BlockCosts(shape, Layout(cp=2, seq=found[0][1]), software("shardwise"), Kernels(NODE.device))
    told = [sum(m.size_bytes for m in way if m.op == "ring") for way in costs._messages()]
    assert sum(received for received, _ in found) == shape.layers * sum(told), "each block goes to the one other rank"
    assert told[1] == 3 * told[0]
    fused = replace(costs, software=software("megatron-core"))._messages()[1]
    assert [m.size_bytes for m in fused if m.op == "ring"] == [2 * told[0]]


# --- the ledger and the observer by themselves


def test_factors() -> None:
    ledger = Ledger()
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"):
        ledger.record("x", op, "a", 1000, 4)
    received = {row["op"]: row["received_bytes"] for row in ledger.rows()}
    assert received == {
        "all_reduce": 1500, "all_gather": 750, "reduce_scatter": 750, "all_to_all": 750, "broadcast": 1000, "barrier": 0
    }  # fmt: skip
    ledger.record("control", "all_gather", "b", 1000, 4)
    assert ledger.received() == 4750 and ledger.received(axis="b") == 0
    assert ledger.received(axis="b", control=True) == 750
    ledger.clear()
    assert ledger.rows() == []


def raw_collectives() -> dict[str, list[tuple[str, str, float]]]:
    """Each of torch's collectives in turn, and what the observer wrote down."""
    import torch.distributed._functional_collectives as functional

    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    full, part = torch.ones(8 * size), torch.ones(8)
    axis = Axis("data", size, rank, group, tuple(range(size)))
    calls = {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_reduce_async": lambda: dist.all_reduce(full, async_op=True).wait(),
        "all_gather": lambda: dist.all_gather([torch.empty(8) for _ in range(size)], part),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(full, part),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, full),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(8 * size), full),
        "broadcast": lambda: dist.broadcast(full, 0),
        "barrier": lambda: dist.barrier(),
        "functional_all_reduce": lambda: functional.all_reduce(full, "sum", group).wait(),
        "functional_all_gather": lambda: functional.all_gather_tensor(part, 0, group).wait(),
        "functional_reduce_scatter": lambda: functional.reduce_scatter_tensor(full, "sum", 0, group).wait(),
        "ours": lambda: (all_reduce(full, axis, "mine"), all_gather(full, part, axis, "mine")),
        "send_recv": lambda: dist.send(part, 1) if rank == 0 else dist.recv(part, 0),
    }
    found = {}
    for name, call in calls.items():
        ledger = Ledger()
        with Observer(ledger, {group.group_name: "data"}):
            call()
        found[name] = [(row["tag"], row["op"], row["received_bytes"]) for row in ledger.rows()]
        assert all(row["axis"] == "data" for row in ledger.rows())
    return found


def test_every_collective_is_seen_with_its_bytes(pool: RankPool) -> None:
    first, second = pool.run(raw_collectives, 2)
    whole, reduced = 64, 64  # a tensor of 16 float32 over two ranks
    expected = {
        "all_reduce": [("torch", "all_reduce", reduced)],
        "all_reduce_async": [("torch", "all_reduce", reduced)],
        "all_gather": [("torch", "all_gather", whole / 2)],
        "all_gather_into_tensor": [("torch", "all_gather", whole / 2)],
        "reduce_scatter_tensor": [("torch", "reduce_scatter", whole / 2)],
        "all_to_all_single": [("torch", "all_to_all", whole / 2)],
        "broadcast": [("torch", "broadcast", whole)],
        "barrier": [("torch", "barrier", 0)],
        "functional_all_reduce": [("torch", "all_reduce", reduced)],
        "functional_all_gather": [("torch", "all_gather", whole / 2)],
        "functional_reduce_scatter": [("torch", "reduce_scatter", whole / 2)],
        "ours": [("mine", "all_gather", whole / 2), ("mine", "all_reduce", reduced)],
    }
    for found in (first, second):
        assert {name: rows for name, rows in found.items() if name != "send_recv"} == expected
    assert first["send_recv"] == [("torch", "point_to_point", 0)]
    assert second["send_recv"] == [("torch", "point_to_point", 32)]


def test_tags_nest() -> None:
    from shardwise.comm.observe import _local

    with tagged("outer"):
        with tagged("inner"):
            assert _local.tag == "inner"
        assert _local.tag == "outer"
    assert _local.tag is None


def test_one_rank_issues_nothing() -> None:
    task = wide_mlp()
    engine = parallelize(task, "single")
    with engine.observe() as ledger:
        engine.step(batch(0))
    assert ledger.rows() == []
