"""Gradients and optimizers in a script's own hands: read, changed, set, added up, by inputs; as in one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from small_scripts import (
    adamw,
    back,
    batches,
    begin,
    check_equal,
    close,
    equals_one_process,
    made,
    mse,
    muon,
    net,
    refused_with_its_line,
    stepped,
    train,
    weights_of,
    whole,
)
from torch import nn
from torch.func import jacrev, vmap

from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.ranks import RankPool

PLANS = ("dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3", "tp=2", "dp_shard=3,zero=3")


def small() -> Any:
    return made(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))


def cases(quick: list[tuple], rest: list[tuple]) -> list[Any]:
    return [*quick, *(pytest.param(*one, marks=pytest.mark.long) for one in rest if one not in quick)]


# --- between backward and step


def _clip(model: nn.Module, step: int) -> list[float]:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    return [norm.item()]


def _noise(model: nn.Module, step: int) -> list[float]:
    for param in model.parameters():
        param.grad += 0.01 * torch.randn(param.grad.shape, dtype=torch.float64)
        param.grad.data.add_(param.data, alpha=1e-2)
    return [sum(param.grad.square().sum().item() for param in model.parameters())]


def _left_out(model: Any, step: int) -> list[float]:
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
    return [float(sum(param.grad.count_nonzero().item() for param in model.parameters()))]


def _kept(model: nn.Module, step: int) -> list[float]:
    before = vars(model).setdefault("gradients_before", [])
    read = [grad.sum().item() for grad in before] if step % 2 == 0 else []  # else they were set to zero
    before[:] = [param.grad for param in model.parameters()]
    return read


WAYS = {one.__name__: one for one in (_clip, _noise, _left_out, _set, _other_memory, _kept)}


def by_hand(plan: str | None, what: str, make: Any = adamw) -> tuple:
    """Losses, what the script read, and weights of a loop that works on `param.grad` between backward and step."""
    model: Any = net()
    prepared, model, optimizer, loader = begin(plan, model, batches(14), make(model))
    torch.manual_seed(3)
    losses, read = [], []
    for step, (x, y) in enumerate(loader):
        for param in model.parameters():
            if step % 2 and param.grad is not None:
                param.grad.zero_()
            elif not step % 2:
                param.grad = None
        losses.append(back(prepared, mse(model, x, y)))
        with nullcontext() if what in ("_clip", "_left_out") else whole(prepared, grads=True):
            read += WAYS[what](model, step)
        optimizer.step()
    return losses, read, weights_of(model)


def set_first(plan: str | None) -> dict[str, torch.Tensor]:
    """Steps by what the script has set alone, and by that and a backward behind it, in turn."""
    prepared, model, optimizer, loader = begin(plan, small(), batches(22, 6))
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with whole(prepared, grads=True):
            for param in model.parameters():
                param.grad = 0.3 * param.detach() + 0.01
        if step % 2 == 0:
            back(prepared, mse(model, x, y))
        for param in model.parameters():
            param.grad.mul_(0.5)
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
    return weights_of(model)


class Scaled(nn.Module):
    """A parameter without dims (a temperature), which zero=3 does not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(6, 8), nn.Linear(8, 2), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale.exp() * self.b(self.a(x).tanh())


