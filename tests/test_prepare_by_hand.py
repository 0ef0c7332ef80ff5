"""Weights that a script writes past its optimizer, and hooks that it adds after `prepare`: as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_prepare import BAR, adamw, muon, net, samples
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.layout import Plan
from shardwise.ranks import RankPool

LONG = pytest.mark.long
STEPS = 8  # more than those in which all is looked at


@torch.no_grad()
def clipped(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        param.clamp_(-0.2, 0.2)


def clipped_elsewhere(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        param.data = param.data.clamp(-0.2, 0.2)


@torch.no_grad()
def vector(model: Any, optimizer: Any) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat * 0.9, model.parameters())


@torch.no_grad()
def swapped(model: Any, optimizer: Any) -> None:
    """Others for a look, from which a step is made, then those of before: the old memory stays as it was."""
    before = [param.data for param in model.parameters()]
    values = [one.clone() for one in before]
    for param in model.parameters():
        param.data = param.data * 0.5
    optimizer.step()
    assert all(torch.equal(one, value) for one, value in zip(before, values, strict=True))
    for param, one in zip(model.parameters(), before, strict=True):
        param.data = one


def nothing(model: Any, optimizer: Any) -> None:
    """Masters keep what narrower weights have not."""


def pieces(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data = param.data * 0.9


BY_HAND: dict[str, Callable[[Any, Any], None]] = {
    one.__name__: one for one in (clipped, clipped_elsewhere, vector, swapped, pieces, nothing)
}  # fmt: skip


def script(plan: str | None, way: str, optimizer_of: Any = adamw) -> tuple[list[float], dict, dict]:
    model: Any = net()
    optimizer, loader = optimizer_of(model), DataLoader(samples(16), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    losses, told = [], {}
    for _ in range(STEPS // 4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x).double() - y).square().sum(1).mean()
            loss = prepared.backward(loss, mean_over=len(x)) if prepared else loss
            if not prepared:
                loss.backward()
            optimizer.step()
            BY_HAND[way](model, optimizer)
            losses.append(loss.item())
        state = prepared.state_dict() if prepared else model.state_dict()
        told = {name: value.clone() for name, value in state.items()}
    return losses, told, {name: value.clone().cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("plan", "way", "optimizer_of"),
    [
        ("dp_shard=2,zero=1", "clipped_elsewhere", adamw),
        ("dp_shard=3,zero=2", "vector", adamw),
        ("dp_shard=2,zero=2", "swapped", adamw),
        ("dp_shard=2,zero=1", "pieces", adamw),
        ("dp_shard=2,zero=3", "pieces", adamw),
        ("dp_shard=2,zero=1", "clipped", muon),
        ("dp_shard=2,zero=2", "clipped_elsewhere", muon),
        ("dp_shard=2,zero=3", "clipped", muon),
        ("dp_shard=2,zero=3", "clipped_elsewhere", muon),
        pytest.param("dp_shard=2,tp=2,zero=1", "clipped_elsewhere", adamw, marks=LONG),
        pytest.param("dp_replicate=2,dp_shard=2,zero=2", "vector", muon, marks=LONG),
    ],
)
def test_written_weights_are_trained_on(plan: str, way: str, optimizer_of: Any, pool: RankPool) -> None:
    losses, *states = script(None, way, optimizer_of)
    for theirs, *held in pool.run(script, Plan.parse(plan).world_size, plan, way, optimizer_of):
        assert theirs == pytest.approx(losses, rel=BAR)
        for state, mine in zip(states, held, strict=True):
            assert all(float((mine[name] - weight).abs().max()) < BAR for name, weight in state.items())


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "tp=2"])
def test_masters_follow_narrower_weights(plan: str, pool: RankPool) -> None:
    """Weights that are clipped stay so; lost, they would come out of the masters again."""
    way = "clipped_elsewhere" if "zero=1" in plan else "clipped"
    for _, told, held in pool.run(script, 2, f"{plan},precision=bf16", way):
        for state in (told, held):
            assert all(float(value.abs().max()) < 0.2015 for value in state.values())  # 0.2 in bf16


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1"])
def test_masters_keep_their_bits(plan: str, pool: RankPool) -> None:
    for _, told, _ in pool.run(script, 2, f"{plan},precision=bf16", "nothing"):
        apart = [(value.float() != value.bfloat16().float()).double().mean() for value in told.values()]
        assert min(apart) > 0.5  # one in 65,536 would be by chance


def asked(plan: str, case: str) -> None:
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for step, (x, y) in enumerate([pair for _ in range(2) for pair in loader]):
        optimizer.zero_grad()
        prepared.backward((model(x) - y).square().mean())
        if step == 4 and case == "drift":
            with torch.no_grad():
                model.head.weight.mul_(1 + 0.1 * float(y.mean()))
        if step == 4 and case == "stray":
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            assert model.head.weight.grad.square().sum() > 0
        if step == 4 and case == "row":
            model.head.weight.grad = model.head.weight.grad + torch.eye(2, 8).double().roll(5, 1) * y.mean()
        if step == 4 and case == "hook":
            model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        if step == 4 and case == "parameter":
            model.head.weight = nn.Parameter(torch.zeros(2, 8).double())
        if step == 4 and case == "shape":
            model.head.weight.data = torch.zeros(3, 3).double()
        if step == 4 and case == "array":
            array: np.ndarray = model.head.weight.detach().numpy()
            array *= 0.5
        optimizer.step()


@pytest.mark.parametrize(
    ("plan", "case", "kind", "words"),
    [
        ("dp_replicate=2", "hook", RefusedPlan, r"'head.weight' has a hook.*line \d+: prepared.backward"),
        ("dp_shard=2,zero=3", "hook", RefusedPlan, r"'head.weight' has a hook.*line \d+: prepared.backward"),
        ("tp=2", "hook", RefusedPlan, r"'head.weight' has a hook.*line \d+"),
        ("dp_shard=2,zero=3", "parameter", InputError, r"'head.weight' was replaced after prepare.*line \d+"),
        ("tp=2", "parameter", InputError, r"'head.weight' was replaced after prepare.*line \d+"),
        ("dp_shard=2,zero=1", "shape", InputError, r"'head.weight' is a tensor of \(3, 3\) now.*line \d+: optimizer"),
        ("dp_shard=2,zero=3", "array", RefusedPlan, r"NumPy's multiply into a view of a weight.*line \d+: array"),
        ("tp=2", "array", RefusedPlan, r"NumPy's multiply into a view of a weight.*line \d+: array"),
        (
            "dp_shard=2,zero=1",
            "drift",
            RunError,
            r"after step 5 the weights of 'head.weight' \(1 in all\) are others.*line",
        ),
        pytest.param("dp_replicate=2", "drift", RunError, r"after step 5 the weights of 'head.weight'", marks=LONG),
        pytest.param("dp_shard=2,zero=1", "stray", RefusedPlan, r"this rank's samples alone.*assert", marks=LONG),
        pytest.param("dp_shard=2,zero=3", "drift", RefusedPlan, r"by hand differs.*first at.*mul_", marks=LONG),
        pytest.param("dp_shard=2,zero=3", "row", RefusedPlan, r"by hand differs.*first at.*roll", marks=LONG),
    ],
)
def test_what_would_be_lost_is_refused(plan: str, case: str, kind: Any, words: str, pool: RankPool) -> None:
    with pytest.raises(kind, match=words):
        pool.run(asked, 2, plan, case)


def information(plan: str | None) -> list[float]:
    """After a loop, squares of gradients by the script's own backward (a Fisher information), sample by sample."""
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(8), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        _ = prepared.backward(loss) if prepared else loss.backward()
        optimizer.step()
    told = []
    for x, y in [samples(8)[at] for at in range(2)]:
        optimizer.zero_grad()
        (model(x[None]) - y).square().mean().backward()
        told.append(float(sum(param.grad.square().sum() for param in model.parameters())))
    return told


def test_gradients_of_the_scripts_own_backward_are_whole(pool: RankPool) -> None:
    for told in pool.run(information, 2, "dp_shard=2,zero=1"):
        assert told == pytest.approx(information(None), rel=BAR)


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", pytest.param("tp=2", marks=LONG)])
def test_or_refused_where_ranks_hold_pieces(plan: str, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"of a backward of the script's own.*ranks hold pieces.*line \d+: told"):
        pool.run(information, 2, plan)
