"""Modules whose result for a sample hangs, or does not hang, on how many samples there are; each a `Task`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from module_tasks import OUT, WIDTH, task
from torch import Tensor, nn

from shardwise import Task

SAMPLES = 16


class Inside(nn.Module):
    """Two linear layers, with a function between that is given the first's result and a batch norm."""

    def __init__(self, between: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, OUT)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.between(self.enter(x), self.norm)))


def ghost(x: Tensor, norm: nn.Module) -> Tensor:
    return torch.cat([norm(part) for part in x.chunk(math.ceil(len(x) / 6))])


def halves(x: Tensor, norm: nn.Module) -> Tensor:
    return torch.cat([norm(half) for half in x.chunk(2)])


def twice(x: Tensor, norm: nn.Module) -> Tensor:
    return norm(x) * norm(x.square())


def centred_where_many(x: Tensor, norm: nn.Module) -> Tensor:
    return norm(x) - x.mean(0) if len(x) > 8 else norm(x)


def first_eight(x: Tensor, norm: nn.Module) -> Tensor:
    return torch.cat([2 * norm(x)[:8], x[8:]])


def spread_in_groups(x: Tensor, norm: nn.Module) -> Tensor:
    """What a sample's group of eight differs by, beside it."""
    group = 8 if len(x) % 8 == 0 else 1
    groups = x.view(group, -1, WIDTH)
    return x + (groups - groups.mean(0)).square().mean(0).sqrt().repeat(group, 1)


def in_chunks(x: Tensor, norm: nn.Module) -> Tensor:
    """Each sample by itself, six at a time."""
    return torch.cat([part.cumsum(1).cos() for part in norm(x).split(6)])


def in_fours(x: Tensor, norm: nn.Module) -> Tensor:
    """Each sample beside the mean of its four; fails on other numbers of them."""
    means = x.view(-1, 4, WIDTH).mean(1, keepdim=True)
    return x * means.expand(-1, 4, WIDTH).reshape(x.shape)


def over_four_groups(x: Tensor, norm: nn.Module) -> Tensor:
    """Beside each sample, what the first ones of four groups differ by, and so on."""
    return x + x.view(4, -1, WIDTH).var(0).repeat(4, 1)


UNLIKE = (ghost, halves, centred_where_many, first_eight, spread_in_groups)
ALIKE = (in_chunks, twice)


def batch(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {"x": torch.randn(SAMPLES, WIDTH, generator=g), "y": torch.randn(SAMPLES, OUT, generator=g)}


class Rows:
    """The same as a source."""

    def __len__(self) -> int:
        return SAMPLES

    def read(self, indices: list[int], region: Any = None) -> dict[str, Tensor]:
        return {name: value[indices] for name, value in batch(0).items()}


def made(between: Callable[[Tensor, nn.Module], Tensor], **changes: Any) -> Task:
    return task(lambda: Inside(between), **{"batch": batch, **changes})


def normalised_twice() -> Task:
    return made(twice)


def chunked() -> Task:
    return made(in_chunks)


def ghosts() -> Task:
    return made(ghost)


def fours() -> Task:
    return made(in_fours)


def four_groups() -> Task:
    return made(over_four_groups)


def four_groups_on_all() -> Task:
    return made(over_four_groups, loss_scope="model")