def scaled(plan: str | None) -> tuple:
    """What a script finds of its gradients in each of its steps, and the weights that it comes to."""
    model = made(Scaled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepared, model, optimizer, loader = begin(plan, model, batches(20), optimizer)
    told: list[Any] = []
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        for times in range(1 + (step == 4)):  # two backwards in one step
            back(prepared, mse(model, (1 + times) * x, y))
        gradients = [param.grad for param in model.parameters()]
        if step == 2 and prepared is not None:
            told += [prepared.clip_grad_norm_(0.1)]
        elif step in (0, 2):
            told += [nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
        elif step == 1:
            told += [max(gradient.abs().max() for gradient in gradients), model.scale.grad]
        elif step == 3:
            model.scale.data = model.scale.data.clamp(0, 1.2)
        told += [gradient.norm() for gradient in gradients]
        optimizer.step()
    return [float(one) for one in told], weights_of(model)


# --- several backwards before one step


class Heads(nn.Module):
    """One of two heads answers, so that each backward reaches parameters that the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.one, self.other = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return getattr(self, head)(self.trunk(x))


def attacked(plan: str | None) -> tuple:
    """A clipped backward, a step into the weights along its gradient, another backward there, and the way back."""
    prepared, model, optimizer, loader = begin(plan, made(Heads), batches(14))
    told = []
    for x, y in loader:
        optimizer.zero_grad()
        for head in ("one", "other"):
            told.append(back(prepared, (model(x, head) - y).square().mean()))
            if head == "one":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with whole(prepared, grads=True):
                    kept = model.trunk[0].weight.data.clone()
                    model.trunk[0].weight.data.add_(model.trunk[0].weight.grad, alpha=0.5)
        with whole(prepared):
            model.trunk[0].weight.data = kept
        told += [sum(param.grad.square().sum().item() for param in model.parameters())]
        norm = prepared.clip_grad_norm_(0.3) if prepared else nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        told.append(norm.item())
        optimizer.step()
    return told, weights_of(model)


def never_cleared(plan: str | None) -> tuple:
    """Without `zero_grad`, so that each step's gradients are added to all before; sums with their weight."""
    model = small()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)  # of which each rank owns whole tensors
    prepared, model, optimizer, loader = begin(plan, model, batches(22, 6), optimizer)
    losses = []
    for x, y in loader:
        loss, n = mse(model, x, y), len(x)
        losses.append(back(prepared, loss * n, weight=n) if prepared else back(None, loss))
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return losses, weights_of(model)


def read_early(plan: str | None, clips: bool) -> tuple:
    """Gradients are read after each backward of two to a step, or clipped by torch, with one left at the end."""
    prepared, model, optimizer, loader = begin(plan, small(), batches(20))
    read = []
    for number, (x, y) in enumerate(loader, 1):
        back(prepared, mse(model, x, y) / 2)
        ends = number % 2 == 0 or number == len(loader)
        if not clips or ends:
            read.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1 if ends else torch.inf).item())
        if ends:
            optimizer.step()
            optimizer.zero_grad()
    return read, weights_of(prepared or model)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    "plan", ["dp_replicate=2,accumulate=2", "dp_shard=2,zero=1,accumulate=2", "dp_shard=2,zero=3,accumulate=2"]
)
def test_gradients_that_are_read_before_the_last_micro_batch_are_whole(plan: str, clips: bool, pool: RankPool) -> None:
    alone = read_early(None, clips)
    for found in pool.run(read_early, 2, plan, clips):
        close(found, alone)


# --- gradients that are not finite


def too_large(plan: str | None) -> tuple:
    """A GradScaler whose first scale is too large: steps are left out on all ranks, until it has come down."""
    prepared, model, optimizer, loader = begin(plan, small().float(), batches(12))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    told = []
    for number, (x, y) in enumerate([*loader, *loader]):
        back(prepared, scaler.scale(100.0 * mse(model, x.float(), y.float())))
        if number % 2:
            scaler.unscale_(optimizer)
            told.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append(scaler.get_scale())
    return told, weights_of(model)


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=1", "dp_shard=2,zero=3", "tp=2"])
def test_a_scaler_leaves_steps_out_on_all_ranks(plan: str, pool: RankPool) -> None:
    check_equal(pool, too_large, plan, bar=1e-5)


def scaled_with_a_remainder(plan: str | None) -> tuple:
    """A GradScaler over two batches to a step, of which an epoch's last step has one."""
    prepared, model, optimizer, loader = begin(plan, small().float(), batches(12))
    scaler, told = torch.amp.GradScaler("cpu", init_scale=4.0), []
    for number, (x, y) in enumerate(loader, 1):
        told.append(back(prepared, scaler.scale(mse(model, x.float(), y.float()))))
        if number % 2 == 0 or number == len(loader):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return told, weights_of(model)


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=1,accumulate=2", "dp_shard=2,zero=3,accumulate=2"])
def test_a_scaler_reads_gradients_of_a_step_with_fewer_micro_batches(plan: str, pool: RankPool) -> None:
    check_equal(pool, scaled_with_a_remainder, plan, bar=1e-5)


def never_finite(plan: str) -> None:
    prepared, model, optimizer, loader = begin(plan, small(), batches(12))
    for x, y in loader:
        prepared.backward(mse(model, x, y) * float("inf"))
        optimizer.step()


