"""A second network that follows the first: made by a copy, updated by a method of the model, or outside of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples
from torch import nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError
from shardwise.ranks import RankPool


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


class Bootstrap(nn.Module):
    """BYOL: returns its loss, beside a target in training mode that a method moves."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.head = body(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))  # in no unit of zero=3 but the whole
        self.follows = nn.Parameter(torch.ones(4), requires_grad=False)

    @torch.no_grad()
    def move(self, x: torch.Tensor) -> float:
        for number, (mine, theirs) in enumerate(zip(self.online.parameters(), self.target.parameters(), strict=True)):
            if number % 2:
                theirs.data = 0.9 * theirs.data + 0.1 * mine.data
            else:
                theirs.data.mul_(0.9).add_(mine.data, alpha=0.1)
        self.follows.data = 0.9 * self.follows.data + 0.1 * self.scale.data
        moved = float(self.eval()(x, x))  # the model itself, whose units are gathered and given back
        self.train().target[0].bias.data.add_(0.1)
        self.follows.data.add_(0.01)
        return moved

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = self.target(two) * self.follows
        return -cosine_similarity(self.head(self.online(one) * self.scale), goal, dim=-1).mean()


class Lazy(Bootstrap):
    """Its target is copied in its first forward, as libraries have it."""

    def __init__(self) -> None:
        super().__init__()
        del self.target
        self.target = None

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        if self.target is None:
            self.target = copy.deepcopy(self.online).requires_grad_(False)
        return super().forward(one, two)


def lazily(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    return bootstrapped(plan, Lazy)


def bootstrapped(plan: str | None, kind: type = Bootstrap) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model: Any = kind().double()
    optimizer, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for x, _ in loader:
        loss = model(x, x.flip(1))
        optimizer.zero_grad()
        prepared.backward(loss) if prepared else loss.backward()
        optimizer.step()
        losses += [prepared.loss.item() if prepared else loss.item(), model.move(torch.ones(3, 6, dtype=x.dtype))]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def copied(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A teacher that is copied after the first step, batch norm and hooks of the plan and all."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(body(), nn.Linear(4, 2)).double()
    optimizer, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses, teacher = [], copy.deepcopy(model)
    first = copy.deepcopy(model[0][0])
    for x, y in loader:
        with torch.no_grad():
            goal = teacher.eval()(x)
        loss = (model(x) - y).square().mean() + (model[1].weight - teacher[1].weight).square().sum() * 0.1
        loss = loss + 0.1 * (model(x) - goal).square().mean() + first.weight.square().mean()
        optimizer.zero_grad()
        loss = prepared.backward(loss, mean_over=len(x)) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        teacher = copy.deepcopy(model)
        assert type(teacher) is nn.Sequential and type(teacher[0][0].weight) is nn.Parameter
        assert not teacher._forward_hooks and "forward" not in vars(teacher[0][1])
    return losses, teacher.state_dict()


SHORT = [
    (bootstrapped, "dp_replicate=2"),
    (bootstrapped, "dp_shard=2,zero=3"),
    (lazily, "dp_shard=2,zero=3"),
    (copied, "dp_shard=2,zero=2"),
    (copied, "dp_shard=2,zero=3"),
    (copied, "tp=2"),
]
LONG = [
    (lazily, "dp_replicate=2"),
    (bootstrapped, "dp_shard=2,zero=1"),
    (copied, "dp_replicate=2"),
    (copied, "tp=2,dp_shard=2,zero=2"),
]


@pytest.mark.parametrize(("script", "plan"), [*SHORT, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)])
def test_a_network_that_follows_another_is_one_process_s(script: Any, plan: str, pool: RankPool) -> None:
    losses, weights = script(None)
    for theirs, state in pool.run(script, 4 if "tp=2,dp" in plan else 2, plan):
        assert theirs == pytest.approx(losses, rel=BAR)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=BAR, atol=BAR)


def kept_in_lists(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Parameters that were taken before `prepare`, or before a plan cut them: read, clipped and held in bounds."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(body(), nn.Linear(4, 2)).double()
    optimizer, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    weights, named = [param for param in model.parameters() if param.dim() > 1], dict(model.named_parameters())
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = (model(x) - y).square().mean() + 0.1 * sum(weight.square().sum() for weight in weights)
        optimizer.zero_grad()
        loss = prepared.backward(loss, mean_over=len(x)) if prepared else loss
        if not prepared:
            loss.backward()
        losses += [loss.item(), sum(float(param.grad.norm()) for param in named.values())]
        torch.nn.utils.clip_grad_norm_(weights, 0.1)
        optimizer.step()
        with torch.no_grad():
            for weight in weights:
                weight.clamp_(-0.3, 0.3)
        weights[0].data = weights[0].data * 0.9
        losses.append(sum(float(weight.abs().sum()) for weight in weights))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "plan", ["dp_shard=2,zero=3", "tp=2", pytest.param("dp_shard=2,zero=1", marks=pytest.mark.long)]
)
def test_parameters_kept_in_lists_are_the_model_s(plan: str, pool: RankPool) -> None:
    test_a_network_that_follows_another_is_one_process_s(kept_in_lists, plan, pool)


