"""Scripts without a loader: batches that the script draws, keeps or generates by itself equal one process."""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from test_prepare import BAR, adamw
from torch import nn

import shardwise
from shardwise.errors import InputError
from shardwise.ranks import RankPool


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)).double()


def _start(model: Any, plan: str | None, scope: str) -> tuple[Any, Any, Any]:
    optimizer: Any = adamw(model)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, _ = shardwise.prepare(model, optimizer, plan=plan, loss_scope=scope)  # type: ignore[arg-type]
    return prepared, model, optimizer


def permuted(plan: str | None, scope: str) -> tuple[list[float], dict]:
    """Rows by `torch.randperm`, an uneven last batch, noise for the samples."""
    prepared, model, optimizer = _start(_net(), plan, scope)
    data = torch.randn(14, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):
        order = torch.randperm(len(data))
        for i in range(0, len(data), 4):
            x = data[order[i : i + 4]]
            if prepared:
                x = prepared.deal(x)
            optimizer.zero_grad()
            loss = (model(x + 0.1 * torch.randn_like(x)) - x[:, :2].cos()).square().mean()
            loss = prepared.backward(loss) if prepared else loss
            if not prepared:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


def replayed(plan: str | None, scope: str) -> tuple[list[float], dict]:
    """A buffer to which the model's own actions are added, sampled by NumPy; two calls of the model in one loss."""
    np.random.seed(0)
    prepared, model, optimizer = _start(_net(), plan, scope)
    buffer: deque[Any] = deque(maxlen=20)
    state, losses = np.zeros(3), []
    for step in range(12):
        model.eval()
        with torch.no_grad():
            action = model(torch.from_numpy(state)[None])[0].numpy()
        model.train()
        buffer.append((state, action))
        state = 0.8 * state + np.random.randn(3) + action.sum()
        if step < 5:
            continue
        picked = [buffer[i] for i in np.random.choice(len(buffer), 5, replace=False)]
        x, y = (torch.from_numpy(np.stack(one)) for one in zip(*picked, strict=True))
        loss = (model(x) - y).square().mean() + 0.1 * model(x[:3] + 1).std(0).sum()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


class Graph(nn.Module):
    """One whole graph: no dim counts samples that could be dealt."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        links = torch.zeros(len(x), len(x), dtype=x.dtype).index_put((edges[0], edges[1]), torch.ones(1, dtype=x.dtype))
        return self.b(nn.functional.dropout(links @ self.a(x).relu(), 0.3, self.training))


def graph(plan: str | None, scope: str) -> tuple[list[float], dict]:
    torch.manual_seed(0)
    prepared, model, optimizer = _start(Graph().double(), plan, scope)
    x, edges, known = torch.randn(9, 3, dtype=torch.float64), torch.randint(9, (2, 20)), torch.arange(9) % 2 == 0
    losses = []
    for _ in range(4):
        model.train()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, edges)[known], torch.arange(9)[known] % 2)
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


WAYS = {"permuted": permuted, "replayed": replayed, "graph": graph}
SHORT = [
    ("permuted", "sample", "dp_shard=2,zero=3"),
    ("replayed", "global", "dp_replicate=2"),
    ("graph", "model", "dp_shard=2,zero=1"),
]
LONG = [
    (way, scope, plan)
    for way, scope in (
        ("permuted", "sample"), ("permuted", "global"), ("permuted", "model"), ("replayed", "global"),
        ("replayed", "model"), ("graph", "model"),
    )
    for plan in ("dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=3", "tp=2", "dp_replicate=3")
    if (way, scope, plan) not in SHORT
]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "scope", "plan"), [*SHORT, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)]
)
def test_without_a_loader(way: str, scope: str, plan: str, pool: RankPool) -> None:
    ((losses, weights),) = pool.run(WAYS[way], 1, None, scope)
    for theirs, held in pool.run(WAYS[way], shardwise.Plan.parse(plan).world_size, plan, scope):
        assert theirs == pytest.approx(losses, rel=BAR)
        for name, weight in weights.items():
            torch.testing.assert_close(held[name], weight, rtol=0, atol=BAR)


def undealt(plan: str) -> None:
    prepared, model, _ = _start(_net(), plan, "sample")
    prepared.backward(model(torch.randn(4, 3, dtype=torch.float64)).mean())


def unlike(plan: str) -> None:
    prepared, model, _ = _start(_net(), plan, "sample")
    x = prepared.deal(torch.full((4, 3), float(prepared.rank), dtype=torch.float64))
    prepared.backward(model(x).mean())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (undealt, r"x, y = prepared.deal\(x, y\).*loss_scope"),
        pytest.param(unlike, "first samples are others on rank 1", marks=pytest.mark.long),
    ],
)
def test_what_is_not_dealt_is_refused(what: Any, words: str, pool: RankPool) -> None:
    with pytest.raises(InputError, match=re.compile(words, re.DOTALL)):
        pool.run(what, 2, "dp_replicate=2")
