"""What a script changes in mid training: weights held still and thawed, another loader; equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, net, samples
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError
from shardwise.ranks import RankPool


def midway(plan: str | None, case: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model: Any = net()
    if case.startswith("loader"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)).double()
        with torch.no_grad():
            for place, param in enumerate(model.parameters()):
                param.copy_(torch.linspace(-0.5, 0.6 + place / 10, param.numel()).view_as(param).sin())
    optimizer, loader, prepared = adamw(model), DataLoader(samples(14), batch_size=4), None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    if case == "thawed":
        for param in model.layers.parameters():
            param.requires_grad_(False)
    torch.manual_seed(5)
    losses = []
    for epoch in range(2):
        if epoch and case == "thawed":
            for param in model.layers.parameters():
                param.requires_grad_(True)
        if epoch and case.startswith("loader"):
            loader = DataLoader(samples(11), batch_size=6, shuffle=True)
            if prepared:
                loader = prepared.split(loader, trains=case == "loader")
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            if prepared:
                loss = prepared.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, prepared.state_dict() if prepared else model.state_dict()


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("thawed", "dp_replicate=2"),
        ("thawed", "dp_shard=2,zero=1"),
        ("thawed", "dp_shard=2,zero=3"),
        ("thawed", "tp=2"),
        ("loader", "dp_shard=2,zero=2"),
        ("loader", "dp_shard=2,zero=3"),
    ],
)
def test_what_changes_in_mid_training_is_one_process_s(case: str, plan: str, pool: RankPool) -> None:
    expected = midway(None, case)
    for losses, weights in pool.run(midway, 2, plan, case):
        assert losses == pytest.approx(expected[0], rel=BAR)
        for name, weight in expected[1].items():
            assert float((weights[name] - weight).abs().max()) < BAR, name


def test_training_on_held_out_batches_is_refused(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"held-out data.*trains=True.*line \d+: loss = .*model"):
        pool.run(midway, 2, "dp_replicate=2", "loader for held-out data")
