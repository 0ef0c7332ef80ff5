"""Weights that a script's own code reads, writes and draws, beside the forward or in it: as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_scripts import run_script
from small_scripts import (
    adamw,
    back,
    batches,
    begin,
    close,
    equals_one_process,
    made,
    mse,
    muon,
    net,
    refused_with_its_line,
    train,
    weights_of,
    whole,
)
from torch import nn
from torch.nn.functional import normalize

import shardwise
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.layout import Plan
from shardwise.part.assigned import follow_data
from shardwise.ranks import RankPool

LONG = pytest.mark.long


def long(*cases: tuple) -> list[Any]:
    return [pytest.param(*case, marks=LONG) for case in cases]


# --- after a step: written, moved, drawn


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


def pieces(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data = param.data * 0.9


@torch.no_grad()
def with_state(model: Any, optimizer: Any) -> None:
    """Weights beside what the optimizer keeps of them, as a schedule-free one swaps them between its calls."""
    for param in optimizer.param_groups[0]["params"]:
        param.lerp_(optimizer.state[param]["exp_avg"], 0.1)
        optimizer.state[param]["exp_avg"].sub_(param, alpha=0.01)


@torch.no_grad()
def rows(model: Any, optimizer: Any) -> None:
    model.head.weight[0] = 0.0
    model.head.weight.data[1] = 0.5
    model.layers[0].weight.t().add_(1.0)
    model.layers[0].weight.fill_diagonal_(0.5)


@torch.no_grad()
def given(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        values = torch.arange(param.numel()).double().view(param.shape).sin()
        param.data = values.clone() if param.dim() > 1 else param.data
        param.copy_(values.cos())
        param.data.add_(values, alpha=0.5)
        torch._foreach_lerp_([param], [values], 0.1)


def drawn(model: Any, optimizer: Any) -> None:
    for child in model.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    nn.init.orthogonal_(model.head.weight)


@torch.no_grad()
def noised(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        param += 0.1 * torch.randn_like(param) * (torch.rand_like(param) > 0.5)
        param.data.normal_(0.1, 0.2) if param.dim() == 1 else None


def nothing(model: Any, optimizer: Any) -> None:
    """Masters keep what narrower weights have not."""


EVERY_STEP = (clipped, clipped_elsewhere, vector, swapped, pieces, with_state, nothing)  # others in the middle, once


def script(plan: str | None, way: Callable, optimizer_of: Any = adamw, **options: Any) -> tuple:
    """Trains and writes weights, in every step or once; a copy follows them by `.data`. The last step writes too."""
    model: Any = net()
    followed = copy.deepcopy(model)
    prepared, model, optimizer, loader = begin(plan, model, batches(15), optimizer_of(model), **options)
    torch.manual_seed(3)
    losses = []
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x).double() - y).square().sum(1).mean()
            losses.append(back(prepared, loss, **({"mean_over": len(x)} if prepared else {})))
            optimizer.step()
            with whole(prepared, state=True):
                if way in EVERY_STEP:
                    way(model, optimizer)
                for old, new in zip(followed.parameters(), model.parameters(), strict=True):
                    old.data.copy_(0.1 * new.data + 0.9 * old.data)
        with whole(prepared):
            if epoch == 0 and way not in EVERY_STEP:
                way(model, optimizer)
    held = {name: value.clone().cpu() for name, value in model.state_dict().items()}
    return losses, weights_of(prepared or model), held, weights_of(followed)


def own_draws(plan: str) -> dict[str, torch.Tensor]:
    return script(plan, drawn, randomness="fast")[1]


def test_replicas_that_draw_their_own_come_to_the_same_weights(pool: RankPool) -> None:
    first, *others = pool.run(own_draws, 4, "dp_replicate=2,dp_shard=2,zero=3")
    assert all(torch.equal(one[name], weight) for one in others for name, weight in first.items())


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "tp=2"])
def test_masters_follow_narrower_weights(plan: str, pool: RankPool) -> None:
    """Weights that are clipped stay so; lost, they would come out of the masters again."""
    way = clipped_elsewhere if "zero=1" in plan else clipped
    for _, told, held, _ in pool.run(script, 2, f"{plan},precision=bf16", way):
        for state in (told, held):
            assert max(float(value.abs().max()) for value in state.values()) < 0.2015  # 0.2 in bf16


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1"])
def test_masters_keep_their_bits(plan: str, pool: RankPool) -> None:
    for _, told, *_ in pool.run(script, 2, f"{plan},precision=bf16", nothing):
        apart = [(value.float() != value.bfloat16().float()).double().mean() for value in told.values()]
        assert min(apart) > 0.5  # one in 65,536 would be by chance


def kept_in_lists(plan: str | None) -> tuple:
    """Parameters that were taken before `prepare`, or before a plan cut them: read, clipped and held in bounds."""
    model = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2)))
    weights, named = [param for param in model.parameters() if param.dim() > 1], dict(model.named_parameters())
    prepared, model, optimizer, loader = begin(plan, model, batches(12))
    told = []
    for x, y in loader:
        loss = mse(model, x, y) + 0.1 * sum(weight.square().sum() for weight in weights)
        optimizer.zero_grad()
        told += [back(prepared, loss), sum(float(param.grad.norm()) for param in named.values())]
        torch.nn.utils.clip_grad_norm_(weights, 0.1)
        optimizer.step()
        with torch.no_grad(), whole(prepared):
            for weight in weights:
                weight.clamp_(-0.3, 0.3)
            weights[0].data = weights[0].data * 0.9
            told.append(sum(float(weight.abs().sum()) for weight in weights))
    return told, weights_of(model)


# --- complex weights


COMPLEX = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
x = torch.randn(8, 5)
loader = DataLoader(TensorDataset(x, x.roll(1, 1).tanh()), batch_size=4, shuffle=True)


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.enter = nn.Linear(5, 2 * width, dtype=torch.cdouble)
        self.inner = nn.Linear(2 * width, width, dtype=torch.cdouble)
        self.scale, self.real = nn.Parameter(torch.rand(width) * (1 + 1j)), nn.Linear(width, width)
        self.leave = nn.Linear(width, 5, dtype=torch.cdouble)

    def forward(self, x):
        z = self.enter(torch.complex(x, x.flip(-1)))
        z = self.inner(z * torch.tanh(z.abs())) + self.scale
        return self.leave(torch.complex(self.real(z.real), torch.tanh(z.imag))).abs()


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-4)
losses, made = [], []
#prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=PLAN)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss = loss + PENALTY
        loss.backward()  # or prepared's
        GRADIENTS
        optimizer.step()
        with torch.no_grad(), WHOLE:
            WEIGHTS
        losses.append(loss.item())
"""
ALL = "model.parameters()"
LINES = {
    "penalty": ("PENALTY", f"1e-2 * sum(p.abs().sum() for p in {ALL})"),
    "sizes": ("WEIGHTS", "made += [(n, p.shape, p.dtype, p.numel()) for n, p in model.named_parameters()]"),
    "clipped": ("GRADIENTS", f"made.append(round(float(torch.nn.utils.clip_grad_norm_({ALL}, 0.5)), 9))"),
    "gradients": ("GRADIENTS", f"for p in {ALL}: p.grad = p.grad / (1 + p.grad.abs())"),
    "turned": ("WEIGHTS", "model.inner.weight.mul_(torch.exp(torch.tensor(0.1j)))"),
    "assigned": ("WEIGHTS", "model.enter.weight.data = model.enter.weight.data / model.enter.weight.data.abs()"),
    "loaded": ("WEIGHTS", "model.load_state_dict({k: 0.9 * v for k, v in model.state_dict().items()})"),
    "state": ("GRADIENTS", "made += [(v['exp_avg'].dtype, v['exp_avg'].shape)"
                           " for v in optimizer.state_dict()['state'].values()]"),
}  # fmt: skip
QUICK = [("penalty", "dp_shard=2,zero=3"), ("gradients", "tp=2")]
REST = [(name, plan) for name in LINES for plan in ("dp_shard=2,zero=1", "dp_shard=2,zero=3", "tp=2")]


