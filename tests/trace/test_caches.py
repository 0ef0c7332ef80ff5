"""Functions that remember what they made (`functools.lru_cache`): what a rehearsal made is not handed to a run."""

from __future__ import annotations

from functools import cache, lru_cache, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Task
from shardwise.models import tasks
from shardwise.proof.parity import verify
from shardwise.ranks import RankPool
from shardwise.trace.caches import CacheState, caches_of


def remembered(function: Any) -> Any:
    """A cache in a variable of the function around it, as libraries have it."""
    kept = lru_cache(maxsize=2)(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        return kept(*args)

    return call


@cache
def table(length: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(length, dtype=dtype).sin()


class Absent:
    """What stands for a library that is not installed: it raises whatever it is asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise ModuleNotFoundError(name)


absent = Absent()


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.body, self.out = nn.Linear(12, 8), nn.Linear(8, 12), nn.Linear(12, tasks.CLASSES)
        self.scale = lru_cache(maxsize=1)(self._scale)

    @staticmethod
    @remembered
    def shift(length: int, dtype: torch.dtype) -> Tensor:
        return torch.arange(length, dtype=dtype).cos()

    def _scale(self, dtype: torch.dtype) -> Tensor:
        return torch.full((12,), 0.5, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x + table(12, x.dtype)).relu() + self.shift(8, x.dtype)
        return self.out(self.body(x).tanh() * self.scale(x.dtype))


def task() -> Task:
    return tasks.mlp().with_(model=Remembers)


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,pp=2"])
def test_a_rehearsal_s_tables_do_not_reach_the_run(plan: str, pool: RankPool) -> None:
    parity = verify("test_caches:task", plan, pool=pool)
    assert parity.equal, parity.text()


def test_all_that_a_class_and_its_file_remember_is_found_and_forgotten() -> None:
    module = Remembers().double()
    before = CacheState(module)
    module(torch.ones(1, 12).double())
    assert len(caches_of(module)) == 3 and all(one.cache_info().currsize for one in caches_of(module))
    CacheState(module).restore()
    assert all(one.cache_info().currsize for one in caches_of(module))  # nothing was entered since
    before.restore()
    assert not any(one.cache_info().currsize for one in caches_of(module))
