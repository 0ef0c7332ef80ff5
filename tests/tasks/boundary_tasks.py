"""Fields on a globe and in a box, whose edges `Task.spatial` declares; each name gives a `Task`."""

from __future__ import annotations

from typing import Any

import domain_tasks
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import Domain, Task


class Net(nn.Module):
    """Convolutions by a module, by a function, in what is computed again, and pooled with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Block(), Block())
        self.up, self.last = nn.ConvTranspose2d(4, 4, 3, 2, 1, 1), nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.blocks(self.pool(self.first(x).tanh())))
        return self.last(h[:, None, :2])[:, 0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.conv2d(x, self.weight, padding=1).tanh()


def on_a_globe(boundary: dict[str, str], model: Any = Net) -> Task:
    return domain_tasks._task(model, domain_tasks._fields(2, 12, 16, samples=2),
                              spatial=Domain((-2, -1), ("lat", "lon"), boundary))  # fmt: skip


def globe() -> Task:
    return on_a_globe({"lat": "pole", "lon": "periodic"})


def box() -> Task:
    return on_a_globe({"lat": "reflect", "lon": "replicate"})
