"""Predictions in sample order on rank 0, equal to one process under every kind of plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Task, parallelize
from shardwise.data import evaluation_parts
from shardwise.errors import InputError
from shardwise.models import tasks
from shardwise.ranks import RankPool

PLANS = ["dp_replicate=2", "dp_shard=2,zero=3", "dp_shard=3,zero=1", "tp=2", "tp=2,sp=true", "pp=2,microbatches=2",
         "cp=2"]  # fmt: skip
PRODUCTS = ["pp=2,dp_replicate=2", "tp=2,dp_shard=2,zero=3"]
STEPS = (5, 6, 7)


def batch(step: int) -> Any:
    """Seven samples, then six, then one: ranks without a sample run a stand-in."""
    whole = tasks.decoder().batch(step)
    return {name: value[: {5: 7, 6: 6, 7: 2}[step]] for name, value in whole.items()}


def outputs(plan: str) -> list[Any]:
    engine = parallelize(
        tasks.decoder(), f"{plan},precision=fp64" if plan != "single" else "precision=fp64", check_loss=False
    )
    engine.step(tasks.decoder().batch(0))
    found = list(engine.predict(map(batch, STEPS)))
    after = engine.step(tasks.decoder().batch(1))  # in training mode again
    return [*found, after.loss]


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> list[Any]:
    return pool.run(outputs, 1, "single")[0]


@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(plan, marks=pytest.mark.long) for plan in PRODUCTS)])
def test_outputs_are_those_of_one_process_in_sample_order(plan: str, alone: list[Any], pool: RankPool) -> None:
    ranks = 3 if "=3,z" in plan else 4 if plan.count("=2") == 2 and "micro" not in plan else 2
    first, *others = pool.run(outputs, ranks, plan)
    for mine, theirs in zip(first[:-1], alone[:-1], strict=True):
        assert type(mine) is Tensor and mine.shape == theirs.shape and mine.dtype == torch.float64
        assert float((mine - theirs).abs().max()) < 1e-10
    assert first[-1] == pytest.approx(alone[-1], rel=1e-10)
    assert all(found[:-1] == [None] * len(STEPS) for found in others)


class Odd(nn.Module):
    """An output with a plain value, a flag and, where asked for, one number for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "positive": y.sum(1) > 0, "name": "odd", "mean": y.mean()}


class Numbers:
    def __len__(self) -> int:
        return 7

    def read(self, indices: list[int], region: Any = None) -> Tensor:
        return torch.tensor(indices, dtype=torch.float32)[:, None].expand(-1, 4)


def odd(select: str) -> Any:
    task = Task(model=Odd, loss=lambda o, b: (o["y"].square().sum(), len(b)), data=Numbers())
    engine = parallelize(task, "dp_replicate=2")
    parts = evaluation_parts(Numbers(), 3, engine.data_rank, engine.data_ranks)
    kept = ("y", "positive", "name")
    chosen = {"all": None, "named": lambda output: {name: output[name] for name in kept}}[select]
    return list(engine.predict(parts, select=chosen))


def test_structures_and_plain_values_arrive(pool: RankPool) -> None:
    first, second = pool.run(odd, 2, "named")
    assert second == [None] * 3
    assert [len(found["y"]) for found in first] == [3, 3, 1]
    assert all(found["name"] == "odd" and found["positive"].dtype == torch.bool for found in first)
    y = torch.cat([found["y"] for found in first])
    assert torch.equal(torch.cat([found["positive"] for found in first]), y.sum(1) > 0)
    steps = y.diff(dim=0)  # a linear function of 0, 1, 2, ...: the order is that of the samples
    assert float((steps - steps[0]).abs().max()) < 1e-5


def test_what_is_not_made_of_samples_is_refused_on_every_rank(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"tensor of shape \(\).*give select="):
        pool.run(odd, 2, "all")


def conjugates() -> list[Any]:
    task = Task(model=Odd, loss=lambda o, b: (o["y"].square().sum(), len(b)), data=Numbers())
    engine = parallelize(task, "dp_replicate=2")
    parts = evaluation_parts(Numbers(), 3, engine.data_rank, engine.data_ranks)
    found = engine.predict(parts, select=lambda output: torch.complex(output["y"], output["y"]).conj())
    return [made if made is None else made.resolve_conj() for made in found]


def test_conjugates_arrive_as_the_numbers_that_they_are(pool: RankPool) -> None:
    first, _ = pool.run(conjugates, 2)
    made = torch.cat(first)
    assert len(made) == 7 and torch.equal(made.real, -made.imag) and made.real.abs().sum() > 0
