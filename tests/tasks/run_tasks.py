"""A task with all that a run has: data to be read, held-out data, metrics, dropout, batch norm."""

from __future__ import annotations

import random
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from averaging import Averaging
from torch import nn

from shardwise import Task
from shardwise.data import ArraySource, Blend, as_source


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


def inputs(batch: dict[str, torch.Tensor]) -> tuple:
    return (batch["x"],), {}


def classified() -> Task:
    return Task(
        model=Net,
        loss=loss,
        inputs=inputs,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        data=Samples(40, 1),
        eval_data=Samples(11, 2),
        metrics=metrics,
    )


def averaged() -> Task:
    """An optimizer with a mode evaluates, and writes, other weights than it trains."""
    return classified().with_(optimizer=partial(Averaging, lr=0.1))


def scale_free() -> Task:
    """An optimizer that makes full updates of what rounding leaves of a bias's gradient in front of a batch norm."""
    return classified().with_(optimizer=partial(torch.optim.Adafactor, lr=1e-2))


@lru_cache(maxsize=1)
def _loaded() -> Samples:
    samples = Samples(40, 1)
    samples.x = samples.x.double().float()  # as of a file that is read in float64
    return samples


def remembered() -> Task:
    """Data that are read once in a process, and are those of every later task there."""
    return classified().with_(data=_loaded())


class Solved(Net):
    """Goes through a solver, of which torch has no kernel in 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return torch.linalg.solve(2 * torch.eye(found.shape[-1], dtype=x.dtype), found.mT).mT


def solved() -> Task:
    return classified().with_(model=Solved)


class Noisy(Samples):
    """The same samples, with noise of every generator drawn as each is fetched."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + torch.randn(6) + random.random() + float(np.random.rand()), self.y[index]

    read = None  # type: ignore[assignment]


def joined(samples: list) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


def dropped(samples: list) -> dict[str, torch.Tensor]:
    """Joins samples, and zeros some of their numbers."""
    batch = joined(samples)
    return batch | {"x": batch["x"] * (torch.rand_like(batch["x"]) < 0.8)}


def noisy() -> Task:
    return classified().with_(data=as_source(Noisy(40, 1), dropped), eval_data=as_source(Noisy(11, 2), joined))


def layered() -> Task:
    return classified().with_(model=partial(Net, nn.LayerNorm))


class Numbered(Samples):
    """As many samples as asked for, each drawn from its number, of which none is kept."""

    def __init__(self, count: int, shift: int) -> None:
        self.count, self.shift = count, shift

    def __len__(self) -> int:
        return self.count

    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        at = torch.tensor(indices, dtype=torch.float64) + 1e5 * self.shift
        x = torch.stack([torch.sin(at * k) for k in (0.7, 1.3, 2.1, 3.7, 5.3, 8.9)], dim=1)
        return {"x": x.float(), "y": (at % 3).long()}


def blended() -> Task:
    """Reads two sources three to one, in blocks of 4,096 places."""
    return classified().with_(data=Blend({"a": (Numbered(7001, 0), 3.0), "b": (Numbered(2003, 1), 1.0)}))


def tiled() -> Task:
    """Fields of which a rank reads its own tile."""
    g = np.random.default_rng(5)
    shape = (20, 3, ROWS, COLUMNS)
    fields = {name: g.standard_normal(shape, dtype=np.float32) for name in ("x", "y")}
    return Task(
        model=partial(nn.Conv2d, 3, 3, 3, padding=1), loss=squares, inputs=inputs,
        optimizer=partial(torch.optim.AdamW, lr=1e-2), data=ArraySource(fields, global_shape=(ROWS, COLUMNS)),
        eval_data=ArraySource({name: field[:5] for name, field in fields.items()}, global_shape=(ROWS, COLUMNS)),
    )  # fmt: skip


ROWS, COLUMNS = 12, 13


def squares(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple:
    return (output - batch["y"]).square().mean((1, 2, 3)).sum(), len(output)


def steep(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple:
    """Whose gradients overflow in 16 bits, whatever they are scaled by."""
    total, weight = loss(output, batch)
    return total * 1e12, weight


def overflowing() -> Task:
    return classified().with_(loss=steep)


class Timed(Net):
    """Adds an embedding of integer labels in float32, whatever the weights are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(6, dtype=torch.float32)
        return self.layers(x + (x.argmax(1).float()[:, None] * place).sin())


def timed() -> Task:
    return classified().with_(model=Timed)
