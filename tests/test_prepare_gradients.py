"""Gradients that a script reads, changes and sets by hand: whole, under every plan, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, muon, net, samples
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.ranks import RankPool


def _clip(model: nn.Module, step: int) -> list[float]:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    return [norm.item()]


def _noise(model: nn.Module, step: int) -> list[float]:
    for param in model.parameters():
        param.grad += 0.01 * torch.randn(param.grad.shape, dtype=torch.float64)
        param.grad.data.add_(param.data, alpha=1e-2)
    return [sum(param.grad.square().sum().item() for param in model.parameters())]


def _left_out(model: nn.Module, step: int) -> list[float]:
    if step < 2:
        model.head.weight.grad = None
    return [float(model.head.weight.grad is None)]


def _set(model: nn.Module, step: int) -> list[float]:
    for param in model.parameters():
        param.grad = param.grad.sign() * 0.1
    return []


def _other_memory(model: nn.Module, step: int) -> list[float]:
    for param in model.parameters():
        grad = param.grad.data
        param.grad.data = torch.where(grad.abs() < 0.01, torch.zeros_like(grad), grad)
    return [sum(param.grad.count_nonzero().item() for param in model.parameters())]


def _kept(model: nn.Module, step: int) -> list[float]:
    before = vars(model).setdefault("gradients_before", [])
    read = [grad.sum().item() for grad in before] if step % 2 == 0 else []  # else they were set to zero
    before[:] = [param.grad for param in model.parameters()]
    return read


def by_hand(plan: str | None, what: str, make: str = "adamw") -> tuple[list[float], list[float], dict]:
    """Losses, what the script read, and weights of a loop that works on `param.grad` between backward and step."""
    ways = {"clip": _clip, "noise": _noise, "left out": _left_out, "set": _set, "other memory": _other_memory}
    change = {**ways, "kept": _kept}[what]
    model: Any = net()
    optimizer: Any = {"adamw": adamw, "muon": muon}[make](model)
    loader: Any = DataLoader(samples(14), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    torch.manual_seed(3)
    losses, read = [], []
    for step, (x, y) in enumerate(loader):
        for param in model.parameters():
            if step % 2 and param.grad is not None:
                param.grad.zero_()
            elif not step % 2:
                param.grad = None
        loss = (model(x) - y).square().mean()
        if prepared:
            loss = prepared.backward(loss)
        else:
            loss.backward()
        read += change(model, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, read, model.state_dict()


SHORT = [
    ("clip", "tp=2"),
    ("noise", "dp_shard=2,zero=3"),
    ("left out", "dp_shard=2,zero=2"),
    ("set", "tp=2,dp_shard=2"),
    ("other memory", "dp_shard=2,zero=3"),
    ("kept", "dp_replicate=2"),
]
LONG = [
    (what, plan)
    for what in ("clip", "noise", "left out", "set", "other memory", "kept")
    for plan in ("dp_replicate=2", *(f"dp_shard=2,zero={k}" for k in (1, 2, 3)), "tp=2", "dp_shard=3,zero=3")
    if (what, plan) not in SHORT
]


def check(what: str, plan: str, pool: RankPool, make: str = "adamw") -> None:
    losses, read, weights = by_hand(None, what, make)
    for run in pool.run(by_hand, shardwise.Plan.parse(plan).world_size, plan, what, make):
        assert run[0] == pytest.approx(losses, rel=BAR)
        assert run[1] == pytest.approx(read, rel=BAR)
        for name, weight in weights.items():
            torch.testing.assert_close(run[2][name], weight, rtol=0, atol=BAR)


@pytest.mark.parametrize(("what", "plan"), SHORT)
def test_gradients_by_hand(what: str, plan: str, pool: RankPool) -> None:
    check(what, plan, pool)


@pytest.mark.long
@pytest.mark.parametrize(("what", "plan"), LONG)
def test_gradients_by_hand_under_every_plan(what: str, plan: str, pool: RankPool) -> None:
    check(what, plan, pool)


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=2"])
def test_gradients_by_hand_of_an_optimizer_that_needs_whole_tensors(plan: str, pool: RankPool) -> None:
    check("left out", plan, pool, "muon")


def twice(plan: str | None) -> tuple[list[float], dict]:
    """A backward for each of two losses through one graph, whose gradients are put together by hand."""
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for x, y in loader:
        out, found = model(x), []
        for loss in ((out - y).square().mean(), out.abs().mean()):
            optimizer.zero_grad()
            if prepared:
                loss = prepared.backward(loss, retain_graph=True)
            else:
                loss.backward(retain_graph=True)
            found.append([param.grad.clone() for param in model.parameters()])
            losses.append(loss.item())
        for param, one, other in zip(model.parameters(), *found, strict=True):
            param.grad = one - 0.5 * other
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", "dp_shard=2,zero=1"])
def test_two_losses_of_one_graph(plan: str, pool: RankPool) -> None:
    losses, weights = twice(None)
    for run in pool.run(twice, 2, plan):
        assert run[0] == pytest.approx(losses, rel=BAR)
        for name, weight in weights.items():
            torch.testing.assert_close(run[1][name], weight, rtol=0, atol=BAR)
