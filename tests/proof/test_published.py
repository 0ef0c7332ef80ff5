"""Named tests of what was reported of others: silently wrong there, proven equal to one process here."""

from __future__ import annotations

import pytest

from shardwise import verify
from shardwise.ranks import RankPool

REPORTS = [
    # ZeRO-2 in bf16, a module that runs more than once in a step: gradients in two parts, one of them lost
    ("deepspeedai/DeepSpeed 8224", "runs_twice", ["dp_shard=2,zero=2,precision=bf16,accumulate=2"]),
    # heads further ahead that count fewer tokens; the clip's norm under cuts; gradients of norms under sp; stages
    (
        "NVIDIA/Megatron-LM 7452",
        "further_ahead",
        ["dp_replicate=2,accumulate=2", "tp=2,sp=true", "pp=2,microbatches=2"],
    ),
    # one training run, whose loss changes with the number of ranks that share a model's grid alone
    ("ecmwf/anemoi-core 1403", "layout_alone", ["dp_replicate=2", "domain=2x1", "domain=1x2,dp_replicate=2"]),
]


@pytest.mark.parametrize(
    ("task", "plan"),
    [pytest.param(task, plan, id=f"{report}-{plan}") for report, task, plans in REPORTS for plan in plans],
)
def test_reports_of_others(task: str, plan: str, pool: RankPool) -> None:
    parity = verify(f"published_tasks:{task}", plan, pool=pool, timeout_s=120, clip_norm=0.1)
    assert parity.parity, parity.text()
    assert parity.gradient_error is not None
