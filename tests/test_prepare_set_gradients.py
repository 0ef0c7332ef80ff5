"""Gradients that a script sets without a backward (`p.grad = delta`), and what it gives to pieces of own samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR, samples
from test_prepare_optimizers import PLANS
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool

Weights = dict[str, torch.Tensor]


def made(plan: str | None) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """(model, optimizer, loader, what `prepare` returned)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(samples(22), batch_size=6)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    return (*(prepared or (model, optimizer, loader)), prepared)


def set_first(plan: str | None) -> Weights:
    """Steps by what the script has set alone, and by that and a backward behind it, in turn."""
    model, optimizer, loader, prepared = made(plan)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad = 0.3 * param.detach() + 0.01
        if step % 2 == 0:
            loss = mse_loss(model(x), y)
            prepared.backward(loss) if prepared else loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("plan", [*PLANS[:-1], pytest.param("tp=2,dp_shard=2,zero=1", marks=pytest.mark.long)])
def test_gradients_that_a_script_sets_are_stepped_by_and_added_to(plan: str, pool: RankPool) -> None:
    expected = set_first(None)
    for weights in pool.run(set_first, shardwise.Plan.parse(plan).world_size, plan):
        for name, weight in expected.items():
            assert float((weights[name] - weight).abs().max()) < BAR, name


def given(plan: str, how: str, at: int) -> None:
    """In one step a gradient, or a weight, is made of this rank's own samples."""
    model, optimizer, loader, prepared = made(plan)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        prepared.backward(mse_loss(model(x), y))
        for param in model.parameters():
            if step == at and how == "gradient":
                param.grad = param.grad + y.mean()
            if step == at and how == "weight":
                param.data.add_(param.grad, alpha=-y.mean().item())
            if how == "alike":
                param.data.add_(param.grad, alpha=-0.1 * prepared.loss.item())
                param.grad = param.grad + 1e-3 * torch.randn_like(param)
        optimizer.step()


@pytest.mark.parametrize(
    ("plan", "how", "at"),
    [
        ("dp_shard=2,zero=3", "gradient", 1),
        *(pytest.param(f"dp_shard=2,zero={zero}", how, 3, marks=pytest.mark.long)
          for zero, how in ((1, "gradient"), (2, "gradient"), (3, "gradient"), (3, "weight"))),
    ],
)  # fmt: skip
def test_what_is_given_to_pieces_is_the_same_on_every_rank(plan: str, how: str, at: int, pool: RankPool) -> None:
    """In the last step too, after which the epoch's end is the place where ranks are compared."""
    with pytest.raises(RefusedPlan, match=r"by hand differs between ranks, first at \w+.py, line \d+: .*prepared.loss"):
        pool.run(given, 2, plan, how, at)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", "dp_shard=2,zero=1"])
def test_what_ranks_have_alike_may_be_given(plan: str, pool: RankPool) -> None:
    pool.run(given, 2, plan, "alike", 0)
