"""Optimizers beside the prepared one, and gradients that stay after a step: as in one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR, samples
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool

PLANS = [
    "dp_shard=2,zero=1",
    *(pytest.param(plan, marks=pytest.mark.long)
      for plan in ("dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=3,zero=3", "tp=2", "tp=2,dp_shard=2,zero=3")),
]  # fmt: skip


class Gated(nn.Module):
    """Two branches, weighed by parameters that are searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.zeros(2))
        self.one = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.other = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.gates.softmax(0)
        return first * self.one(x) + second * self.other(x)


Found = tuple[list[float], dict[str, torch.Tensor]]


def searched(plan: str | None, own: bool = False) -> Found:
    """Weights and gates in turn, each by an optimizer and a loader of its own; `own`: gates by a plain backward."""
    torch.manual_seed(0)
    model: Any = Gated().double()
    gates = torch.optim.Adam([model.gates], lr=0.1)
    optimizer: Any = torch.optim.SGD([p for name, p in model.named_parameters() if name != "gates"], 0.1, momentum=0.9)
    loader: Any = DataLoader(samples(22), batch_size=6, shuffle=True)
    held: Any = DataLoader(samples(24), batch_size=6, shuffle=True)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
        held = prepared.split(held, trains=True)
    losses = []
    for (x, y), (x_held, y_held) in zip(loader, held, strict=True):
        gates.zero_grad()
        loss = mse_loss(model(x_held), y_held)
        loss.backward() if own or not prepared else prepared.backward(loss)
        gates.step()
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss = prepared.backward(loss) if prepared else (loss.backward(), loss)[1]
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def never_cleared(plan: str | None) -> Found:
    """Without `zero_grad`, so that each step's gradients are added to all before; sums with their weight."""
    torch.manual_seed(0)
    model: Any = Gated().double()
    optimizer: Any = torch.optim.Adafactor(model.parameters(), lr=1e-2)  # of which each rank owns whole tensors
    loader: Any = DataLoader(samples(22), batch_size=6)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for x, y in loader:
        loss = mse_loss(model(x), y)
        loss = prepared.backward(loss * len(x), len(x)) if prepared else (loss.backward(), loss)[1]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses += [loss.item(), norm.item()]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def same(runs: list[Found], expected: Found) -> None:
    for losses, trained in runs:
        assert losses == pytest.approx(expected[0], rel=BAR)
        for name, weight in expected[1].items():
            assert float((trained[name] - weight).abs().max()) < BAR, name


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_beside_the_prepared_one_steps_as_in_one_process(plan: str, pool: RankPool) -> None:
    same(pool.run(searched, shardwise.Plan.parse(plan).world_size, plan), searched(None))


@pytest.mark.parametrize("plan", [p for p in PLANS if "tp" not in str(p)])
def test_gradients_that_nothing_clears_add_up(plan: str, pool: RankPool) -> None:
    same(pool.run(never_cleared, shardwise.Plan.parse(plan).world_size, plan), never_cleared(None))


def test_a_step_by_gradients_of_one_rank_is_refused(pool: RankPool) -> None:
    told = r"trains 'gates' of the prepared model.*prepared.backward\(loss\).*trains=True.*line \d+: gates.step"
    with pytest.raises(RefusedPlan, match=told):
        pool.run(searched, 2, "dp_shard=2,zero=3", True)
