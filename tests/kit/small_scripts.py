"""What small scripts of tests are made of: models, samples, a loop, run in one process and prepared on ranks."""

from __future__ import annotations

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


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": model.layers.parameters(), "lr": 0.02}, {"params": model.head.parameters(), "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
