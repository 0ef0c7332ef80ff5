"""Models that are more than one call: in parts, copied, followed, thawed, with states of their samples, in a loop."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_scripts import (
    adamw,
    batches,
    begin,
    check_equal,
    equals_one_process,
    made,
    mse,
    net,
    refused_with_its_line,
    stepped,
    train,
    weights_of,
    whole,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool


def body(out: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, out))


# --- modules that a script calls by themselves


class Agent(nn.Module):
    """A model without a forward, whose methods call its modules and read a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.actor, self.critic = nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.body(x) * self.scale)

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(self.body(x)), self.value(x)


def agent(prepared: Any, model: Any, x: torch.Tensor, y: torch.Tensor, played: list[float]) -> torch.Tensor:
    with torch.no_grad():
        model.eval()
        played.append(model.value(torch.ones(3, 6, dtype=torch.float64)).sum().item())
        model.train()
    out, value = model.both(x)
    return (out - y).square().mean() + 0.1 * value.square().mean()


def several(prepared: Any, models: Any, x: torch.Tensor, y: torch.Tensor, played: list[float]) -> torch.Tensor:
    """An encoder, a head and a frozen target that follows the encoder, batch norms among them."""
    encoder, head, target = models
    h = encoder(x)
    with torch.no_grad():
        goal = target(x)
        with whole(prepared):
            for kept, param in zip(target.parameters(), encoder.parameters(), strict=True):
                kept.data = 0.9 * kept.data + 0.1 * param.data
    return (head(h) - y).square().mean() + 0.1 * (h - goal).square().mean()


def weighed(prepared: Any, models: Any, x: torch.Tensor, y: torch.Tensor, played: list[float]) -> torch.Tensor:
    """Two terms by learned weights, parameters of the script's own beside the model."""
    model, weights = models
    out, logs = model(x), weights[0]
    each = torch.stack([(out - y).square().mean(), out.abs().mean()])
    return ((-logs).exp() * each + logs).sum()


MAKES: dict[Any, Callable[[], Any]] = {
    agent: Agent,
    several: lambda: nn.ModuleList([body(), nn.Linear(8, 2), body().requires_grad_(False)]),
    weighed: lambda: nn.ModuleList([nn.Linear(6, 2), nn.ParameterList([torch.zeros(2)])]),
}


def in_parts(plan: str | None, case: Callable) -> tuple:
    """Modules that are called by themselves."""
    given, played = made(MAKES[case]), list[float]()
    model = tuple(given) if isinstance(given, nn.ModuleList) else given
    prepared, model, optimizer, loader = begin(plan, model, batches(12, shuffle=True), adamw(given))
    torch.manual_seed(7)
    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = case(prepared, model, x, y, played)
            losses.append(stepped(prepared, optimizer, loss))
    return losses, played, weights_of(prepared or given)


class Flat(nn.Module):
    """Its last weight is in no unit of zero=3 but the whole, which gathers for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.out = nn.Parameter(torch.linspace(-1.0, 1.0, 48).view(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.net(x) @ self.out).flatten().view(-1, 6)


def squeezed(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What the model gives is written into; in a last batch of two a `squeeze()` would find one sample on a rank."""
    return F.mse_loss(model(x).div_(2.0).sum(1, keepdim=True).squeeze(), y[:, 0])


def written_outputs(plan: str | None, check: bool) -> tuple:
    return train(plan, made(Flat), batches(10), squeezed, check_loss=check)


@pytest.mark.filterwarnings("error:Using a target size")
@pytest.mark.parametrize("check", [True, False])
def test_outputs_are_written_into_and_one_sample_is_never_squeezed(check: bool, pool: RankPool) -> None:
    check_equal(pool, written_outputs, "dp_shard=2,zero=3", check)


