"""`loss_scope="global"` and "model": losses and models that mix samples, of whole batches on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_scripts import back, batches, begin, check_equal, made, net, weights_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool

LONG = pytest.mark.long


def data(*shape: int) -> TensorDataset:
    return TensorDataset(torch.randn(*shape, generator=torch.Generator().manual_seed(1)).double())


# --- losses of whole batches


class Scaled(nn.Module):
    """Embeddings, and a learned temperature that belongs to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4))
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.net(x), dim=1), self.scale.exp()


def paired(plan: str | None) -> tuple:
    """A contrastive script: two views of each sample in one call, draws of its own, a weight that it reads itself."""
    loader = DataLoader(data(13, 6), batch_size=5, shuffle=True)
    prepared, model, optimizer, loader = begin(plan, made(Scaled), loader, loss_scope="global")
    torch.manual_seed(7)
    losses = []
    for (x,) in loader:
        mixed = 0.9 * x + 0.1 * x[torch.randperm(len(x))]
        z, scale = model(torch.cat([x, mixed + 0.1 * torch.randn_like(x)]))
        a, b = (z + model.shift).chunk(2)
        loss = F.cross_entropy(a @ b.T * scale, torch.arange(len(x))) + 0.1 * model.shift.square().sum()
        optimizer.zero_grad()
        losses.append(back(prepared, loss))
        if prepared:
            prepared.clip_grad_norm_(0.5)
            assert prepared.sum(float(len(x))) == [float(len(x))]
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return losses, weights_of(prepared or model)


class Views(nn.Module):
    """Runs on a list of views, and gives the rows of all: one view after the other, and side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(8, 2)

    def forward(self, views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        after = self.body(torch.cat(views))
        return after, self.head(torch.stack(views, 1).flatten(0, 1)[:, :6] @ self.body[0].weight.T)


def viewed(plan: str | None) -> tuple:
    prepared, model, optimizer, loader = begin(plan, made(Views), batches(10), loss_scope="global")
    losses = []
    for x, y in loader:
        after, beside = model([x, 0.5 * x, x.flip(1)])
        one, two, _ = after.chunk(3)
        found = (beside.unflatten(0, (-1, 3)).mean(1) - y).square().mean()
        loss = found + F.cross_entropy(one @ two.T, torch.arange(len(x)))  # every sample beside every other
        optimizer.zero_grad()
        losses.append(back(prepared, loss))
        optimizer.step()
    return losses, weights_of(prepared or model)


def kept(plan: str | None) -> tuple:
    """What is kept is of all samples: centers of classes, a teacher's center, a running mean, earlier outputs."""
    teacher = copy.deepcopy(net())
    prepared, model, optimizer, loader = begin(plan, net(), batches(16), loss_scope="global")
    centers, center, reward = torch.zeros(3, 2).double(), torch.zeros(2).double(), 0.0
    losses, outputs = [], list[torch.Tensor]()
    for x, y in [*loader, *loader]:
        out, of = model(x), (y[:, 0] * 3).long().clamp(0, 2)
        with torch.no_grad():
            shown = teacher(x)
        loss = ((out - y).square().sum(1) * (y[:, 0] - reward)).mean() + 0.1 * (out - centers[of]).square().mean()
        loss = loss - ((shown - center).softmax(-1) * out.log_softmax(-1)).sum(-1).mean()
        loss = loss + sum((out - one).square().mean() for one in outputs[-1:])
        for c in of.unique():
            centers[c] += 0.5 * (out[of == c].detach().mean(0) - centers[c])
        center, reward = center * 0.9 + shown.mean(0) * 0.1, 0.9 * reward + 0.1 * y[:, 0].mean().item()
        outputs.append(out.detach()[:1])
        optimizer.zero_grad()
        losses.append(back(prepared, loss))
        optimizer.step()
    return losses, weights_of(model)


@pytest.mark.parametrize(
    ("script", "plan"),
    [
        (paired, "dp_replicate=2"),
        (paired, "dp_shard=4,zero=2"),
        (paired, "dp_replicate=2,dp_shard=2,zero=1"),
        (viewed, "dp_shard=2,zero=2"),
        (viewed, "dp_replicate=3"),
        (kept, "dp_shard=2,zero=2"),
    ],
)
def test_losses_of_whole_batches_equal_one_process(script: Any, plan: str, pool: RankPool) -> None:
    check_equal(pool, script, plan)


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


@pytest.mark.parametrize(
    ("plan", "writes"),
    [
        ("dp_shard=2,zero=3", False),
        *(pytest.param(f"dp_shard=2,zero={zero}", False, marks=LONG) for zero in (1, 2)),
        *(pytest.param(f"dp_shard=2,zero={zero}", True, marks=LONG) for zero in (2, 3)),
    ],
)  # fmt: skip
def test_a_queue_in_the_forward_is_one_process_s(plan: str, writes: bool, pool: RankPool) -> None:
    check_equal(pool, queued, plan, writes)


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
        optimizer.zero_grad()
        losses.append(back(prepared, outer / len(tasks)))
        optimizer.step()
    return losses, weights_of(model)


@pytest.mark.parametrize(
    ("plan", "recorded"),
    [
        ("dp_shard=2,zero=3", True),
        *(pytest.param(f"dp_shard=2,zero={zero}", zero == 1, marks=LONG) for zero in (1, 3)),
    ],
)
def test_inner_steps_with_weights_of_their_own_equal_one_process(plan: str, recorded: bool, pool: RankPool) -> None:
    check_equal(pool, adapted, plan, recorded)