# --- an optimizer beside the prepared one


class Gated(nn.Module):
    """Two branches, weighed by parameters that are searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.zeros(2))
        self.one = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.other = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.gates.softmax(0)
        return first * self.one(x) + second * self.other(x)


def searched(plan: str | None, own: bool = False) -> tuple:
    """Weights and gates in turn, each by an optimizer and a loader of its own; `own`: gates by a plain backward."""
    model = made(Gated)
    gates = torch.optim.Adam([model.gates], lr=0.1)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name != "gates"], 0.1, momentum=0.9)
    held: Any = batches(24, 6, shuffle=True)
    prepared, model, optimizer, loader = begin(plan, model, batches(22, 6, shuffle=True), optimizer)
    held = prepared.split(held, trains=True) if prepared else held
    losses = []
    for batch, other in zip(loader, held, strict=True):
        gates.zero_grad()
        back(None if own else prepared, mse(model, *other))
        with nullcontext() if own else whole(prepared, grads=True):  # of weights that ranks hold pieces of
            gates.step()
        losses.append(stepped(prepared, optimizer, mse(model, *batch)))
    return losses, weights_of(model)


# --- gradients by what a model is given


def moved(plan: str | None, options: dict[str, Any], penalty: bool) -> tuple:
    """Inputs moved by the loss's gradient while the weights are held still; a penalty on it differentiates it again."""
    prepared, model, optimizer, loader = begin(plan, small(), batches(14), **options)
    found = []
    for x, y in loader:
        given = x.clone().requires_grad_()
        if not penalty:
            model.requires_grad_(False)
        (slope,) = torch.autograd.grad((model(given) - y).square().sum(), given, create_graph=penalty)
        model.requires_grad_(True)
        loss = mse(model, x + 0.1 * slope.detach(), y)
        if penalty:
            loss = loss + (slope.norm(dim=1) - 1).square().mean()
        found.append(stepped(prepared, optimizer, loss))
    return found, weights_of(model)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def curved(plan: str | None, penalty: bool) -> tuple:
    """Second derivatives by the input, of repeated blocks; beside them a plain forward, and a penalty on weights."""

    def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        plain, weights = model(2 * x), sum(p.square().sum() for p in model.parameters()) if penalty else 0.0
        return (curve.sum(1) - y[:, 0]).square().mean() + plain.square().mean() + 1e-3 * weights

    model = made(lambda: nn.Sequential(*(Residual() for _ in range(3)), nn.Dropout(0.1), nn.Linear(6, 1)))
    return train(plan, model, batches(11), loss_of)


class Potential(nn.Module):
    """Energies, and forces as their gradient, which a loss differentiates again."""

    def __init__(self) -> None:
        super().__init__()
        self.of_pairs = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places.requires_grad_()
        apart = (places[:, :, None] - places[:, None]).square()
        energies = self.of_pairs(apart[..., None]).sum((1, 2, 3))
        return energies, -torch.autograd.grad(energies.sum(), places, create_graph=True)[0]


