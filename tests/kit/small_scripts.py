"""What small scripts of tests are made of: models, samples, a loop, run in one process and prepared on ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.ranks import RankPool

BAR = 1e-10


class Net(nn.Module):
    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)
        self.mixes = mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return self.head(x - x.mean(0) if self.mixes else x)


def net(**options: Any) -> nn.Module:
    return made(lambda: Net(**options))


def made(make: Callable[[], nn.Module]) -> Any:
    """A model in double precision, of the same weights in every process."""
    torch.manual_seed(0)
    return make().double()


def samples(count: int, width: int = 6) -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=g, dtype=torch.float64)
    return TensorDataset(x, x[:, :2].sin())


def batches(count: int, size: int = 4, **options: Any) -> Any:
    return DataLoader(samples(count), batch_size=size, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def begin(plan: str | None, model: Any, loader: Any, optimizer: Any = None, **options: Any) -> tuple:
    """(what `prepare` returned or None, model, optimizer, loader), as a script goes on with them."""
    given = model, optimizer if optimizer is not None else adamw(model), loader
    prepared: Any = shardwise.prepare(*given, plan=plan, **options) if plan else None
    return prepared, *(prepared or given)


def back(prepared: Any, loss: torch.Tensor, **told: Any) -> float:
    """Returns the loss of all samples, after a backward of a prepared or a plain script."""
    if prepared:
        return prepared.backward(loss, **told).item()
    loss.backward()
    return loss.item()


def whole(prepared: Any, **asked: bool) -> Any:
    """Context: weights are whole, in a prepared or a plain script."""
    return prepared.whole(**asked) if prepared else nullcontext()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(plan: str | None, model: Any, loader: Any, loss_of: Callable, optimizer: Any = None, *, epochs: int = 1,
          mean: bool = False, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """Losses and weights of a plain loop: `loss_of(model, *batch)`; `mean` tells that it is one over samples."""
    prepared, model, optimizer, loader = begin(plan, model, loader, optimizer, **options)
    torch.manual_seed(7)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            losses.append(back(prepared, loss, **({"mean_over": len(batch[0])} if mean and prepared else {})))
            optimizer.step()
    return losses, weights_of(prepared or model)


def mse(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def close(found: Any, expected: Any, bar: float = BAR, at: str = "") -> None:
    """Assert that nested numbers and tensors are alike."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), at
        for key, value in expected.items():
            close(found[key], value, bar, f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), at
        for number, value in enumerate(expected):
            close(found[number], value, bar, f"{at}[{number}]")
    elif isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape and found.dtype == expected.dtype, at
        torch.testing.assert_close(found, expected, rtol=bar, atol=bar, msg=lambda said: f"{at}: {said}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=bar, abs=min(bar, 1e-12), nan_ok=True), at
    else:
        assert found == expected, at


def check_equal(pool: RankPool, script: Callable, plan: str, *args: Any, bar: float = BAR) -> None:
    """Assert that `script(plan, *args)` on every rank comes to what `script(None, *args)` does in one process."""
    expected = script(None, *args)
    for found in pool.run(script, shardwise.Plan.parse(plan).world_size, plan, *args, timeout_s=120):
        close(found, expected, bar)


def stepped(prepared: Any, optimizer: Any, loss: torch.Tensor, **told: Any) -> float:
    """Returns the loss of all samples, after a step by its gradients alone."""
    optimizer.zero_grad()
    value = back(prepared, loss, **told)
    optimizer.step()
    return value


def check_refused(pool: RankPool, script: Callable, plan: str, *given: Any) -> None:
    """Assert that `script(plan, ...)` is refused on ranks; what is given ends in the error's type and its words."""
    *args, kind, words = given
    with pytest.raises(kind, match=words):
        pool.run(script, shardwise.Plan.parse(plan).world_size, plan, *args, timeout_s=120)


def spelled(value: Any) -> str:
    """What a case's name says of a value: the same in every process, so no addresses."""
    if isinstance(value, dict):
        return ",".join(f"{key}={spelled(one)}" for key, one in value.items())
    return str(getattr(value, "__name__", value))


def script_cases(quick: list[tuple], more: list[tuple] | tuple = ()) -> list[Any]:
    """Rows (script, plan, what else it is given) as cases; those of `more` are left to the long tests."""
    found = []
    for place, (script, plan, *given) in enumerate([*quick, *more]):
        said = [spelled(one)[:40] for one in given]
        marks = [pytest.mark.long] * (place >= len(quick))
        found.append(pytest.param(script, plan, tuple(given), marks=marks, id="-".join([script.__name__, plan, *said])))
    return found


def equals_one_process(quick: list[tuple], more: list[tuple] | tuple = ()) -> Callable:
    """Returns the test of rows (script, plan, what else it is given): each script equals itself in one process."""

    @pytest.mark.parametrize(("script", "plan", "given"), script_cases(quick, more))
    def test(script: Any, plan: str, given: tuple, pool: RankPool) -> None:
        check_equal(pool, script, plan, *given)

    return test


def refused_with_its_line(quick: list[tuple], more: list[tuple] | tuple = ()) -> Callable:
    """Returns the test of rows (script, plan, what else it is given, the error, its words): each is refused so."""

    @pytest.mark.parametrize(("script", "plan", "given"), script_cases(quick, more))
    def test(script: Any, plan: str, given: tuple, pool: RankPool) -> None:
        check_refused(pool, script, plan, *given)

    return test


def by_counts(plan: str | None, model: Any, data: Any, value_of: Callable, held: torch.Tensor, every: int = 1,
              clip: float = 0.0, epochs: int = 1) -> tuple:  # fmt: skip
    """Losses, weights, and what the model says of `held` beside training; `value_of` gives (sum, what divides it).

    `every` batches make a step; between epochs both states go out and in.
    """
    prepared, model, optimizer, loader = begin(plan, model, DataLoader(data, batch_size=4, shuffle=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(7)
    losses, total, weight, said = [], 0.0, 0, []

    def say() -> None:
        with torch.no_grad():
            out = model.eval()(held)
        said.append(out["logits"] if isinstance(out, dict) else out)
        model.train()

    for epoch in range(epochs):
        say()
        for number, (x, *rest) in enumerate(loader):
            value, n = value_of(model, x, *rest)
            if prepared:
                prepared.backward(value, n)
            else:
                value.backward()
            total, weight = total + value.item(), weight + int(n)
            if (number + 1) % every and number + 1 < len(loader):
                continue
            for param in model.parameters() if not prepared else ():
                param.grad /= weight
            if clip and prepared:
                prepared.clip_grad_norm_(clip)
            elif clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            losses.append(float(prepared.loss) if prepared else total / weight)
            optimizer.zero_grad()
            total, weight = 0.0, 0
        if epoch + 1 < epochs:  # there and back
            state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
    say()
    assert all(type(one) is torch.Tensor and len(one) == len(held) for one in said)
    return losses, weights_of(prepared or model), torch.stack(said)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": model.layers.parameters(), "lr": 0.02}, {"params": model.head.parameters(), "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
