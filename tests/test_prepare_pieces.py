"""Weights that a script's own code reads, draws and sets beside the forward, where ranks hold pieces of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, net, samples
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.ranks import RankPool


@torch.no_grad()
def rebound(model: Any) -> None:
    """The old values stay with whoever kept them."""
    for param in model.parameters():
        kept, known = param.data, param.data.clone()
        param.data = param.data * 2
        assert (kept == known).all()
        param.data = kept
        param.mul_(1.5)


@torch.no_grad()
def rows(model: Any) -> None:
    model.head.weight[0] = 0.0
    model.head.weight.data[1] = 0.5
    model.layers[0].weight.t().add_(1.0)
    model.layers[0].weight.fill_diagonal_(0.5)


@torch.no_grad()
def given(model: Any) -> None:
    for param in model.parameters():
        values = torch.arange(param.numel()).double().view(param.shape).sin()
        param.data = values.clone() if param.dim() > 1 else param.data
        param.copy_(values.cos())
        param.data.add_(values, alpha=0.5)
        torch._foreach_lerp_([param], [values], 0.1)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters())


def drawn(model: Any) -> None:
    for child in model.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    nn.init.orthogonal_(model.head.weight)


def noised(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param) * (torch.rand_like(param) > 0.5)
            param.data.normal_(0.1, 0.2) if param.dim() == 1 else None


def reset(model: Any) -> None:
    """By the modules alone, as most do."""
    model.layers[0].reset_parameters()
    nn.init.kaiming_normal_(model.head.weight)
    nn.init.zeros_(model.head.bias)


BETWEEN: dict[str, Callable[[Any], None]] = {
    one.__name__: one for one in (rebound, rows, given, drawn, noised, reset)
}  # fmt: skip


def penalty(model: Any) -> torch.Tensor:
    return 1e-2 * sum(p.abs().sum() for p in model.parameters()) + (model.head.weight @ model.head.weight.t()).norm()


def script(plan: str | None, between: str, options: dict, penalised: bool = False) -> tuple[list[float], dict, dict]:
    """Trains, does something to the weights, trains on; a copy follows them by `.data`."""
    model: Any = net()
    followed = copy.deepcopy(model)
    optimizer, loader = adamw(model), DataLoader(samples(15), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan, **options) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    torch.manual_seed(3)
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().sum(1).mean() + (penalty(model) if penalised else 0.0)
            loss = prepared.backward(loss, mean_over=len(x)) if prepared else loss
            if not prepared:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
            of = followed if between == "reset" else model  # under tp reading is refused
            for old, new in zip(followed.parameters(), of.parameters(), strict=True):
                old.data.copy_(0.1 * new.data + 0.9 * old.data)
        if between:
            BETWEEN[between](model)
    return losses, prepared.state_dict() if prepared else model.state_dict(), followed.state_dict()


def equal(pool: RankPool, plan: str, *given: Any) -> None:
    losses, *states = script(None, *given)
    for theirs, *held in pool.run(script, Plan.parse(plan).world_size, plan, *given):
        assert theirs == pytest.approx(losses, rel=BAR)
        for state, mine in zip(states, held, strict=True):
            assert all(float((mine[name] - weight).abs().max()) < BAR for name, weight in state.items())


@pytest.mark.parametrize(
    ("plan", "between"),
    [
        ("dp_shard=3,zero=3", "rebound"),
        ("dp_shard=2,zero=3", "rows"),
        ("dp_shard=2,zero=3", "given"),
        pytest.param("dp_replicate=2,dp_shard=2,zero=3", "given", marks=pytest.mark.long),
        ("dp_shard=3,zero=3", "drawn"),
        ("dp_shard=2,zero=3", "noised"),
        ("tp=2", "reset"),
    ],
)
def test_weights_are_set_and_drawn_as_in_one_process(plan: str, between: str, pool: RankPool) -> None:
    equal(pool, plan, between, {})


def test_replicas_that_draw_their_own_come_to_the_same_weights(pool: RankPool) -> None:
    runs = pool.run(script, 4, "dp_replicate=2,dp_shard=2,zero=3", "drawn", {"randomness": "fast"})
    assert all(torch.equal(run[1][name], weight) for run in runs for name, weight in runs[0][1].items())


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("dp_shard=3,zero=3", {}),
        pytest.param("dp_replicate=2,dp_shard=2,zero=3", {}, marks=pytest.mark.long),
        ("dp_shard=2,zero=3", {"loss_scope": "global"}),
    ],
)
def test_a_penalty_on_sharded_weights(plan: str, options: dict, pool: RankPool) -> None:
    equal(pool, plan, "", options, True)


def sharpness(plan: str | None) -> tuple[list[float], dict]:
    """Two backwards in a step: at the weights, and at those a way up the slope."""
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    params, losses = list(model.parameters()), []
    for x, y in loader:
        for up in (True, False):
            loss = (model(x) - y).square().mean()
            loss = prepared.backward(loss, mean_over=len(x)) if prepared else loss
            if not prepared:
                loss.backward()
            with torch.no_grad():
                if up:
                    norm = torch.norm(torch.stack([p.grad.norm() for p in params]))
                    kept = [p.data.clone() for p in params]
                    for p in params:
                        p.add_(p.grad * (0.5 / norm))
                else:
                    for p, old in zip(params, kept, strict=True):
                        p.data = old
                    optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, prepared.state_dict() if prepared else model.state_dict()


@pytest.mark.parametrize("plan", ["dp_shard=3,zero=3", "dp_replicate=2,dp_shard=2,zero=3"])
def test_weights_that_are_moved_and_put_back_within_a_step(plan: str, pool: RankPool) -> None:
    losses, weights = sharpness(None)
    for theirs, held in pool.run(sharpness, Plan.parse(plan).world_size, plan):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


def asked(plan: str, case: str) -> None:
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        if case == "gradient":
            torch.autograd.grad(loss, model.head.weight, retain_graph=True)
        if case == "norm":
            sum(param.detach().norm().item() for param in model.parameters())
        if case == "row":
            with torch.no_grad():
                model.layers[0].weight[0].zero_()
        if case == "shape":
            model.head.weight.data = torch.zeros(3, 3).double()
        prepared.backward(loss)


@pytest.mark.parametrize(
    ("plan", "case", "kind", "words"),
    [
        ("dp_shard=2,zero=3", "gradient", RefusedPlan, r"autograd.grad.*of this rank's samples alone.*line \d+: torch"),
        ("dp_shard=2,tp=2,zero=3", "norm", RefusedPlan, r"a parameter is read \(detach\).*line \d+: sum"),
        ("dp_shard=2,zero=3", "row", RefusedPlan, r"zero_ into a view of a weight.*line \d+: model.layers"),
        ("dp_shard=2,zero=3", "shape", InputError, r"param.data = a tensor of \(3, 3\).*line \d+: model.head"),
    ],
)
def test_what_pieces_cannot_give_is_refused(plan: str, case: str, kind: Any, words: str, pool: RankPool) -> None:
    with pytest.raises(kind, match=words):
        pool.run(asked, Plan.parse(plan).world_size, plan, case)