def judged(plan: str | None) -> tuple:
    """What one model gives, cut by its last dim, is given to another one, whose weights are gathered to be normed."""
    maker = made(lambda: nn.Sequential(weight_norm(nn.Linear(3, 12)), nn.ReLU(), nn.Linear(12, 5)))
    norm: Any = spectral_norm
    judge = made(lambda: nn.Sequential(norm(nn.Linear(5, 12)), nn.LeakyReLU(0.2), norm(nn.Linear(12, 1))))
    _, maker, _, loader = begin(plan, maker, batches(12))

    def loss_of(judge: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(1 - judge(x[:, :5])).mean() + torch.relu(1 + judge(maker(x[:, :3]).detach())).mean()

    return train(plan, judge, loader, loss_of)


# --- copies


def copied(plan: str | None) -> tuple:
    """A teacher that is copied after the first step, batch norm and hooks of the plan and all."""
    prepared, model, optimizer, loader = begin(plan, made(lambda: nn.Sequential(body(4), nn.Linear(4, 2))), batches(12))
    model.saved_hooks = [1]  # a name that ends as torch's own tables of hooks do
    losses, teacher, first = [], copy.deepcopy(model), copy.deepcopy(model[0][0])
    assert teacher.saved_hooks == [1]
    for x, y in loader:
        with torch.no_grad():
            goal = teacher.eval()(x)
        loss = mse(model, x, y) + (model[1].weight - teacher[1].weight).square().sum() * 0.1
        loss = loss + 0.1 * mse(model, x, goal) + first.weight.square().mean()
        losses.append(stepped(prepared, optimizer, loss))
        teacher = copy.deepcopy(model)
        assert type(teacher) is nn.Sequential and type(teacher[0][0].weight) is nn.Parameter
        assert not teacher._forward_hooks and "forward" not in vars(teacher[0][1])
    return losses, weights_of(teacher)


# --- what changes in mid training


def thawed(plan: str | None, how: str) -> tuple:
    """A body that is frozen at `prepare` and trained from the second epoch on."""
    model = made(lambda: nn.Sequential(body(4), nn.Linear(4, 2)))
    model[0].requires_grad_(False)
    loader = batches(8)
    prepared, model, optimizer, loader = begin(plan, model, loader, adamw(model[1]), thaws=how != "untold")
    losses = []
    for epoch in range(2):
        if epoch:
            model[0].requires_grad_(True)
            if how == "group":
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.002, "betas": (0.8, 0.99)})
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                optimizer = prepared.replace_optimizer(optimizer) if prepared else optimizer
        for x, y in loader:
            loss = mse(model, x, y)
            losses.append(stepped(prepared, optimizer, loss))
    return losses, weights_of(model)


def by_the_old_one(plan: str) -> None:
    prepared, model, optimizer, loader = begin(plan, net(), batches(8))
    prepared.replace_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loader:
        prepared.backward(mse(model, x, y))
        optimizer.step()


# --- what is left behind


def no_rows(plan: str) -> None:
    prepared, model, _, loader = begin(plan, net(), batches(9))
    for x, _ in loader:
        prepared.gather(model(x).mean(0))


def ended(plan: str) -> int:
    """How many engines more are alive after a script's loop has ended and its names are gone."""

    def engines() -> int:
        gc.collect()
        return sum(isinstance(one, Engine) for one in gc.get_objects())

    before = engines()  # of scripts that had not come to an end
    train(plan, net(), batches(16, 8), mse)
    return engines() - before


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_a_script_that_has_ended_leaves_nothing_behind(plan: str, pool: RankPool) -> None:
    """Its last outputs held the graph, that the weights, and these their groups: in every job of a process one more."""
    assert pool.run(ended, 2, plan) == [0, 0]


class Counting(nn.Module):
    """Counts its forwards in an attribute of its class, by which it scales what it returns."""

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).forwards += 1
        return self.net(x) / type(self).forwards


def counting(plan: str | None) -> tuple:
    Counting.forwards = 0
    prepared, model, optimizer, loader = begin(plan, made(Counting), batches(10))
    losses = [stepped(prepared, optimizer, mse(model, x, y)) for x, y in loader]
    return [*losses, Counting.forwards], weights_of(prepared or model)


class Holds(nn.Module):
    """Gives parameters of a list a forward."""

    def __init__(self, params: nn.ParameterList) -> None:
        super().__init__()
        self.params = params

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.params[0]).tanh() @ self.params[1]