def text(name: str, plan: str | None) -> str:
    """The script with one line more, prepared where there is a plan."""
    place, line = LINES[name]
    made = COMPLEX.replace(place, line).replace("PENALTY", "0").replace("GRADIENTS", "pass").replace("WEIGHTS", "pass")
    if plan is None:
        return made.replace("WHOLE", "torch.no_grad()")
    made = made.replace("WHOLE", "torch.no_grad()" if name in ("loaded", "state") else "prepared.whole()")
    made = made.replace("#prepared", "import shardwise\nprepared").replace("PLAN", repr(plan))
    return made.replace("loss.backward()", "loss = prepared.backward(loss)")


@pytest.mark.parametrize(("name", "plan"), [*QUICK, *long(*(one for one in REST if one not in QUICK))])
def test_a_script_with_complex_weights(name: str, plan: str, pool: RankPool, tmp_path: Path) -> None:
    paths = [tmp_path / "one.py", tmp_path / "many.py"]
    for path, of in zip(paths, (None, plan), strict=True):
        path.write_text(text(name, of))
    (one,) = pool.run(run_script, 1, str(paths[0]))
    for run in pool.run(run_script, Plan.parse(plan).world_size, str(paths[1]), timeout_s=120):
        close(run, one, 1e-8)


# --- written in a forward


