"""Buffers that forwards make of samples are one process's on ranks."""

from __future__ import annotations

import pytest
import torch

from shardwise import verify
from shardwise.part.buffer_ways import ways
from shardwise.ranks import RankPool

PLANS = ["dp_replicate=3,accumulate=3", "dp_shard=2,zero=3,accumulate=2", "pp=2,dp_replicate=2,microbatches=2"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("task", ["counted", "set_anew", "centred", "spectral"])
def test_buffers_of_samples_are_joined(task: str, plan: str, pool: RankPool) -> None:
    """Seven samples in three micro-batches on three ranks: one has none. Loads move the choice of the next step."""
    parity = verify(f"joined_tasks:{task}", plan, steps=3, pool=pool)
    assert parity.parity, parity.text()


@pytest.mark.parametrize("task", ["sharpened", "latest", "visited"])
def test_modules_of_other_buffers_run_on_all_samples(task: str, pool: RankPool) -> None:
    parity = verify(f"joined_tasks:{task}", "dp_replicate=2", pool=pool)
    assert parity.parity and any("mixes the samples" in note for note in parity.notes)


def test_ways() -> None:
    before, parts = torch.tensor([3.0, 1.0]), [torch.tensor([4.0, 1.0]), torch.tensor([8.0, 2.0])]
    assert ways(before, torch.tensor([9.0, 2.0]), parts, [1, 3], 1e-9) == ["added"]
    assert ways(before, torch.tensor([12.0, 3.0]), parts, [1, 3], 1e-9) == ["fresh"]
    assert ways(before, torch.tensor([7.0, 1.75]), parts, [1, 3], 1e-9) == ["mean"]
    assert ways(before, torch.tensor([8.0, 2.0]), parts, [1, 3], 1e-9) == []  # the last part's
    assert ways(torch.zeros(2), torch.tensor([12.0, 3.0]), parts, [1, 3], 1e-9) == ["added", "fresh"]
