"""Units of zero=3 whose weight is read outside of their forward are gathered with the whole module."""

from __future__ import annotations

import module_tasks
from torch.distributed.fsdp import FSDPModule

from shardwise import parallelize
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