class Scaled(nn.Module):
    """Its last weight is in no unit of zero=3 but the whole, which gathers for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.out = nn.Parameter(torch.linspace(-1.0, 1.0, 48).view(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.net(x) @ self.out).flatten().view(-1, 6)


def written_outputs(plan: str | None, check: bool = True) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What the model gives is written into; in a last batch of two a `squeeze()` would find one sample on a rank."""
    torch.manual_seed(0)
    model: Any = Scaled().double()
    optimizer, loader = adamw(model), DataLoader(samples(10), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan, check_loss=check) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for x, y in loader:
        out = model(x).div_(2.0)
        loss = nn.functional.mse_loss(out.sum(1, keepdim=True).squeeze(), y[:, 0])
        optimizer.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("error:Using a target size")
@pytest.mark.parametrize("check", [True, False])
def test_outputs_are_written_into_and_one_sample_is_never_squeezed(check: bool, pool: RankPool) -> None:
    losses, weights = written_outputs(None)
    for theirs, state in pool.run(written_outputs, 2, "dp_shard=2,zero=3", check):
        assert theirs == pytest.approx(losses, rel=BAR)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=BAR, atol=BAR)


def beside(plan: str | None, what: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Penalties by hand, and parameters of a loss that the optimizer trains beside the model."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    own = [torch.zeros(2, dtype=torch.float64, requires_grad=True), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    optimizer = adamw(nn.ParameterList([*model.parameters()]))
    if what == "own":
        optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": own, "weight_decay": 0.0}], lr=0.01)
    loader = DataLoader(samples(10), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for x, y in loader:
        each = (model(x) - y).square()
        penalty = 0.1 * sum(param.abs().sum() for param in model.parameters()) + model[0].weight.norm()
        if what == "own":
            loss = (each * torch.exp(-own[0]) + own[0]).mean() + own[1].square().sum()
        elif what in ("sum", "weighed"):
            loss = each.sum() + penalty
        else:
            loss = each.mean() + penalty
        optimizer.zero_grad()
        if prepared:
            loss = prepared.backward(loss, len(x)) if what == "weighed" else prepared.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kept = {f"own {at}": value.detach().clone() for at, value in enumerate(own)} if what == "own" else {}
    return losses, {**{name: value.clone() for name, value in model.state_dict().items()}, **kept}


BESIDE = [("mean", "dp_shard=2,zero=2"), ("own", "dp_replicate=2"), ("own", "dp_shard=2,zero=3"), ("own", "tp=2")]


@pytest.mark.parametrize(("what", "plan"), BESIDE)
def test_penalties_and_parameters_of_a_loss_count_once(what: str, plan: str, pool: RankPool) -> None:
    losses, weights = beside(None, what)
    for theirs, state in pool.run(beside, 2, plan, what):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert state.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=BAR, atol=BAR)


def test_a_penalty_that_each_rank_would_add_to_a_sum_is_refused(pool: RankPool) -> None:
    for what in ("sum", "weighed"):
        with pytest.raises(InputError, match=r"a sum over samples plus a penalty on weights.*line \d+"):
            pool.run(beside, 2, "dp_replicate=2", what)


def thawed(plan: str | None, how: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A body that is frozen at `prepare` and trained from the second epoch on."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(body(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    optimizer, loader = adamw(model[1]), DataLoader(samples(8), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = shardwise.prepare(model, optimizer, loader, plan=plan, thaws=how != "refused")
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for epoch in range(2):
        if epoch:
            model[0].requires_grad_(True)
            if how == "group":
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.002})
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                optimizer = prepared.replace_optimizer(optimizer) if prepared else optimizer
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            prepared.backward(loss) if prepared else loss.backward()
            optimizer.step()
            losses.append(prepared.loss.item() if prepared else loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("how", "plan"), [("group", "dp_shard=2,zero=3"), ("another", "dp_replicate=2")])
def test_what_is_frozen_at_prepare_may_be_trained_later(how: str, plan: str, pool: RankPool) -> None:
    losses, weights = thawed(None, how)
    for theirs, state in pool.run(thawed, 2, plan, how):
        assert theirs == pytest.approx(losses, rel=BAR)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=BAR, atol=BAR)


def test_what_is_thawed_without_a_word_is_refused_with_the_remedy(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"'0.0.weight', which was frozen at prepare.*thaws=True"):
        pool.run(thawed, 2, "dp_replicate=2", "refused")
