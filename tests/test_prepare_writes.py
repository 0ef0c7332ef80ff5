"""Forwards that write into weights, at once or from some step on, in a script."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_prepare import BAR
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise import Plan
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool


class Block(nn.Module):
    """Normalises its weight as it begins, or gives it other memory once it has used it."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.line, self.writes = nn.Linear(6, 6), writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes == "in place":
            with torch.no_grad():
                self.line.weight.copy_(normalize(self.line.weight, dim=1))
        x = x + self.line(x).tanh()
        if self.writes == "used":
            self.line.weight.data = self.line.weight.data * 0.9
        return x


class Writing(nn.Module):
    """Key weights follow the query's; from its third forward on, a weight outside of blocks becomes smaller."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.query = nn.Sequential(*(Block(writes) for _ in range(3)))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.scale, self.times, self.writes = nn.Parameter(torch.ones(6, 2)), 0, writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        for one, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
            other.data = 0.5 * other.data + 0.5 * one.data
        if self.times > 2 and self.writes == "another":
            self.scale = nn.Parameter(0.9 * self.scale)
        elif self.times > 2:
            self.scale.data.mul_(0.9)
        return (self.query(x) * self.key(x)) @ self.scale


def trained(plan: str | None, writes: str = "in place", scope: Any = "sample") -> tuple[list[float], dict]:
    torch.manual_seed(0)
    model: Any = Writing(writes).double()
    kept = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(kept, lr=0.05, momentum=0.9)
    loader: Any = DataLoader(TensorDataset(torch.randn(20, 6).double()), 4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan, loss_scope=scope)
    losses = []
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss = loss if prepared is None else prepared.backward(loss)
        if prepared is None:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


LONG = [("dp_replicate=2,dp_shard=2,zero=3", "sample"), ("dp_shard=2,zero=3", "model"), ("dp_shard=2,zero=2", "sample"),
        ("dp_replicate=2,remat=full", "sample")]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "scope"),
    [("dp_shard=2,zero=3", "sample"), *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_what_a_forward_writes_is_what_one_process_writes(plan: str, scope: str, pool: RankPool) -> None:
    ((losses, weights),) = pool.run(trained, 1, None)
    for found, held in pool.run(trained, Plan.parse(plan).world_size, plan, "in place", scope):
        assert found == pytest.approx(losses, rel=BAR)
        assert all(torch.allclose(held[name], value, rtol=BAR, atol=BAR) for name, value in weights.items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("plan", "writes", "kind", "words"),
    [
        ("dp_shard=2,zero=3", "used", RefusedPlan, "other memory .* after it has used the weight"),
        ("dp_shard=2,zero=3,remat=full", "in place", RefusedPlan, "under remat=full it runs again in backward"),
        ("dp_shard=2,zero=3", "another", InputError, "parameter 'scale' was replaced"),
        ("dp_replicate=2", "another", InputError, "parameter 'scale' was replaced"),
    ],
)
def test_what_would_be_lost_is_refused(plan: str, writes: str, kind: type, words: str, pool: RankPool) -> None:
    with pytest.raises(kind, match=words):
        pool.run(trained, 2, plan, writes, "model")


class Words(nn.Module):
    """(B, T) words -> (B T, 9) logits, which tp=2 cuts unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(9, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x)
        return self.head(hidden + self.down(self.up(hidden).tanh())).log_softmax(-1).view(-1, 9)


def _written(t: torch.Tensor, way: str) -> torch.Tensor:
    """Views of it are written into: one, one after it has changed, two, rows of one, other shapes."""
    if way == "one":
        t[:, 0] = 0
        t[:, 2:5] += 1
    elif way == "changed":
        view = t[:, 2]
        t.add_(1.0)
        t[:, 3] = view
        view.mul_(2.0)
    elif way == "two":
        one, other = t[:, 1], t[:, 7]
        one.fill_(3.0)
        other.copy_(one * 2)
        one.add_(other)
    else:
        t[:, 1][1:3] = 7.0
        t.view(-1)[5] = 2.0
        t.t()[3] = 1.5
    return t


def with_targets(plan: str | None, way: str, gradients: bool = False) -> tuple[list[float], dict]:
    torch.manual_seed(0)
    model: Any = Words().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randint(0, 9, (12, 5))), 6)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for (x,) in loader:
        optimizer.zero_grad()
        logits = model(x)
        targets = _written(logits * 1.0 if gradients else logits.data.clone(), way)
        loss = (logits * targets).sum(1).mean()
        loss = loss if prepared is None else prepared.backward(loss)
        if prepared is None:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_what_a_loss_writes_into_views_of_cut_logits_is_in_them(pool: RankPool) -> None:
    for way in ("one", "changed", "two", "rows"):
        losses, weights = with_targets(None, way)
        for others, kept in pool.run(with_targets, 2, "tp=2", way, timeout_s=120):
            assert others == pytest.approx(losses, rel=BAR), way
            for name, weight in weights.items():
                assert float((kept[name] - weight).abs().max()) < BAR, (way, name)
    with pytest.raises((InputError, RefusedPlan), match="writes, with gradients, into a view"):
        pool.run(with_targets, 2, "tp=2", "one", True, timeout_s=120)
