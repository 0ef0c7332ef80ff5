"""Batches with arrays of numpy, text among them; sums of infinities; draws of ranks that have the same samples."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise import Task, parallelize
from shardwise.comm import Axis
from shardwise.errors import InputError
from shardwise.layout.dealing import Share
from shardwise.ranks import RankPool
from shardwise.step.batching import samples_in
from shardwise.step.control import Tally, agree
from shardwise.step.loss import Loss
from shardwise.step.not_finite import _first_bad
from shardwise.step.scaler import LossScale


@pytest.mark.parametrize("other", [np.array(["a", "b"]), np.zeros((2, 2), np.uint16), np.zeros(2, "datetime64[s]")])
def test_arrays_of_another_length_are_named_whatever_they_hold(other: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"batch\['x'\] has 4 samples but batch\['other'\] has 2"):
        samples_in({"x": torch.zeros(4, 3), "other": other})


def test_the_bad_sample_is_found_beside_text() -> None:
    batch = {"name": np.array(["a", "b"]), "x": np.array([0.0, math.nan]), "day": np.zeros(2, "datetime64[s]")}
    assert _first_bad([Share(batch=batch, count=2, start=3, total=5)]) == (4, "batch['x']", "NaN")


def test_pieces_that_are_infinite_both_ways_have_a_loss_that_is_no_number() -> None:
    tally = Tally(torch.device("cpu"), pieces=2)
    for leaf, value in enumerate((math.inf, -math.inf)):
        tally.leaves.append(leaf)
        tally.add(Loss(torch.tensor(value), 1.0), 1, {})
    agreed = agree(tally, 0.0, Axis.alone("data"))
    assert math.isnan(agreed.total) and agreed.weight == 2.0


def pairs(step: int) -> dict[str, Any]:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
    return {"x": x, "weight": np.arange(1, 3, dtype=np.float32)}


def weighted(output: Tensor, batch: dict[str, Any]) -> tuple[Tensor, int]:
    return (output.square().sum(1) * torch.as_tensor(batch["weight"])).sum(), len(output)


def global_losses(plan: str) -> list[float]:
    task = Task(
        model=lambda: nn.Linear(4, 4), loss=weighted, batch=pairs, inputs=lambda batch: ((batch["x"],), {}),
        loss_scope="global",
    )  # fmt: skip
    engine = parallelize(task, plan, device="cpu")
    return [engine.step(pairs(step)).loss for step in range(2)]


def test_arrays_are_gathered_for_a_loss_over_all_samples(pool: RankPool) -> None:
    (alone,) = pool.run(global_losses, 1, "single")
    for losses in pool.run(global_losses, 2, "dp_replicate=2"):
        assert losses == pytest.approx(alone, rel=1e-5)


class Dropped(nn.Module):
    """Mixes samples, and draws by Python whether a layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(random.random())
        made = self.layer(x)
        return (made - made.mean(0)) * self.drawn[-1]


def rows(step: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def draws_of_steps() -> list[float]:
    task = Task(model=Dropped, loss=lambda o, b: (o.square().sum(), len(b)), batch=rows, loss_scope="model")
    engine = parallelize(task, "dp_replicate=2", device="cpu", randomness="fast")
    random.seed(engine.rank)
    before = len(engine.module.drawn)
    for step in range(2):
        engine.step(rows(step))
    return engine.module.drawn[before:]


def test_ranks_that_have_the_same_samples_draw_alike_by_python(pool: RankPool) -> None:
    first, second = pool.run(draws_of_steps, 2)
    assert first == second and len(set(first)) == 2


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_no_number_gives_a_loss_scale_all_the_same(weight: float) -> None:
    assert LossScale().factor(torch.tensor(weight), Axis.alone("data"), torch.device("cpu"), 2) == 2.0**15
