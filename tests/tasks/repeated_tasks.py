"""Tasks whose forward changes what it meets, so that a step that is run a second time meets something else."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import Task


class OwnDraws(nn.Module):
    """Draws a scale from a generator of its own, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.own = torch.Generator().manual_seed(3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = 1 + torch.rand((), generator=self.own, dtype=x.dtype)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * scale * self.calls


class OwnAverages(torch.optim.AdamW):
    """Holds an average of each weight in an attribute of its own, beside its state, and pulls weights to it."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, lr=lr)
        self.averages: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Takes AdamW's step, then a hundredth of the way to the averages."""
        super().step()
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            average = self.averages.setdefault(param, torch.zeros_like(param))
            average.lerp_(param, 0.1)
            param.lerp_(average, 0.01)


def own_averages() -> Task:
    """Returns a task with the optimizer `OwnAverages`."""
    return own_draws().with_(name="own-averages", optimizer=OwnAverages)


def own_draws() -> Task:
    """Returns the task of `OwnDraws`."""

    def batch(step: int) -> Tensor:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))

    return Task(
        name="own-draws", model=OwnDraws, batch=batch, inputs=lambda x: ((x,), {}),
        loss=lambda output, x: (output.square().sum(), len(output)), optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )  # fmt: skip
