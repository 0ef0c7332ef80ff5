"""A script that switches its optimizer between training and evaluation has one process's weights in both."""

from __future__ import annotations

import pytest
import torch
from averaging import Averaging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.ranks import RankPool


def trained(plan: str | None) -> list[float]:
    """Held-out losses after each of three epochs, and whole weights of the end in training, as one list."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 4))
        optimizer = Averaging(model.parameters(), lr=0.2)
        data: object = DataLoader(TensorDataset(torch.randn(20, 7), torch.randint(4, (20,))), batch_size=6)
        held, labels = torch.randn(9, 7), torch.randint(4, (9,))
        prepared = None
        if plan is not None:
            prepared = model, optimizer, data = shardwise.prepare(model, optimizer, data, plan=plan)
        losses = []
        for _ in range(3):
            model.train()
            optimizer.train()
            for x, y in data:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward() if prepared is None else prepared.backward(loss)
                optimizer.step()
            model.eval()
            optimizer.eval()
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(model(held), labels)))
        optimizer.train()
        state = model.state_dict() if prepared is None else prepared.state_dict()
        return losses + torch.cat([value.flatten() for value in state.values()]).tolist()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "plan",
    ["dp_shard=2,zero=1", "dp_shard=2,zero=3",
     *(pytest.param(plan, marks=pytest.mark.long) for plan in ("dp_replicate=2", "dp_shard=2,zero=2", "tp=2",
                                                               "dp_shard=2,zero=3,tp=2"))],
)  # fmt: skip
def test_modes_move_pieces(plan: str, pool: RankPool) -> None:
    ranks = 4 if "tp=2" in plan and "dp" in plan else 2
    for found in pool.run(trained, ranks, plan):
        assert found == pytest.approx(trained(None), rel=1e-12, abs=1e-14)
