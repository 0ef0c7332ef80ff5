"""Modules with complex parameters under every plan: Fourier neural operators, state spaces, complex networks."""

from __future__ import annotations

import pytest

from shardwise import verify
from shardwise.ranks import RankPool

EQUAL = [
    ("fno1d", "dp_shard=2,zero=3"), ("fno2d", "tp=2"), ("state_spaces", "tp=2,dp_shard=2,zero=3"),
    ("complex_net", "tp=2,pp=2"), ("complex_net", "dp_shard=3,zero=1"),
    ("complex_experts", "dp_shard=2,ep=2,zero=1"),
]  # fmt: skip
MORE = [
    ("fno1d", "tp=2,dp_shard=2,zero=1"), ("fno1d", "cp=2"), ("fno2d", "domain=2"), ("fno3d", "tp=2"),
    ("fno3d", "domain=1x2,dp_shard=2,zero=3"), ("fno3d", "dp_shard=3,zero=3"), ("state_spaces", "pp=2"),
    ("state_spaces", "cp=2"), ("complex_net", "dp_shard=2,zero=3,deterministic=4"),
    ("complex_net", "dp_replicate=2,dp_shard=2,zero=3,accumulate=2"), ("complex_net", "tp=2,dp_shard=2,zero=2"),
    ("complex_experts", "dp_shard=2,ep=2,zero=3"), ("complex_experts", "tp=2,dp_shard=2,ep=2,zero=2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), [*EQUAL, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE)])
def test_complex_parameters_under_a_plan(pool: RankPool, name: str, plan: str) -> None:
    result = verify(f"complex_tasks:{name}", plan, pool=pool, timeout_s=60)
    assert result.parity, result.text()
