"""Buffers that backward changes: refused where ranks or stages would keep other values, equal elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Task, verify
from shardwise.ranks import RankPool


class Codebook(nn.Module):
    """Codes that follow, in backward, the features that chose them; a counter of backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, 8))
        self.register_buffer("backwards", torch.zeros((), dtype=torch.long))
        self.counts_alone = False

    @torch.no_grad()
    def update(self, features: Tensor, chosen: Tensor) -> None:
        self.backwards += 1
        if not self.counts_alone:
            chosen = F.one_hot(chosen, 6).to(features.dtype)
            self.codes.data.lerp_((chosen.T @ features) / chosen.sum(0).clamp(min=1)[:, None], 0.1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cdist(x, self.codes).argmin(1)
        out = x + (self.codes[chosen] - x).detach()
        if out.requires_grad:
            out.register_hook(lambda gradient: self.update(x.detach(), chosen))
        return out


class Quantised(nn.Module):
    def __init__(self, first: nn.Module, last: nn.Module, *, counts_alone: bool = False) -> None:
        super().__init__()
        self.first, self.codebook, self.last = first, Codebook(), last
        self.codebook.counts_alone = counts_alone

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.codebook(self.first(x)))


class Reading(Quantised):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.codebook.codes.T


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def task_of(model: Any) -> Task:
    def rows(step: int) -> dict[str, Tensor]:
        return {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(step))}

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return output.square().sum(), len(output)

    return Task(model=model, batch=rows, inputs=lambda b: ((b["x"],), {}), loss=loss)


def late_codes() -> Task:
    return task_of(lambda: Quantised(deep(), nn.Linear(8, 2)))


def early_codes() -> Task:
    return task_of(lambda: Quantised(nn.Linear(8, 8), deep()))


def read_codes() -> Task:
    """The last stage reads what lies on the first."""
    return task_of(lambda: Reading(nn.Linear(8, 8), deep()))


def counted() -> Task:
    return task_of(lambda: Quantised(deep(), nn.Linear(8, 2), counts_alone=True))


@pytest.mark.parametrize(
    ("task", "plan", "why"),
    [
        ("late_codes", "dp_replicate=2", "each rank makes it of its own samples"),
        ("read_codes", "pp=2,microbatches=1", "other pipeline stages use 'codebook.codes'"),
        ("early_codes", "pp=2,microbatches=2", "runs the next forwards before it"),
    ],
)
def test_what_ranks_would_keep_otherwise_is_refused(pool: RankPool, task: str, plan: str, why: str) -> None:
    refused = verify(f"test_backward_writes:{task}", plan, pool=pool).refused
    assert refused is not None and "backward changes the buffer 'codebook.codes'" in refused and why in refused


@pytest.mark.parametrize(
    ("task", "plan"), [("late_codes", "pp=2"), ("early_codes", "pp=2,microbatches=1"), ("counted", "dp_replicate=2")]
)
def test_what_all_keep_alike_is_equal(pool: RankPool, task: str, plan: str) -> None:
    assert verify(f"test_backward_writes:{task}", plan, pool=pool).parity
