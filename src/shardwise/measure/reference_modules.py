"""Modules whose steps `measure/overheads` times: tiny ones for the host's overhead, larger ones for times of ops.

None of them is a model that anyone trains, so that forecasts of real models are not fitted to themselves.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from shardwise.task import Task

WIDTH, POSITIONS = 16, 8
CHANNELS, SIDE = (8, 32, 64), 32


class Reference(nn.Module):
    """Transformer-like blocks so small that the time to start an op dominates; input and output (B, S, width).

    blocks, deep, width  number of blocks, feed-forward parts of each block, width of the stream
    """

    def __init__(self, blocks: int = 4, deep: int = 1, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(deep, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Block(nn.Module):
    def __init__(self, deep: int, width: int) -> None:
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.parts = nn.ModuleList(_Part(width) for _ in range(deep))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.norm(x)).view(*x.shape[:2], 3, 2, x.shape[2] // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        for part in self.parts:
            x = part(x)
        return x


class _Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _loss(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(batch)


def _batch(step: int, samples: int, positions: int, width: int) -> torch.Tensor:
    return torch.ones(samples, positions, width)


def reference_task(
    blocks: int = 4, deep: int = 1, samples: int = 2, width: int = WIDTH, positions: int = POSITIONS
) -> Task:
    """Returns the task of a `Reference` on batches of ones (samples, positions, width)."""
    return Task(
        model=partial(Reference, blocks, deep, width), loss=_loss, name="reference",
        batch=partial(_batch, samples=samples, positions=positions, width=width),
    )  # fmt: skip


class Convolved(nn.Module):
    """Convolutions and a norm at two resolutions, on fields (B, CHANNELS[0], SIDE, SIDE)."""

    def __init__(self) -> None:
        super().__init__()
        first, wide, wider = CHANNELS
        self.stem, self.norm = nn.Conv2d(first, wide, 3, padding=1), nn.GroupNorm(4, wide)
        self.fine = nn.ModuleList(nn.Conv2d(wide, wide, 3, padding=1) for _ in range(2))
        self.step = nn.Conv2d(wide, wider, 3, padding=1)
        self.coarse = nn.ModuleList(nn.Conv2d(wider, wider, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        for layer in self.fine:
            x = layer(x).relu()
        x = self.step(nn.functional.avg_pool2d(x, 2))
        for layer in self.coarse:
            x = layer(x).relu()
        return x


class Streamed(nn.Module):
    """Ops that are bound by bytes (norms, activations, softmax, sums), without matrix products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            y = norm(x)
            x = x + nn.functional.gelu(y) * y.softmax(-1) + nn.functional.silu(y)
        return x


def _fields(step: int, samples: int) -> torch.Tensor:
    return torch.ones(samples, CHANNELS[0], SIDE, SIDE)


def large_tasks(ranks: int) -> dict[str, Task]:
    """Returns {kind of op: task whose step is mostly of that kind}, with ops so large that their launch hardly counts.

    ranks  number of ranks, for each of which a batch has 4 samples
    """
    wide, positions, samples = 192, 64, 4 * ranks
    stream = partial(_batch, samples=samples, positions=4 * positions, width=wide)
    return {
        "products": reference_task(4, 1, samples, width=wide, positions=positions),
        "convolutions": Task(model=Convolved, loss=_loss, name="reference", batch=partial(_fields, samples=samples)),
        "rest": Task(model=partial(Streamed, wide), loss=_loss, name="reference", batch=stream),
    }
