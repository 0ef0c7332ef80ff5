"""Modules that convert a submodule as they run: equal where nothing changes, refused under every plan where it does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Task, verify
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool
from shardwise.trace.conversions import converting, refuse_conversions


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm.to(x.dtype)(x))


class Converting(nn.Module):
    """Blocks that are converted from outside, and norms from inside."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.blocks, self.last = dtype, nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            kind = self.dtype or x.dtype
            x = block.to(x.device, kind)(x.to(kind)).to(x.dtype)
        return self.last(x)


def rows(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(step))}


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def converting_nothing() -> Task:
    return Task(model=Converting, batch=rows, inputs=lambda b: ((b["x"],), {}), loss=squares)


def converting_to_double() -> Task:
    model = lambda: Converting(torch.float64)  # noqa: E731
    return Task(model=model, batch=rows, inputs=lambda b: ((b["x"],), {}), loss=squares)


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", "tp=2", "pp=2"])
def test_what_changes_nothing_is_left_out(pool: RankPool, plan: str) -> None:
    assert verify("test_conversions:converting_nothing", plan, pool=pool).parity


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", "dp_replicate=2"])
def test_a_change_is_refused_by_name(pool: RankPool, plan: str) -> None:
    refused = verify("test_conversions:converting_to_double", f"{plan},precision=fp32", pool=pool).refused
    assert refused is not None and "'blocks.0.norm.weight' from torch.float32" in refused


def test_copies_and_the_plans_own_conversions_are_done() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    refuse_conversions(module)
    with pytest.raises(RefusedPlan, match=r"'0\.weight'"):
        module.double()
    assert copy.deepcopy(module).double()[0].weight.dtype == torch.float64
    with converting():
        assert module.half()[0].weight.dtype == torch.float16
