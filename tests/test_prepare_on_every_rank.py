"""`loss_scope="model"`: a model that mixes samples in its forward runs on whole batches on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool


class Queue(nn.Module):
    """Compares with a queue of earlier outputs, which its forward writes, and returns its own mean loss."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.ones(3))
        self.queue: torch.Tensor
        self.at: torch.Tensor
        self.writes = writes
        self.register_buffer("queue", torch.randn(3, 8))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.scale.data = self.scale.data * 0.9
        out = self.layers(x) * self.scale
        loss = (out @ self.queue.clone()).square().mean() + (out.T @ out / len(out)).square().sum()
        at = int(self.at)
        self.queue[:, at : at + len(out)] = out.detach().T
        self.at[0] = (at + len(out)) % 8
        return loss


def queued(plan: str | None, writes: bool = False, scope: Any = "model") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a loop over a model with a queue; with a penalty, noise, an attack and clipping."""
    torch.manual_seed(0)
    loader: Any = DataLoader(TensorDataset(torch.randn(12, 6).double()), batch_size=4, shuffle=True)
    model = Queue(writes).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    prepared = None
    if plan is not None:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan, loss_scope=scope)
    losses, state = [], model.state_dict
    for _ in range(2):
        for (x,) in loader:
            x = (x + 0.1 * torch.randn_like(x)).requires_grad_()
            optimizer.zero_grad()
            loss = model(x) + 0.1 * sum(p.square().sum() for p in model.parameters())
            if prepared:
                loss = prepared.backward(loss)
            else:
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            assert x.grad is not None
            losses += [loss.item(), float(norm), float(x.grad.square().sum())]
    return losses, {name: value.clone() for name, value in state().items()}


def check(plan: str, pool: RankPool, *, writes: bool = False) -> None:
    (alone,) = pool.run(queued, 1, None, writes)
    for losses, weights in pool.run(queued, shardwise.Plan.parse(plan).world_size, plan, writes):
        torch.testing.assert_close(losses, alone[0], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(weights, alone[1], rtol=0, atol=1e-11)


def test_a_queue_in_the_forward_is_one_processes(pool: RankPool) -> None:
    check("dp_shard=2,zero=3", pool)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2"])
def test_a_queue_under_other_plans(plan: str, pool: RankPool) -> None:
    check(plan, pool)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3"])
def test_what_its_forward_writes_into_a_weight_is_kept(plan: str, pool: RankPool) -> None:
    check(plan, pool, writes=True)


@pytest.mark.long
def test_a_model_that_mixes_samples_is_told_how(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match='loss_scope="model"'):
        pool.run(queued, 2, "dp_replicate=2", False, "sample")


class Learner(nn.Module):
    """Repeated blocks, which compute with their own weights or with those that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor, weights: list[torch.Tensor] | None = None) -> torch.Tensor:
        given = iter(weights or ())
        for block in self.blocks:
            for layer in block:
                weight, bias = (next(given), next(given)) if weights else (None, None)
                y = layer(x) if weight is None else nn.functional.linear(x, weight, bias)
                x = torch.tanh(y)
        return x


def adapted(plan: str | None, recorded: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """An inner step for each sample with weights of its own, twice, then the outer one, as MAML has it."""
    torch.manual_seed(0)
    loader: Any = DataLoader(TensorDataset(torch.randn(6, 2, 5, 4).double()), batch_size=4, shuffle=True)
    model: Any = Learner().double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    prepared: Any = None
    if plan is not None:
        prepared = shardwise.prepare(model, optimizer, loader, plan=plan, loss_scope="model")
        model, optimizer, loader = prepared
    losses = []
    for (tasks,) in loader:
        outer: Any = 0.0
        for of_support, of_query in tasks.unbind():
            own = list(model.parameters())
            slopes = torch.autograd.grad(model(of_support).square().mean(), own, create_graph=recorded)
            fast = [w - 0.1 * s for w, s in zip(own, slopes, strict=True)]
            slopes = torch.autograd.grad(model(of_support, fast).square().mean(), own, create_graph=recorded)
            fast = [w - 0.1 * s for w, s in zip(fast, slopes, strict=True)]
            outer = outer + (model(of_query, fast) - of_query.roll(1, 1)).square().mean()
        loss = outer / len(tasks)
        optimizer.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("plan", "recorded"),
    [
        ("dp_shard=2,zero=3", True),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("dp_shard=2,zero=3", False), ("dp_replicate=2", True))
        ),
        pytest.param("dp_shard=2,zero=1", True, marks=pytest.mark.long),
    ],
)
def test_inner_steps_with_weights_of_their_own_equal_one_process(plan: str, recorded: bool, pool: RankPool) -> None:
    (alone,) = pool.run(adapted, 1, None, recorded)
    for losses, weights in pool.run(adapted, 2, plan, recorded):
        torch.testing.assert_close(losses, alone[0], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(weights, alone[1], rtol=0, atol=1e-11)