def parameters_alone(plan: str | None, called: bool) -> tuple:
    params = made(lambda: nn.ParameterList([0.3 * torch.randn(6, 8), 0.3 * torch.randn(8, 2)]))
    prepared, model, optimizer, loader = begin(plan, Holds(params) if called else params, batches(11))
    losses = []
    for x, y in loader:
        x = x + 0.1 * torch.randn_like(x)
        output = model(x) if called else (x @ model[0]).tanh() @ model[1]
        losses.append(stepped(prepared, optimizer, (output - y).square().mean()))
    return losses, weights_of(model)


def in_eval_mode(plan: str | None) -> tuple:
    """Trained as it is evaluated: with running statistics, and without dropout."""
    model = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))).eval()
    prepared, model, optimizer, loader = begin(plan, model, batches(11))
    losses = [stepped(prepared, optimizer, mse(model, x, y)) for x, y in loader]
    return losses, weights_of(model)


# --- what cannot be dealt is refused


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nn.Linear(3, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.sparse.mm(edges, self.net(x)))


def sparse(plan: str) -> None:
    """One graph for good, beside which nothing is loaded."""
    x, edges = torch.randn(4, 3).double(), torch.eye(4).double().to_sparse()
    _, model, *_ = begin(plan, made(Sparse), [(x, x)])
    model(x, edges)


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (in_parts, "dp_shard=2,zero=3", agent), (in_parts, "dp_shard=2,zero=3", several), (in_parts, "tp=2", agent),
    (in_parts, "dp_replicate=2", several), (in_parts, "dp_shard=2,zero=2", weighed), (in_parts, "tp=2", weighed),
    (parameters_alone, "dp_replicate=2", False), (parameters_alone, "dp_shard=2,zero=3", False),
    (parameters_alone, "tp=2", True), (in_eval_mode, "dp_shard=2,zero=3"),
    (judged, "tp=2"), (counting, "dp_shard=2,zero=3"), (counting, "tp=2"),
    (copied, "dp_shard=2,zero=2"),
    (copied, "dp_shard=2,zero=3"), (copied, "tp=2"), (thawed, "dp_shard=2,zero=3", "another"),
    (thawed, "dp_replicate=2", "another"), (thawed, "tp=2", "group"), (thawed, "dp_shard=2,zero=3", "group"),
]  # fmt: skip
MORE_EQUAL: list[tuple] = [
    (parameters_alone, "dp_shard=2,zero=1", False), (parameters_alone, "dp_shard=2,zero=2", False),
    (in_eval_mode, "dp_replicate=2"), (in_eval_mode, "dp_shard=2,zero=1"),
    (in_parts, "dp_replicate=2", agent), (in_parts, "dp_shard=2,zero=1", agent),
    (in_parts, "dp_shard=2,zero=2", agent), (in_parts, "tp=2,dp_shard=2,zero=2", agent),
    (in_parts, "dp_shard=2,zero=1", several), (in_parts, "dp_shard=2,zero=2", several), (in_parts, "tp=2", several),
    (in_parts, "tp=2,dp_shard=2,zero=2", several), (in_parts, "dp_replicate=2", weighed),
    (in_parts, "dp_shard=2,zero=1", weighed), (in_parts, "dp_shard=2,zero=3", weighed),
    (in_parts, "tp=2,dp_shard=2,zero=2", weighed), 
    (copied, "tp=2,dp_shard=2,zero=2"),
    
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL, MORE_EQUAL)


REFUSED: list[tuple] = [
    (parameters_alone, "tp=2", False, InputError, r"let a forward of it use parameters.*line \d+"),
    (thawed, "dp_replicate=2", "untold", InputError, "'0.0.weight', which was frozen at prepare.*thaws=True"),
    (by_the_old_one, "dp_replicate=2", InputError, r"replace_optimizer took the place of.*line \d+"),
    (no_rows, "dp_replicate=2", InputError, r"prepared.gather: .*\(2,\) has no row .*line \d+"),
    (sparse, "tp=2", RefusedPlan, r"layout torch.sparse_coo.*to_dense.*line \d+: model\(x, edges\)"),
    (sparse, "dp_replicate=2", RefusedPlan, r"has handed out no batch.*line \d+: model\(x, edges\)"),
]  # fmt: skip
test_a_script_is_refused_with_its_line = refused_with_its_line(REFUSED)
