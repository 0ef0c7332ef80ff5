"""Forwards that write into weights, or share statistics between calls: equal to one process, or refused with why."""

from __future__ import annotations

import pytest
import torch
import written_tasks

from shardwise import verify
from shardwise.errors import RefusedPlan
from shardwise.look.replaced_parameters import may_replace
from shardwise.look.watched_run import Seen
from shardwise.ranks import RankPool

EQUAL = [
    ("powers", "pp=2,schedule=gpipe,microbatches=3"),
    ("followed", "pp=2"),
    ("powers", "dp_shard=2,zero=3"),
    ("twice", "pp=2"),
    ("slopes", "dp_replicate=2"),
    ("averages", "dp_replicate=2"),
    ("set_from_outside", "pp=2"),
    ("listed", "dp_replicate=2"),
    ("after_use", "dp_replicate=2,remat=full"),
    ("switched", "dp_shard=2,zero=3,wrap=maker|critic"),
]
MORE = [
    ("normalised", "pp=2"), ("normalised", "pp=2,schedule=zbh1,microbatches=3"), ("powers", "pp=2"),
    ("powers", "tp=2,pp=2"), ("bounded", "pp=2"), ("scaled", "pp=2"), ("followed", "dp_shard=2,zero=1,pp=2"),
    ("twice_by_hooks", "pp=2"), ("twice_by_hooks", "pp=2,accumulate=2"), ("slopes", "tp=2"),
    ("slopes", "dp_shard=2,zero=3"), ("normalised", "dp_shard=2,zero=3"), ("bounded", "dp_shard=2,zero=1"),
    ("bounded", "dp_shard=2,zero=2,tp=2"), ("powers", "dp_shard=2,zero=2"), ("followed", "dp_shard=2,zero=3"),
    ("scaled", "dp_replicate=2,dp_shard=2,zero=3"), ("followed", "dp_shard=2,zero=3,pp=2"),
    ("blocks", "dp_replicate=2,remat=full"), ("blocks", "pp=2,remat=selective,schedule=gpipe"),
    ("listed", "dp_shard=2,zero=3"), ("listed", "tp=2"), ("stops", "pp=2"),
    ("averages", "dp_shard=2,zero=3"), ("averages", "tp=2,pp=2"), ("averages", "pp=2,dp_shard=2,zero=2"),
    ("after_use", "dp_shard=2,zero=2,remat=selective"), ("before_use", "dp_replicate=2,remat=full"),
    ("before_use", "dp_shard=2,zero=1,remat=selective"), ("after_use", "dp_replicate=2"),
    ("blocks_by_matrices", "dp_shard=2,zero=3,remat=full"), ("blocks_by_matrices", "dp_shard=2,zero=2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), [*EQUAL, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)])
def test_equal_to_one_process(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(f"written_tasks:{name}", plan, pool=pool, timeout_s=180)
    assert parity.parity, parity.text()
    assert parity.gradient_error and parity.parameter_error


def test_no_stage_begins_between_two_uses_of_what_is_written(pool: RankPool) -> None:
    refused = verify("written_tasks:twice", "pp=2,stages=tower.0", pool=pool).refused or ""
    assert "the forward writes into 'tower.1.running_" in refused and "belongs into one stage" in refused, refused


def test_writes_by_each_piece_of_a_batch_are_refused(pool: RankPool) -> None:
    refused = verify("written_tasks:normalised", "dp_shard=2,zero=2,deterministic=4", pool=pool).refused or ""
    assert "deterministic: the forward changes parameter '0.weight'" in refused, refused


def test_a_module_that_cuts_samples_into_groups_is_not_blamed(pool: RankPool) -> None:
    refused = verify("written_tasks:in_groups", "pp=2", pool=pool).refused or ""
    assert "the forward fails on 5 samples, though one process runs on all 16" in refused, refused


def test_a_replacement_that_unties_a_weight_is_refused(pool: RankPool) -> None:
    refused = verify("written_tasks:untied", "dp_replicate=2", pool=pool).refused or ""
    assert "the forward replaces parameter 'weight' of a Embedding by another nn.Parameter" in refused, refused
    assert "unties" in refused, refused


def test_code_that_may_replace_weights_is_told_by_what_a_forward_comes_to() -> None:
    assert may_replace(written_tasks.Averages())
    assert not may_replace(written_tasks.Scaled(8, 8)), "a constructor makes parameters"


def test_a_replacement_met_in_the_look_is_refused() -> None:
    module = written_tasks.Averages()
    seen = Seen(module)
    with pytest.raises(RefusedPlan, match=r"replaces parameter 'sums' by another nn\.Parameter"), seen.watching():
        module(torch.randn(4, written_tasks.WIDTH))