def of_forces(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    energies, pulled = model(x)
    return (energies - y[:, 0]).square().mean() + pulled.square().mean()


def forces(plan: str | None) -> tuple:
    """A model that takes gradients itself."""
    return train(plan, made(Potential), batches(14), of_forces)


def transformed(plan: str, before: bool) -> None:
    _, model, _, loader = begin(plan, small(), batches(8))
    for x, _ in loader:
        vmap(lambda row: row.sin())(x)  # of the batch alone
        if before:
            model(x)
        vmap(jacrev(model))(x)


@pytest.mark.parametrize(("plan", "before"), [("dp_replicate=2", True), ("tp=2", False)])
def test_a_model_within_a_transform_is_refused(plan: str, before: bool, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"inside a transform of torch.func.*autograd.grad.*line \d+: .*vmap"):
        pool.run(transformed, 2, plan, before)


def with_options(plan: str | None, **options: Any) -> tuple:
    """Two losses of one graph, the first with an option of torch's backward."""
    prepared, model, optimizer, loader = begin(plan, small(), batches(9))
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss = (output - y).square().mean()
        losses.append(prepared.backward(loss, **options).item() if prepared else loss.backward(retain_graph=True))
        losses[-1] = float(losses[-1] or loss.detach())
        losses.append(back(prepared, output.square().mean()))
        optimizer.step()
    return losses, weights_of(prepared or model)


def held(plan: str | None) -> tuple:
    return with_options(plan, retain_graph=True, create_graph=False)


def recorded(plan: str) -> tuple:
    return with_options(plan, create_graph=True)


def misspelt(plan: str) -> tuple:
    return with_options(plan, retain_grap=True)


def without_loss(plan: str) -> None:
    begin(plan, small(), batches(9))[0].backward()


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (by_hand, "tp=2", "_clip"), (by_hand, "dp_shard=2,zero=3", "_noise"), (by_hand, "dp_shard=2,zero=2", "_left_out"),
    (by_hand, "tp=2,dp_shard=2", "_set"), (by_hand, "dp_shard=2,zero=3", "_other_memory"),
    (by_hand, "dp_replicate=2", "_kept"), (by_hand, "dp_shard=2,zero=2", "_left_out", muon),
    (set_first, "dp_shard=2,zero=1"), (scaled, "dp_shard=2,zero=3"), (attacked, "dp_replicate=2"),
    (attacked, "dp_shard=3,zero=1"), (attacked, "dp_shard=2,zero=2"), (attacked, "dp_shard=3,zero=3"),
    (attacked, "tp=2"), (never_cleared, "dp_shard=2,zero=1"), (searched, "dp_shard=2,zero=1"),
    (moved, "dp_shard=2,zero=3", {}, False), (moved, "dp_replicate=3", {}, False),
    (moved, "dp_shard=2,zero=2", {}, True), (moved, "tp=2", {}, False),
    (moved, "dp_shard=2,zero=3", {"loss_scope": "global"}, False),
    (moved, "dp_shard=3,zero=2", {"loss_scope": "global"}, True), (curved, "dp_shard=2,zero=3", True),
    (forces, "dp_replicate=2"), (forces, "dp_shard=2,zero=2"), (held, "dp_shard=2,zero=3"),
]  # fmt: skip
MORE_EQUAL: list[tuple] = [
    *((by_hand, plan, way) for plan in PLANS for way in WAYS),
    *((script, plan) for script in (set_first, never_cleared, searched) for plan in PLANS),
    (scaled, "dp_shard=2,zero=3,tp=2"), (scaled, "dp_shard=2,zero=3,dp_replicate=2"), (scaled, "dp_shard=2,zero=2"),
    (curved, "dp_replicate=2,dp_shard=2,zero=3", True), (curved, "tp=2,dp_shard=2", False),
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL, MORE_EQUAL)


class Equilibrium(nn.Module):
    """A fixed point, whose gradient a hook solves for through the graph of one more turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        point = torch.tanh(self.turn(torch.zeros_like(x)) + x)
        start = point.detach().requires_grad_()
        once = torch.tanh(self.turn(start) + x)
        point.register_hook(lambda g: g + torch.autograd.grad(once, start, g, retain_graph=True)[0])
        return point


def solved(plan: str | None) -> tuple:
    model = made(lambda: nn.Sequential(nn.Linear(6, 6), Equilibrium(), nn.Linear(6, 2)))
    return train(plan, model, batches(11), mse)


REFUSED: list[tuple] = [
    (solved, "dp_shard=2,zero=3", RefusedPlan, r"autograd.grad within a backward.*use zero=2.*line \d+"),
    (recorded, "dp_replicate=2", RefusedPlan, "gradients of weights are summed over ranks.*create_graph=True.*line"),
    (without_loss, "dp_replicate=2", InputError, r"is given no loss: prepared.backward\(loss\).*line \d+"),
    (misspelt, "dp_replicate=2", InputError, r"has no retain_grap=.*did you mean 'retain_graph'.*line \d+"),
    (never_finite, "dp_shard=2,zero=2", RunError, r"not finite in step 1.*optimizer.step\(\)"),
    (searched, "dp_shard=2,zero=3", True, RefusedPlan, r"backward of the script's own.*deepcopy.*line \d+: gates.step"),
]  # fmt: skip
test_a_script_is_refused_with_its_line = refused_with_its_line(REFUSED)
