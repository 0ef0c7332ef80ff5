"""Units of zero=3 whose weight is read outside of their forward are gathered with the whole module."""

from __future__ import annotations

import module_tasks
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise import Task, parallelize, verify
from shardwise.ranks import RankPool


def _units_and_notices() -> tuple[list[str], list[str]]:
    engine = parallelize(module_tasks.weight_used_outside(), "dp_shard=2,zero=3")
    units = [path for path, child in engine.module.named_modules() if isinstance(child, FSDPModule)]
    return units, [notice for notice in engine.notices if "outside its forward" in notice]


def test_unit_whose_weight_is_read_outside_is_gathered_with_the_root(pool: RankPool) -> None:
    units, told = pool.run(_units_and_notices, 2)[0]
    assert "" in units
    assert "blocks.0" not in units
    assert "blocks.1" in units
    assert "'blocks.0'" in told[0]


class Masked(nn.Module):
    """A layer whose mask others have too, and fade."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.line = nn.Linear(module_tasks.WIDTH, module_tasks.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.line(x * self.mask.mul_(0.9).clone())


def one_mask() -> Task:
    def made() -> nn.Module:
        mask = torch.linspace(0.5, 1.5, module_tasks.WIDTH)
        return nn.Sequential(*(Masked(mask) for _ in range(3)), nn.Linear(module_tasks.WIDTH, module_tasks.OUT))

    return module_tasks.task(made)


def test_a_buffer_that_several_units_hold_stays_one(pool: RankPool) -> None:
    assert verify("test_units_outside:one_mask", "dp_shard=2,zero=3", pool=pool).equal
