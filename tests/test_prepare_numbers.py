"""Numbers in a script's loss that may count a rank's samples or be constants, and terms that are nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples
from torch import nn
from torch.nn.functional import kl_div, log_softmax, softmax
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool


def loss_of(kind: str, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of four samples to a rank, and of five and three once: a temperature is 4, and what counts them is not."""
    n = len(out)
    t = float(n) if kind == "counted" else 4.0
    apart = kl_div(log_softmax(out / t, 1), softmax(y / t, 1), reduction="batchmean") * t * t
    entropy = -(out.softmax(1) * out.log_softmax(1)).sum(1).mean(0)
    return apart + 0.1 * entropy + 0.0 * out[0].sum()


def trained(plan: str | None, kind: str) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(32), batch_size=8)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses, counts = [], []
    for x, y in loader:
        loss = loss_of(kind, model(x), y)
        optimizer.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        counts.append(len(x))
    return losses, model.state_dict(), counts


@pytest.mark.parametrize("plan", ["dp_replicate=2", pytest.param("dp_shard=3,zero=2", marks=pytest.mark.long)])
def test_a_temperature_is_no_count(plan: str, pool: RankPool) -> None:
    losses, weights, _ = trained(None, "constant")
    runs = pool.run(trained, shardwise.Plan.parse(plan).world_size, plan, "constant")
    for theirs, held, _ in runs:
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())
    if plan == "dp_replicate=2":  # found out on the second batch, and not asked again
        assert [counts for _, _, counts in runs] == [[4, 5, 4, 4], [4, 3, 4, 4]]


def test_a_count_where_no_mean_goes_through_is_found_on_the_second_batch(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"prepared.backward\(loss\) without a weight.*test_prepare_numbers.py, line"):
        pool.run(trained, 2, "dp_replicate=2", "counted")


class Weighed(nn.Module):
    """Gives scores, and what its loss's terms are weighed by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.log_var = (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)),
            nn.Parameter(torch.zeros(2)),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(x), self.log_var


def weighed(plan: str | None, counts: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Terms weighed by uncertainties that are learned; `counts`: a sum, and a number of samples beneath them."""
    torch.manual_seed(0)
    model: Any = Weighed().double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(22), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for x, y in loader:
        out, log_var = model(x)
        apart, far = (out - y).square().mean(), (out - y).abs().sum(1).mean()
        loss = torch.exp(-log_var[0]) * apart + log_var[0] + far / (2 * log_var[1].exp()) + log_var[1] / 2
        loss = loss + 0.01 * (torch.log1p(log_var.exp()) + torch.erf(log_var)).sum()  # operations that no list has
        if counts:
            loss = (out - y).square().sum() * (log_var[0].exp() / len(x))
        optimizer.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("plan", ["dp_replicate=2", pytest.param("dp_shard=2,zero=3", marks=pytest.mark.long)])
def test_learned_weights_of_terms_are_no_divisors(plan: str, pool: RankPool) -> None:
    losses, weights = weighed(None, False)
    for theirs, held in pool.run(weighed, 2, plan, False):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


def test_a_count_beneath_such_a_weight_is_told(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"prepared.backward\(loss\) without a weight.*test_prepare_numbers.py, line"):
        pool.run(weighed, 2, "dp_replicate=2", True)


class Carrying(nn.Module):
    """Keeps its state from batch to batch, as rows of the samples that it had."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 5), nn.Linear(5, 2)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.cell(x, self.state)
        self.state = state.detach()
        return self.out(state)


def carried(plan: str | None, told: bool, scale: Any = None) -> list[float]:
    torch.manual_seed(0)
    model: Any = Carrying().double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(16), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for x, y in loader:
        n, loss = len(x), (model(x) - y).square().mean()
        loss = 2.0 * loss if scale is None else scale.by * loss  # as many as a rank has samples
        optimizer.zero_grad()
        if prepared:
            loss = prepared.backward(loss, mean_over=n) if told else prepared.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_that_keeps_rows_is_not_dealt_others_where_the_mean_is_told(pool: RankPool) -> None:
    alone = carried(None, True)
    for told in (True, False):  # the text says that 2.0 is a constant
        for theirs in pool.run(carried, 2, "dp_replicate=2", told):
            assert theirs == pytest.approx(alone, rel=BAR)
    with pytest.raises(RefusedPlan, match=r"more or fewer than before.*mean_over=n\).*\[test_prepare_numbers.py, line"):
        pool.run(carried, 2, "dp_replicate=2", False, SimpleNamespace(by=2.0))
