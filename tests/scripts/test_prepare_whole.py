"""`loss_scope="global"` and "model": losses and models that mix samples, of whole batches on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_scripts import (
    back,
    batches,
    begin,
    equals_one_process,
    made,
    refused_with_its_line,
    stepped,
    weights_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shardwise.errors import RefusedPlan

LONG = pytest.mark.long


def data(*shape: int) -> TensorDataset:
    return TensorDataset(torch.randn(*shape, generator=torch.Generator().manual_seed(1)).double())


# --- losses of whole batches


class Views(nn.Module):
    """Runs on a list of views, and gives the rows of all, one view after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(8, 2)

    def forward(self, views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        after = self.body(torch.cat(views))
        return after, self.head(after)


def viewed(plan: str | None) -> tuple:
    """Losses of whole batches equal one process."""
    prepared, model, optimizer, loader = begin(plan, made(Views), batches(10), loss_scope="global")
    losses = []
    for x, y in loader:
        after, told = model([x, 0.5 * x, x.flip(1)])
        one, two, _ = after.chunk(3)
        found = (told.unflatten(0, (3, -1)).mean(0) - y).square().mean()
        loss = found + F.cross_entropy(one @ two.T, torch.arange(len(x)))  # every sample beside every other
        losses.append(stepped(prepared, optimizer, loss))
    return losses, weights_of(prepared or model)


def by_output(plan: str) -> None:
    """One output is differentiated by the other, of which it is made."""
    _, model, _, loader = begin(plan, made(Views), batches(10), loss_scope="global")
    for x, _ in loader:
        after, told = model([x, x, x])
        sensitivity = torch.autograd.grad(told.sum(), after, create_graph=True)
        sensitivity[0].square().mean().backward()


# --- models that mix samples


class Queue(nn.Module):
    """Compares with a queue of earlier outputs, which its forward writes, and returns its own mean loss."""

    def __init__(self, writes: bool) -> None:
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


def queued(plan: str | None, writes: bool = False, scope: Any = "model") -> tuple:
    """A loop over a model with a queue; with a penalty, noise, an attack and clipping."""
    loader = DataLoader(data(12, 6), batch_size=4, shuffle=True)
    prepared, model, optimizer, loader = begin(plan, made(lambda: Queue(writes)), loader, loss_scope=scope)
    losses = []
    for _ in range(2):
        for (x,) in loader:
            x = (x + 0.1 * torch.randn_like(x)).requires_grad_()
            optimizer.zero_grad()
            loss = model(x) + 0.1 * sum(p.square().sum() for p in model.parameters())
            losses.append(back(prepared, loss))
            losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            assert x.grad is not None
            losses.append(float(x.grad.square().sum()))
    return losses, weights_of(model)


class Learner(nn.Module):
    """Repeated blocks, which compute with their own weights or with those that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))

    def parameters(self) -> list[nn.Parameter]:  # type: ignore[override]  # a list, as of published ones
        return list(super().parameters())

    def forward(self, x: torch.Tensor, weights: list[torch.Tensor] | None = None) -> torch.Tensor:
        given = iter(weights or ())
        for block in self.blocks:
            for layer in block:
                y = nn.functional.linear(x, next(given), next(given)) if weights else layer(x)
                x = torch.tanh(y)
        return x


def adapted(plan: str | None, recorded: bool) -> tuple:
    """An inner step for each sample with weights of its own, twice, then the outer one, as MAML has it."""
    loader = DataLoader(data(6, 2, 5, 4), batch_size=4, shuffle=True)
    prepared, model, optimizer, loader = begin(plan, made(Learner), loader, loss_scope="model")
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
        losses.append(stepped(prepared, optimizer, outer / len(tasks)))
    return losses, weights_of(model)


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (viewed, "dp_shard=2,zero=2"), (viewed, "dp_replicate=3"), (queued, "dp_shard=2,zero=3", False),
    (adapted, "dp_shard=2,zero=2", True),
]  # fmt: skip
MORE_EQUAL: list[tuple] = [
    (queued, "dp_shard=2,zero=1", False), (queued, "dp_shard=2,zero=2", False), (queued, "dp_shard=2,zero=2", True),
    (adapted, "dp_shard=2,zero=1", True), (adapted, "dp_shard=2,zero=2", False),
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL, MORE_EQUAL)


MORE_REFUSED: list[tuple] = [
    (queued, "dp_replicate=2", False, "sample", RefusedPlan, 'loss_scope="model"'),
]  # fmt: skip
REFUSED: list[tuple] = [
    (queued, "dp_shard=2,zero=3", True, RefusedPlan, "writes into scale, which zero=3 has gathered"),
    (by_output, "dp_shard=2,zero=2", RefusedPlan, r"autograd.grad by an output of the model.*line \d+: sensitivity ="),
]  # fmt: skip
test_a_script_is_refused_with_its_line = refused_with_its_line(REFUSED, MORE_REFUSED)