class Block(nn.Module):
    """Normalises its weight as it begins, or leaves it."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.line, self.writes = nn.Linear(6, 6), writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes == "in place":
            with torch.no_grad():
                self.line.weight.copy_(normalize(self.line.weight, dim=1))
        return x + self.line(x).tanh()


class Writing(nn.Module):
    """Key weights follow the query's; from its third forward on, a weight outside of blocks becomes smaller."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.query = nn.Sequential(*(Block(writes) for _ in range(3)))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.scale, self.times, self.writes = nn.Parameter(torch.ones(6, 2)), 0, writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        for one, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
            other.data = 0.5 * other.data + 0.5 * one.data
        if self.times > 2 and self.writes == "another":
            self.scale = nn.Parameter(0.9 * self.scale)
        elif self.times > 2 and self.writes == "in place":
            self.scale.data.mul_(0.9)
        return (self.query(x) * self.key(x)) @ self.scale


def in_a_forward(plan: str | None, writes: str, scope: Any) -> tuple:
    """What a forward writes is what one process writes."""
    model = made(lambda: Writing(writes))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    return train(plan, model, batches(20), mse, optimizer, loss_scope=scope)


class Reading(nn.Module):
    """Reads in its own forward what its units hold: for a penalty, and as a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block("") for _ in range(3))), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(param.square().sum() for param in self.blocks.parameters())
        return self.head(self.blocks(x) @ self.blocks[0].line.weight.t()) + 1e-2 * penalty


def read_in_a_forward(plan: str | None, scope: Any) -> tuple:
    model: Any = made(Reading)
    evaluated: list[float] = []

    def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            evaluated.append(float(model(torch.ones_like(x[:1])).sum()))
        return mse(model, x, y)

    return train(plan, model, batches(18), loss_of, loss_scope=scope), evaluated


def beside_a_cut_model(plan: str | None) -> tuple:
    """Another model of the process reads its weights as parts, for which `.data` of all tensors is followed."""
    assert shardwise.prepare  # loaded, as by a first model, before the attribute is replaced
    cut = nn.Linear(1, 1)
    undo = follow_data(cut)
    try:
        return in_a_forward(plan, "keys", "sample")
    finally:
        undo()


# --- what would be lost is refused


def mistaken(plan: str, case: str) -> None:
    prepared, model, optimizer, loader = begin(plan, net(), batches(40))
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = mse(model, x, y)
        if case == "gradient":
            torch.autograd.grad(loss, model.head.weight, retain_graph=True)
        if case == "row":
            with torch.no_grad():
                model.layers[0].weight[0].zero_()
        if case in ("penalty", "forward"):
            with prepared.whole():
                loss = loss + sum(p.square().sum() for p in model.parameters())
                if case == "forward":
                    model(x)
        prepared.backward(loss)
        if case == "drift" and step == 4:
            with torch.no_grad():
                model.head.weight.mul_(1 + 0.1 * float(y.mean()))
        if case == "stray" and step == 4:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            assert model.head.weight.grad.square().sum() > 0
        if case == "parameter" and step == 4:
            model.head.weight = nn.Parameter(torch.zeros(2, 8).double())
        if case == "shape":
            model.head.weight.data = torch.zeros(3, 3).double()
        if case == "apart":
            with prepared.whole():
                model.head.weight.data[0, 0] += float(prepared.rank)
        if case == "ungathered":
            with prepared.whole():
                [param.grad for param in model.parameters()]
        if case == "saved":
            with prepared.whole():
                prepared.save_weights("never")
        if case == "state loaded":
            with prepared.whole(state=True):
                optimizer.load_state_dict(optimizer.state_dict())
        if case == "state" and step == 4:
            optimizer.state[model.head.weight]["exp_avg"].zero_()
        if case == "all state" and step == 4:
            [state["exp_avg"].norm() for state in optimizer.state.values()]
        if case == "group's std":
            sum(param.data.std() for group in optimizer.param_groups for param in group["params"])
        optimizer.step()


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (script, "dp_shard=2,zero=1", clipped_elsewhere, adamw), (script, "dp_shard=3,zero=2", vector, adamw),
    (script, "dp_shard=2,zero=2", swapped, adamw), (script, "dp_shard=2,zero=1", pieces, adamw),
    (script, "dp_shard=2,zero=3", pieces, adamw), (script, "dp_shard=2,zero=2", with_state, adamw),
    (script, "tp=2", with_state, adamw), (script, "dp_shard=2,zero=1", clipped, muon),
    (script, "dp_shard=2,zero=2", clipped_elsewhere, muon), (script, "dp_shard=2,zero=3", clipped, muon),
    (script, "dp_shard=2,zero=3", clipped_elsewhere, muon), (script, "dp_shard=2,zero=3", rows, adamw),
    (script, "dp_shard=2,zero=3", given, adamw),
    (script, "dp_shard=3,zero=3", drawn, adamw), (script, "dp_shard=2,zero=3", noised, adamw),
    (script, "tp=2", drawn, adamw), (script, "tp=2", clipped, muon),
    (kept_in_lists, "dp_shard=2,zero=3"), (kept_in_lists, "tp=2"),
    (in_a_forward, "dp_shard=2,zero=3", "keys", "sample"), (beside_a_cut_model, "dp_shard=2,zero=3"),
    (read_in_a_forward, "dp_shard=2,zero=3", "sample"), (read_in_a_forward, "dp_shard=2,zero=3", "global"),
]  # fmt: skip
MORE_EQUAL: list[tuple] = [
    (script, "tp=2,dp_shard=2,zero=3", clipped, muon), (script, "tp=2", rows, muon),
    (script, "dp_replicate=2,dp_shard=2,zero=3", given, adamw),
    (script, "dp_shard=2,tp=2,zero=1", clipped_elsewhere, adamw),
    (script, "dp_replicate=2,dp_shard=2,zero=2", vector, muon), (kept_in_lists, "dp_shard=2,zero=1"),
    (in_a_forward, "dp_replicate=2,dp_shard=2,zero=3", "keys", "sample"),
    (in_a_forward, "dp_shard=2,zero=3", "keys", "model"),
    (in_a_forward, "dp_shard=2,zero=2", "in place", "sample"),
    (in_a_forward, "dp_replicate=2,remat=full", "in place", "sample"),
    (read_in_a_forward, "dp_shard=2,zero=3", "model"),
    (read_in_a_forward, "dp_replicate=2,dp_shard=2,zero=3", "sample"),
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL, MORE_EQUAL)


REFUSED: list[tuple] = [
    (mistaken, "dp_shard=2,zero=3", "parameter", InputError, r"'head.weight' was replaced after prepare.*line \d+"),
    (mistaken, "tp=2", "parameter", InputError, r"'head.weight' was replaced after prepare.*line \d+"),
    (mistaken, "dp_shard=2,zero=1", "shape", InputError,
     r"'head.weight' is a tensor of \(3, 3\) now.*line \d+: optimizer"),
    (mistaken, "dp_shard=2,zero=3", "row", RefusedPlan,
     r"zero_ into a weight.*prepared.whole.*line \d+: model.layers"),
    (mistaken, "tp=2", "row", RefusedPlan, r"zero_ into a weight.*prepared.whole.*line \d+: .*zero_"),
    (mistaken, "dp_shard=2,zero=3", "apart", InputError,
     r"the end of prepared.whole\(\).*line \d+: with prepared.whole"),
    (mistaken, "tp=2", "ungathered", InputError, r"whole\(grads=True\) alone.*line \d+"),
    (mistaken, "dp_shard=2,zero=3", "saved", InputError, r"saved within prepared.whole.*line \d+"),
    (mistaken, "dp_shard=2,zero=3", "state loaded", InputError, r"state_dict\(\) within prepared.whole.*line \d+"),
    (mistaken, "tp=2", "penalty", InputError, r"is differentiated.*before or after the with block.*line \d+"),
    (mistaken, "dp_shard=2,zero=3", "forward", InputError, r"called within prepared.whole\(\).*line \d+: model"),
    (mistaken, "dp_shard=2,zero=3", "all state", RefusedPlan,
     r"optimizer.state holds.*prepared.whole\(state=True\).*line \d+"),
    (mistaken, "dp_shard=2,zero=2", "state", RefusedPlan,
     r"optimizer.state holds.*prepared.whole\(state=True\).*line \d+"),
    (mistaken, "dp_shard=2,zero=3", "gradient", RefusedPlan,
     r"autograd.grad.*of this rank's samples alone.*line \d+: torch"),
    (mistaken, "tp=2", "gradient", RefusedPlan, r"autograd.grad\(..., parameters\).*line \d+: .*head"),
    (mistaken, "dp_shard=2,zero=1", "group's std", RefusedPlan, r"tensor in optimizer.param_groups.*line \d+"),
    (mistaken, "dp_replicate=2", "drift", RunError, r"after step 8 the weights of 'head.weight' \(1 in all\).*line"),
]  # fmt: skip
MORE_REFUSED: list[tuple] = [
    (in_a_forward, "dp_shard=2,zero=3", "in place", "sample", RefusedPlan, "forward writes into query.0.line.weight"),
    (in_a_forward, "dp_replicate=2", "another", "model", InputError, "parameter 'scale' was replaced"),
    (mistaken, "dp_shard=2,zero=1", "stray", RefusedPlan, "backward of the script's own.*assert"),
]  # fmt: skip
test_a_script_is_refused_with_its_line = refused_with_its_line(REFUSED, MORE_REFUSED)
