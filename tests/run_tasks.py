"""A task with all that a run has: data to be read, held-out data, metrics, dropout, batch norm."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise import Task


class Samples:
    """`count` samples with labels, drawn once."""

    def __init__(self, count: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(count, 6, generator=g), torch.randint(0, 3, (count,), generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        return {"x": self.x[indices], "y": self.y[indices]}


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        first, cut = (nn.Linear(6, 8), norm(8), nn.Tanh(), nn.Dropout(0.2)), (nn.Linear(8, 8), nn.Tanh())
        self.layers = nn.Sequential(*first, *cut, nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple:
    return nn.functional.cross_entropy(output, batch["y"], reduction="sum"), len(batch["y"])


def metrics(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, tuple]:
    right = (output.argmax(1) == batch["y"]).sum()
    return {"accuracy": (right, len(output)), "size": (output.square().sum(0), len(output), "sqrt")}


def classified() -> Task:
    return Task(
        model=Net,
        loss=loss,
        inputs=lambda batch: ((batch["x"],), {}),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        data=Samples(40, 1),
        eval_data=Samples(11, 2),
        metrics=metrics,
    )


def layered() -> Task:
    return classified().with_(model=partial(Net, nn.LayerNorm))
