"""What a script computes of a batch's samples beside the plan's own loss: as of all samples, on any ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples, stepped
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def begun(model: Any, plan: str | None) -> tuple[Any, Any, Any, Any]:
    """(model, optimizer, loader, what `prepare` gave or None); batches of five, five and four samples."""
    given: Any = model, adamw(model), DataLoader(samples(14), batch_size=5)
    prepared: Any = shardwise.prepare(*given, plan=plan) if plan else None
    return *(prepared or given), prepared


def attacked(plan: str | None, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains on inputs that were moved along their gradient: by its size, so that a mean over a part is seen."""
    model, optimizer, loader, prepared = begun(network(), plan)
    told = []
    for x, y in loader:
        moved = x.clone().requires_grad_()
        loss = (model(moved) - y).square().mean()
        if kind == "grad":
            (gradient,) = torch.autograd.grad(loss, moved)
        elif kind == "of a sum":
            (gradient,) = torch.autograd.grad((model(moved) - y).square().sum(), [moved])
        elif kind == "penalty":  # of WGAN-GP and of R1
            (gradient,) = torch.autograd.grad(model(moved).sum(), moved, create_graph=True)
        else:
            loss.backward()
            gradient = moved.grad
            optimizer.zero_grad()
        if kind == "penalty":
            loss = loss + (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        else:
            loss = (model(x + 3 * gradient.detach()) - y).square().mean()
        optimizer.zero_grad()
        told.append(stepped(loss, optimizer, prepared))
    return told, {name: weight.clone() for name, weight in model.state_dict().items()}


def taught(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A teacher that is in training mode, beside the plan: its batch norm takes statistics of all samples."""
    teacher = nn.Sequential(network(), nn.BatchNorm1d(2)).double()
    model, optimizer, loader, prepared = begun(network(), plan)
    told = []
    for x, _ in loader:
        with torch.no_grad():
            aim = teacher(x)
        loss = (model(x) - aim).square().mean()
        optimizer.zero_grad()
        told.append(stepped(loss, optimizer, prepared))
    told += teacher[1].running_mean.tolist() + teacher[1].running_var.tolist()
    return told, {name: weight.clone() for name, weight in model.state_dict().items()}


def check(pool: RankPool, plan: str, function: Any, *args: Any) -> None:
    expected, weights = function(None, *args)
    for told, trained in pool.run(function, shardwise.Plan.parse(plan).world_size, plan, *args):
        assert told == pytest.approx(expected, rel=BAR)
        for name, weight in weights.items():
            assert float((trained[name] - weight).abs().max()) < BAR, name


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("dp_replicate=2", "grad"), ("dp_replicate=3", "of a sum"), ("dp_replicate=2", "backward"),
        ("dp_shard=2,zero=2", "penalty"), ("dp_shard=3,zero=3", "grad"), ("tp=2", "grad"),
    ],
)  # fmt: skip
def test_gradients_by_inputs_are_those_of_the_whole_batch(plan: str, kind: str, pool: RankPool) -> None:
    check(pool, plan, attacked, kind)


@pytest.mark.parametrize("plan", ["dp_replicate=3", "dp_shard=2,zero=3"])
def test_a_teacher_in_training_has_the_statistics_of_all_samples(plan: str, pool: RankPool) -> None:
    check(pool, plan, taught)


def unseen(plan: str) -> None:
    """A gradient by inputs of a loss whose mean is over a number that Python counted of its own."""
    model, _, loader, _ = begun(network(), plan)
    for x, y in loader:
        moved = x.clone().requires_grad_()
        loss = ((model(moved) - y).square().sum(1) + 1).log().sum().sqrt()
        torch.autograd.grad(loss, moved)


def test_a_gradient_by_inputs_whose_size_is_not_known_is_refused(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"what its loss is a mean over cannot be seen.*line \d+: torch.autograd"):
        pool.run(unseen, 2, "dp_replicate=2")
