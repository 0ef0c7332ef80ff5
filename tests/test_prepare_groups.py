"""What a script asks of the tensors in `optimizer.param_groups`, of which ranks hold pieces: as of whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import RunError
from shardwise.ranks import RankPool
from shardwise.scripts.reductions import answered


class Sharpness(torch.optim.Optimizer):
    """SAM around another optimizer, with its groups: weights go up along the gradient, and come back for the step."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho, "lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first(self) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 0.05 / (torch.norm(torch.stack([p.grad.norm(p=2) for p in held]), p=2) + 1e-12)
        for p in held:
            self.state[p]["before"] = p.data.clone()
            p.add_(torch.pow(p, 2) * p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def second(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data = self.state[p]["before"]
        self.base.step()
        self.base.zero_grad()


def model_of(plan: str | None, model: Any, optimizer: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    loader: Any = DataLoader(samples(12), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan, **options) if plan else None
    return prepared, *(prepared or (model, optimizer, loader))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2), nn.Linear(2, 2, bias=False)).double()


def sharp(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = net()
    optimizer = Sharpness(model.parameters())
    prepared, model, _, loader = model_of(plan, model, optimizer.base)
    losses = []
    for x, y in loader:
        for move in (optimizer.first, optimizer.second):
            loss = (model(x) - y).square().mean()
            loss = prepared.backward(loss) if prepared else loss
            if not prepared:
                loss.backward()
            move()
            losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def asked(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms and extremes of groups, a clip over them, and one by the plan of gradients that were changed by hand."""
    model = net()
    prepared, model, optimizer, loader = model_of(plan, model, adamw(model))
    told = []
    for number, (x, y) in enumerate(loader):
        loss = (model(x) - y).square().mean() + (0.0 if number else model[3].weight.sum() * 0.0)
        prepared.backward(loss, mean_over=len(x)) if prepared else loss.backward()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            told += [float(p.grad.abs().max()) for p in held] + [float(p.data.mean()) for p in held]
            told += [float(p.grad.norm(1)) + float((p * p.grad).sum()) for p in held]
            told += [float(torch.isfinite(p.grad).all()) + float(p.norm(float("inf"))) for p in held]
        told.append(float(torch.nn.utils.clip_grad_norm_(held, 0.2)))
        for p in model.parameters():
            p.grad.mul_(3.0)
        told.append(
            float(prepared.clip_grad_norm_(0.1) if prepared else nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        )
        optimizer.step()
        optimizer.zero_grad()
    return told, {name: value.clone() for name, value in model.state_dict().items()}


def scaled(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A GradScaler whose first scale is too large: steps are left out on all ranks, until it has come down."""
    model = net().float()
    prepared, model, optimizer, loader = model_of(plan, model, adamw(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    told = []
    for number, (x, y) in enumerate([*loader, *loader]):
        loss = 100.0 * (model(x.float()) - y.float()).square().mean()
        prepared.backward(scaler.scale(loss)) if prepared else scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            told.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append(scaler.get_scale())
    return told, {name: value.clone() for name, value in model.state_dict().items()}


SHORT = [
    (sharp, "dp_shard=2,zero=1"), (sharp, "dp_shard=2,zero=3"), (asked, "dp_shard=2,zero=2"),
    (asked, "dp_shard=2,zero=3"), (scaled, "dp_shard=2,zero=1"), (scaled, "dp_shard=2,zero=3"), (scaled, "tp=2"),
]  # fmt: skip
LONG = [(sharp, "dp_shard=4,zero=2"), (asked, "dp_shard=4,zero=1"), (scaled, "dp_replicate=2")]


@pytest.mark.parametrize(("script", "plan"), [*SHORT, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)])
def test_what_groups_are_asked_is_of_whole_tensors(script: Any, plan: str, pool: RankPool) -> None:
    told, weights = script(None)
    bar = 1e-5 if script is scaled else BAR
    for theirs, state in pool.run(script, 4 if "=4" in plan else 2, plan):
        assert theirs == pytest.approx(told, rel=bar, abs=bar, nan_ok=True)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=bar, atol=bar)


def never_finite(plan: str) -> None:
    model = net()
    prepared, model, optimizer, loader = model_of(plan, model, adamw(model))
    for x, y in loader:
        prepared.backward((model(x) - y).square().mean() * float("inf"))
        optimizer.step()


def test_a_step_by_what_is_not_finite_is_refused(pool: RankPool) -> None:
    with pytest.raises(RunError, match=r"not finite in step 0.*optimizer.step\(\)"):
        pool.run(never_finite, 2, "dp_shard=2,zero=2")


def test_what_is_not_finite_on_one_rank_is_so_for_all() -> None:
    """Python's max passes over a NaN that does not come first."""
    rows = [[1.0], [float("nan")], [2.0]]
    for name in ("max", "min", "norm"):
        words = {"p": float("inf")} if name == "norm" else {}
        assert answered(name, (torch.ones(2),), words, lambda row: rows).isnan()


def stateful(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What an optimizer keeps, by the model's parameters and by those of its groups: read, forgotten, added to."""
    model = net()
    prepared, model, optimizer, loader = model_of(plan, model, adamw(model))
    told = []
    for number, (x, y) in enumerate([*loader, *loader]):
        loss = (model(x) - y).square().mean()
        prepared.backward(loss, mean_over=len(x)) if prepared else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            assert p in optimizer.state and "exp_avg" in optimizer.state[p]
            state = optimizer.state[p]
            told += [float(state["exp_avg"].norm()), float(state["step"])]
            if number == 1:
                state["exp_avg_sq"].mul_(0.5)
                state["exp_avg"] = torch.zeros_like(state["exp_avg"])
            if number == 3 and p.dim() < 2:
                optimizer.state[p] = {}
            told += [float(p in optimizer.state), float(state.get("slow", p.new_zeros(1)).sum())]
            state["slow"] = p.detach().clone()
        for p in (p for group in optimizer.param_groups for p in group["params"] if number < 3):
            told.append(float(optimizer.state[p]["exp_avg"].abs().max()))
            optimizer.state[p]["exp_avg"].mul_(0.9)
    told += [float(one["exp_avg"].sum()) for one in optimizer.state_dict()["state"].values()]
    return told, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "plan",
    ["dp_shard=2,zero=1", *(pytest.param(plan, marks=pytest.mark.long) for plan in ("dp_shard=2,zero=3", "tp=2"))],
)
def test_what_an_optimizer_keeps_is_of_whole_weights(plan: str, pool: RankPool) -> None:
    told, weights = stateful(None)
    for theirs, held in pool.run(stateful, 2, plan):
        assert theirs == pytest.approx(told, rel=BAR, abs=1e-14)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())
