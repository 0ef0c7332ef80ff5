"""Batches that a script trains on in another order than it is handed them: read ahead, kept, taken out of a loop."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool


class Prefetcher:
    """As scripts for GPUs have it: the next batch is on its way, scaled already, while one is trained on."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.scale = iter(loader), torch.full((6,), 1.1, dtype=torch.float64)
        self.preload()

    def preload(self) -> None:
        self.following = next(self.loader, None)
        if self.following is not None:
            x, y = self.following
            self.following = x.to("cpu", non_blocking=True).div(self.scale), y.clone()

    def __iter__(self) -> Iterator[Any]:
        while self.following is not None:
            batch = self.following
            self.preload()
            yield batch


def in_a_thread(loader: Any) -> Iterator[Any]:
    batches: queue.Queue = queue.Queue(2)
    reader = threading.Thread(target=lambda: [batches.put(one) for one in (*loader, None)], daemon=True)
    reader.start()
    yield from iter(batches.get, None)


def of_several(loader: Any) -> Iterator[Any]:
    """Two batches are asked for before the first is trained on."""
    batches = iter(loader)
    while together := [one for one in (next(batches, None), next(batches, None)) if one is not None]:
        yield from together


def shuffled(loader: Any) -> Iterator[Any]:
    batches = list(loader)
    for seed in range(2):
        random.Random(seed).shuffle(batches)
        yield from batches


def first_alone(loader: Any) -> Iterator[Any]:
    x, y = next(iter(loader))
    for _ in range(3):
        yield x, y


def cycled(loader: Any) -> Iterator[Any]:
    """Beyond the first round the loader is not asked; held-out data are gone through in the middle, which draws."""
    for number, batch in enumerate(itertools.islice(itertools.cycle(loader), 7)):
        yield batch
        if number == 3:
            list(DataLoader(samples(4), batch_size=2))


WAYS = {one.__name__: one for one in (Prefetcher, in_a_thread, of_several, shuffled, first_alone, cycled)}


def trained(plan: str | None, way: str, loss_of: str = "each", drawn: str = "like") -> tuple[list[float], dict]:
    """The last batch is smaller, the model draws masks, and the script noise: like its samples, or by their count."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)).double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(15), batch_size=6, shuffle=True)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for _ in range(2):
        for x, y in WAYS[way](loader):
            x = x.to("cpu")  # is there, and stays the batch's own
            noise = torch.randn_like(x) if drawn == "like" else torch.randn(len(x), 6, dtype=x.dtype)
            out, n = model(x if loss_of == "noise" else x + 0.1 * noise), len(x)
            goal = y + noise[:, :2] if loss_of == "noise" else y
            loss = out.logsumexp(0).mean() if loss_of == "all" else (out - goal).square().mean()
            optimizer.zero_grad()
            loss = prepared.backward(loss, mean_over=n) if prepared else loss
            if not prepared:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        torch.rand(3)  # the script's own, as a sampled picture
    assert not any("not checked" in one for one in (prepared._told._said if prepared else []))
    return losses, model.state_dict()


def rehearsed(plan: str | None, pairs: bool) -> tuple[list[float], dict]:
    """Beside each batch an earlier one is trained on: by itself, or in pairs with the one at hand."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)).double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(24), batch_size=4, shuffle=True)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses, seen, chosen = [], [], random.Random(0)
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        if seen:
            old, goal = chosen.choice(seen)
            again = torch.exp(-torch.cdist(model(x), goal)) if pairs else (model(old) - goal).square()
            loss = loss + 0.5 * again.mean()
        seen.append((x, y))
        optimizer.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=2", pytest.param("dp_shard=2,zero=3", marks=pytest.mark.long)])
def test_rows_of_an_earlier_batch_are_the_same_samples_of_it(plan: str, pool: RankPool) -> None:
    losses, weights = rehearsed(None, False)
    for theirs, held in pool.run(rehearsed, 2, plan, False):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())
    with pytest.raises(RefusedPlan, match="no sum or mean over samples"):
        pool.run(rehearsed, 2, plan, True)


CASES = [
    ("Prefetcher", "dp_replicate=2", "count"),
    ("shuffled", "dp_shard=2,zero=3", "like"),
    ("cycled", "dp_replicate=2", "count"),
]
MORE = [
    ("cycled", "dp_shard=2,zero=3", "like"),
    ("cycled", "dp_shard=2,zero=1", "count"),
    ("of_several", "dp_shard=2,zero=2", "count"),
    ("first_alone", "dp_replicate=2", "like"),
    ("Prefetcher", "dp_shard=3,zero=1", "like"),
    ("Prefetcher", "tp=2", "count"),
]


@pytest.mark.parametrize(
    ("way", "plan", "drawn"), [*CASES, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE)]
)
def test_a_forward_is_of_the_batch_that_it_is_given(way: str, plan: str, drawn: str, pool: RankPool) -> None:
    ((losses, weights),) = pool.run(trained, 1, None, way, "each", drawn)
    for theirs, held in pool.run(trained, shardwise.Plan.parse(plan).world_size, plan, way, "each", drawn):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


@pytest.mark.parametrize(
    ("way", "loss_of", "drawn", "told"),
    [
        ("in_a_thread", "each", "like", "in a thread of the script's own"),
        ("first_alone", "all", "like", "no sum or mean over samples"),
        pytest.param("first_alone", "noise", "count", "drawn between a backward and the", marks=pytest.mark.long),
        ("first_alone", "each", "count", r"drawn between a backward and the next batch.*torch.randn_like"),
        pytest.param("Prefetcher", "all", "like", "no sum or mean over samples", marks=pytest.mark.long),
        pytest.param("shuffled", "all", "like", "no sum or mean over samples", marks=pytest.mark.long),
    ],
)
def test_such_a_batch_is_looked_at_too(way: str, loss_of: str, drawn: str, told: str, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=rf"{told}.*test_prepare_ahead.py, line"):
        pool.run(trained, 2, "dp_replicate=2", way, loss_of, drawn)


def round_again(plan: str) -> None:
    """`itertools.cycle` goes through the one batch of a loop that is over, and noise is drawn for it."""
    model: Any = nn.Linear(6, 2).double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(6), batch_size=6)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for x, y in itertools.islice(itertools.cycle(loader), 4):
        optimizer.zero_grad()
        prepared.backward((model(x + torch.randn_like(x)) - y).square().mean())
        optimizer.step()


def test_what_is_drawn_after_the_loop_is_not_followed(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"a loop over the loader that has ended.*test_prepare_ahead.py, line"):
        pool.run(round_again, 2, "dp_replicate=2")
