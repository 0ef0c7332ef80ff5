"""`deterministic`: the same bits on any number of data ranks, whatever holds weights, gradients and state."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise import Task, parallelize, train, verify
from shardwise.comm.tree import TreeSum
from shardwise.digest import digest
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.layout import Plan
from shardwise.layout.batch_pieces import BatchPieces
from shardwise.ranks import RankPool
from shardwise.step.train_step import dealt

PLANS = [
    "dp_replicate=2", "dp_replicate=3", "dp_shard=4,zero=0", "dp_shard=2,zero=1", "dp_shard=3,zero=2",
    "dp_shard=4,zero=2",
    "dp_shard=2,zero=3", "dp_shard=3,zero=3", "dp_shard=4,zero=3", "accumulate=2", "accumulate=2,dp_shard=3,zero=1",
    "accumulate=2,dp_shard=2,zero=3", "accumulate=4,dp_replicate=3",
]  # fmt: skip
WIDTH, SAMPLES = 13, 20  # 4 of 24 pieces are empty


class Noisy(nn.Module):
    """Odd shapes, dropout, a weight without dims and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.leave = nn.Linear(WIDTH, 5)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.drop(x + block(x))
        return self.leave(x) * self.temperature


def batch(step: int, samples: int = SAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    weight = torch.rand(samples, generator=generator)  # a global weight that is no whole number
    return {"x": torch.randn(samples, 7, generator=generator), "weight": weight}


def weighted(output: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (output.square().mean(1) * given["weight"]).sum(), given["weight"].sum()


def noisy(model: Any = Noisy) -> Task:
    return Task(model=model, batch=batch, loss=weighted, inputs=lambda given: ((given["x"],), {}),
                optimizer=partial(torch.optim.AdamW, lr=0.01))  # fmt: skip


def bits(plan: str, randomness: Any, samples: tuple[int, ...]) -> dict[str, Any]:
    """What a run came to, to the bit: losses, norms, weights, and what the modules of this rank compute with."""
    engine = parallelize(noisy(), plan, clip_norm=0.05, randomness=randomness, device="cpu")
    results = []
    for step, count in enumerate(samples):
        parts = dealt(engine.state, batch(step, count))  # read by each rank into memory of its own, as a loader does
        results.append(engine.step([replace(part, batch=tree_map(torch.clone, part.batch)) for part in parts]))
    found: dict[str, Any] = {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}
    found |= {name: digest(value) for name, value in engine.full_parameters()}
    return found | {f"used {name}": digest(value) for name, value in engine.used_parameters()}


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> dict[str, Any]:
    return pool.run(bits, 1, "deterministic=true", "fast", (SAMPLES,) * 3)[0]


@pytest.mark.parametrize("plan", PLANS)
def test_any_number_of_ranks_has_the_same_bits(plan: str, alone: dict[str, Any], pool: RankPool) -> None:
    for found in pool.run(bits, Plan.parse(plan).world_size, f"{plan},deterministic=true", "fast", (SAMPLES,) * 3):
        assert found == alone


@pytest.mark.parametrize("plan", ["dp_replicate=3", "dp_shard=2,zero=2", "dp_shard=4,zero=3"])
def test_masks_by_place_and_batches_that_differ_in_size(plan: str, pool: RankPool) -> None:
    """In float64, in which sums of losses and weights are rounded too."""
    samples, asked = (SAMPLES, 5, 24), "deterministic=12,precision=fp64"
    alone = pool.run(bits, 1, asked, "global", samples)[0]
    for found in pool.run(bits, Plan.parse(plan).world_size, f"{plan},{asked}", "global", samples):
        assert found == alone


def test_without_it_bits_differ(pool: RankPool) -> None:
    """Else these tests could not fail: sums are taken in another order on three ranks."""
    alone = pool.run(bits, 1, "single", "global", (SAMPLES,) * 3)[0]
    assert pool.run(bits, 3, "dp_replicate=3", "global", (SAMPLES,) * 3)[0] != alone


@pytest.mark.parametrize("plan", ["single", "dp_replicate=2,accumulate=2", "dp_shard=2,zero=1", "dp_shard=3,zero=3"])
def test_it_is_one_process(plan: str, pool: RankPool) -> None:
    parity = verify(noisy, f"{plan},deterministic=12" if plan != "single" else "deterministic=12", pool=pool)
    assert parity.parity, parity.text()


# --- the tree


@pytest.mark.parametrize(("accumulate", "ranks"), [(1, 1), (1, 2), (1, 3), (2, 3), (4, 2), (1, 8), (3, 4)])
def test_runs_of_all_ranks_are_the_leaves(accumulate: int, ranks: int) -> None:
    pieces = BatchPieces(24, accumulate, ranks)
    runs = sorted(run for rank in range(ranks) for run in pieces.runs(rank))
    assert [leaf for low, high in runs for leaf in range(low, high)] == list(range(24))
    values = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    whole = TreeSum(24)
    for rank in range(ranks):
        own = TreeSum(24)
        for micro_batch in range(accumulate):
            first = pieces.first(micro_batch, rank)
            for leaf in range(first, first + pieces.per_rank):
                own.add(leaf, leaf + 1, values[leaf].clone())
        for run in pieces.runs(rank):
            value = own.value(*run)
            assert value is not None
            whole.add(*run, value)
    ordered = TreeSum(24)
    for leaf in reversed(range(24)):
        ordered.add(leaf, leaf + 1, values[leaf].clone())
    assert torch.equal(whole.value(0, 24), ordered.value(0, 24))


def test_a_missing_piece_adds_nothing() -> None:
    tree = TreeSum(4)
    tree.add(2, 3, torch.ones(2))
    assert tree.value(0, 2) is None
    assert torch.equal(tree.value(0, 4), torch.ones(2))


# --- what is refused


class Counting(nn.Module):
    """Keeps a running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(7, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5))


def refused(model: Any) -> str:
    try:
        parallelize(noisy(model), "deterministic=true", device="cpu")
    except RefusedPlan as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("model", "why"), [(normed, "batch norm"), (Counting, "'calls'")])
def test_what_the_pieces_of_a_batch_share_is_refused(model: Any, why: str, pool: RankPool) -> None:
    assert why in pool.run(refused, 1, model)[0]


def prepared() -> str:
    import shardwise

    model = nn.Linear(7, 5)
    try:
        shardwise.prepare(model, torch.optim.SGD(model.parameters()), [], plan="deterministic=true")
    except ShardwiseError as error:
        return str(error)
    return ""


def test_other_doors_say_why(pool: RankPool) -> None:
    assert "deterministic in prepare" in pool.run(prepared, 1)[0]
    with pytest.raises(RefusedPlan, match="deterministic"):
        from shardwise.costs.layout import of_plan

        of_plan(Plan.parse("deterministic=true"), global_batch=24, seq=1)


def test_as_text() -> None:
    assert Plan.parse("deterministic=true").deterministic == 24
    assert Plan.parse("deterministic=false").deterministic == 0
    assert Plan.from_dict({"deterministic": True}) == Plan.parse("deterministic=24")
    assert str(Plan.parse("deterministic=true")) == "deterministic=24"


# --- the text example

LAYOUTS = ["", *(f"dp_replicate={n}" for n in (2, 3, 4)), "dp_shard=2,zero=0",
           *(f"dp_shard={n},zero={zero}" for zero in (1, 2, 3) for n in (2, 3, 4))]  # fmt: skip
ACCUMULATED = ["", "dp_replicate=2", "dp_shard=3,zero=1", "dp_shard=4,zero=2", "dp_shard=2,zero=3"]


@pytest.mark.long
def test_fifty_steps_of_the_text_example(tmp_path: Path) -> None:
    task = f"{Path(__file__).parents[2] / 'examples' / 'text.py'}:task"
    found = {}
    for plan in [*LAYOUTS, *(f"accumulate=2,{plan}".rstrip(",") for plan in ACCUMULATED)]:
        text = ",".join(filter(None, [plan, "deterministic=true"]))
        out = tmp_path / str(len(found))
        train(task, text, steps=50, batch_samples=16, out=str(out))
        weights = load_file(next(out.rglob("model.safetensors")))
        found[text] = {name: digest(value) for name, value in weights.items()}
    first = found["deterministic=true"]
    assert {text for text, digests in found.items() if digests != first} == set()
