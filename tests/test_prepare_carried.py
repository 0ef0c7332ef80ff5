"""What a model's forward keeps in plain attributes and computes from much later: equal to one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import samples
from test_prepare_kept import compare
from torch import distributed, nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool

LATE = 5  # forwards before the first one that uses what is kept


class Keeping(nn.Module):
    """Keeps a mean over its samples, in one way of several; takes it off in later forwards."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.enter, self.leave, self.way, self.calls = nn.Linear(6, 8), nn.Linear(8, 2), way, 0
        self.center, self.bag, self.number = torch.zeros(8, dtype=torch.float64), {}, 0.0
        self.rows: Any = None
        self.register_buffer("unsaved", torch.zeros(8, dtype=torch.float64), persistent=False)

    def keep(self, mean: torch.Tensor) -> Any:
        """Moves what is kept towards a mean; returns it."""
        if self.way == "in_place":
            return self.center.mul_(0.9).add_(mean, alpha=0.1)
        if self.way == "in_dict":
            self.bag["center"] = 0.9 * self.bag.get("center", torch.zeros_like(mean)) + 0.1 * mean
            return self.bag["center"]
        if self.way == "number":
            self.number = 0.9 * self.number + 0.1 * mean.mean().item()
            return self.number
        if self.way == "unsaved":
            return self.unsaved.lerp_(mean, 0.1 if self.calls > 2 else 0.0)
        if self.way == "annealed":
            self.number = min(1.0, self.calls / 10)
            return self.number
        self.center = 0.9 * self.center + 0.1 * mean
        return 0.0 if self.way == "looked_at" else self.center

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.enter(x))
        if not self.training:
            return self.leave(h)
        self.calls += 1
        if self.way == "rows":
            old, self.rows = self.rows, h.detach()
            return self.leave(h if old is None else h + 0.1 * old)
        mean = h.detach().mean(0)
        if self.way == "summed" and distributed.is_initialized() and distributed.get_world_size() > 1:
            distributed.all_reduce(mean)
            mean /= distributed.get_world_size()
        kept = self.keep(mean)
        return self.leave(h - kept if self.calls > LATE else h)


def run(plan: str | None, way: str) -> tuple[list[float], dict]:
    """Eight steps of a script; alone without a plan."""
    torch.manual_seed(0)
    model: Any = Keeping(way).double()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(32), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        if prepared:
            loss = prepared.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


LONG = pytest.mark.long
REFUSED = [
    ("dp_replicate=2", "number"),
    ("dp_shard=2,zero=3", "in_place"),
    *(pytest.param("dp_shard=2,zero=1", way, marks=LONG) for way in ("in_dict", "replaced", "unsaved")),
]


@pytest.mark.parametrize(("plan", "way"), REFUSED)
def test_what_a_forward_keeps_of_its_samples_is_refused_where_it_is_used(plan: str, way: str, pool: RankPool) -> None:
    words = r"computes from '(center|bag|number|unsaved)' .*keeps from step to step.*test_prepare_carried.py, line \d+"
    with pytest.raises(RefusedPlan, match=words):
        pool.run(run, 2, plan, way)


@pytest.mark.parametrize(
    "way", ["summed", *(pytest.param(way, marks=LONG) for way in ("looked_at", "annealed", "rows"))]
)
def test_what_is_alike_or_not_used_is_left_alone(way: str, pool: RankPool) -> None:
    compare(pool.run(run, 2, "dp_shard=2,zero=3", way), run(None, way))
