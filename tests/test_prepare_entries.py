"""Modules of a model that a script calls by themselves, and methods that do: as calls of the model, on every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.ranks import RankPool


class Agent(nn.Module):
    """A model without a forward, whose methods call its modules and read a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.actor, self.critic = nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.body(x) * self.scale)

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(self.body(x)), self.value(x)


def agent(model: Any, x: torch.Tensor, y: torch.Tensor, played: list[float]) -> torch.Tensor:
    with torch.no_grad():
        model.eval()
        played.append(model.value(torch.ones(3, 6, dtype=torch.float64)).sum().item())
        model.train()
    out, value = model.both(x)
    return (out - y).square().mean() + 0.1 * value.square().mean()


def several(models: Any, x: torch.Tensor, y: torch.Tensor, played: list[float]) -> torch.Tensor:
    """An encoder, a head and a frozen target that follows the encoder, batch norms among them."""
    encoder, head, target = models
    h = encoder(x)
    with torch.no_grad():
        goal = target(x)
        for kept, param in zip(target.parameters(), encoder.parameters(), strict=True):
            kept.data = 0.9 * kept.data + 0.1 * param.data
    return (head(h) - y).square().mean() + 0.1 * (h - goal).square().mean()


def weighed(models: Any, x: torch.Tensor, y: torch.Tensor, played: list[float]) -> torch.Tensor:
    """Two terms by learned weights, parameters of the script's own beside the model."""
    model, weights = models
    out, logs = model(x), weights[0]
    each = torch.stack([(out - y).square().mean(), out.abs().mean()])
    return ((-logs).exp() * each + logs).sum()


CASES = {"agent": agent, "several": several, "weighed": weighed}


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())


def apart(plan: str | None, case: str, **options: Any) -> tuple[list[float], list[float], dict]:
    torch.manual_seed(0)
    model: Any = Agent().double()
    if case == "several":
        model = tuple(module.double() for module in (body(), nn.Linear(8, 2), body().requires_grad_(False)))
    if case == "weighed":
        model = (nn.Linear(6, 2).double(), nn.ParameterList([torch.zeros(2, dtype=torch.float64)]))
    whole = nn.ModuleList(model) if isinstance(model, tuple) else model
    optimizer: Any = adamw(whole)
    loader: Any = DataLoader(samples(12), batch_size=4, shuffle=True)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan, **options)
    torch.manual_seed(7)
    losses, played = [], []
    for _ in range(2):
        for x, y in loader:
            loss = CASES[case](model, x, y, played)
            optimizer.zero_grad()
            if prepared:
                loss = prepared.backward(loss, mean_over=len(x)) if case == "weighed" else prepared.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, played, prepared.state_dict() if prepared else whole.state_dict()


SHORT = [
    ("agent", "dp_shard=2,zero=3"),
    ("several", "dp_shard=2,zero=3"),
    ("agent", "tp=2"),
    ("several", "dp_replicate=2"),
    ("weighed", "dp_shard=2,zero=2"),
    ("weighed", "tp=2"),
]
LONG = [
    (case, plan)
    for case in CASES
    for plan in ("dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "tp=2", "tp=2,dp_shard=2,zero=2")
    if (case, plan) not in SHORT
]


def check(case: str, plan: str, pool: RankPool) -> None:
    losses, played, weights = apart(None, case)
    for run in pool.run(apart, shardwise.Plan.parse(plan).world_size, plan, case):
        assert run[0] == pytest.approx(losses, rel=BAR)
        assert run[1] == pytest.approx(played, rel=BAR)
        for name, weight in weights.items():
            torch.testing.assert_close(run[2][name], weight, rtol=0, atol=BAR)


@pytest.mark.parametrize(("case", "plan"), SHORT)
def test_modules_that_are_called_by_themselves(case: str, plan: str, pool: RankPool) -> None:
    check(case, plan, pool)


@pytest.mark.long
@pytest.mark.parametrize(("case", "plan"), LONG)
def test_modules_by_themselves_under_every_plan(case: str, plan: str, pool: RankPool) -> None:
    check(case, plan, pool)


class Views(nn.Module):
    """Runs on a list of views, and gives the rows of all: one view after the other, and side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(8, 2)

    def forward(self, views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        after = self.body(torch.cat(views))
        return after, self.head(torch.stack(views, 1).flatten(0, 1)[:, :6] @ self.body[0].weight.T)


def viewed(plan: str | None) -> tuple[list[float], dict]:
    torch.manual_seed(0)
    model: Any = Views().double()
    optimizer, loader = adamw(model), DataLoader(samples(10), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(
            model, optimizer, loader, plan=plan, loss_scope="global"
        )
    losses = []
    for x, y in loader:
        after, beside = model([x, 0.5 * x, x.flip(1)])
        one, two, _ = after.chunk(3)
        logits = one @ two.T  # every sample beside every other
        found = (beside.unflatten(0, (-1, 3)).mean(1) - y).square().mean()
        loss = found + nn.functional.cross_entropy(logits, torch.arange(len(x)))
        optimizer.zero_grad()
        if prepared:
            loss = prepared.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, prepared.state_dict() if prepared else model.state_dict()


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=2", "dp_replicate=3"])
def test_several_rows_of_each_sample(plan: str, pool: RankPool) -> None:
    losses, weights = viewed(None)
    for run in pool.run(viewed, shardwise.Plan.parse(plan).world_size, plan):
        assert run[0] == pytest.approx(losses, rel=BAR)
        for name, weight in weights.items():
            torch.testing.assert_close(run[1][name], weight, rtol=0, atol=BAR)
