"""What a forward writes late, of a rank's own samples, is found where an epoch ends, and before weights are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_prepare import adamw, samples
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool


class Late(nn.Module):
    """Keeps a mean of what it was given, from its fifth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2).double()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training and torch.is_grad_enabled()
        if self.steps > 4:
            self.mean = x.detach().mean(0)
        return self.inner(x)


def trained(folder: str, most: int) -> None:
    torch.manual_seed(0)
    model: Any = Late()
    optimizer = adamw(model)
    prepared: Any = shardwise.prepare(model, optimizer, DataLoader(samples(24), batch_size=4), plan="dp_replicate=2")
    model, optimizer, loader = prepared
    for step, (x, y) in enumerate(loader, 1):
        optimizer.zero_grad()
        prepared.backward((model(x) - y).square().mean())
        optimizer.step()
        if step == most:
            break
    if folder:
        shardwise.save(prepared, folder)


def test_what_came_apart_since_the_last_comparison_is_not_saved(tmp_path: Path, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match="after step 5 the buffer 'mean'"):
        pool.run(trained, 2, str(tmp_path), 5)
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_what_came_apart_is_found_where_an_epoch_ends(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"after step 5 the buffer 'mean'.*line \d+: "):
        pool.run(trained, 2, "", 24)
