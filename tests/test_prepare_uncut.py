"""A parameter without dims (a temperature), which zero=3 does not cut, in a script's own code on gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise import Plan
from shardwise.ranks import RankPool


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(6, 8), nn.Linear(8, 3), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale.exp() * self.b(self.a(x).tanh())


def trained(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What a script finds of its gradients in each of its steps, and the weights that it comes to."""
    torch.manual_seed(0)
    model: Any = Scaled().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(20, 6).double(), torch.randn(20, 3).double())
    loader: Any = DataLoader(data, 4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    told: list[Any] = []
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        for times in range(1 + (step == 4)):  # two backwards in one step
            loss = (model((1 + times) * x) - y).square().mean()
            loss.backward() if prepared is None else prepared.backward(loss)
        gradients = [param.grad for param in model.parameters()]
        if step == 0:
            told += [nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
        elif step == 1:
            told += [max(gradient.abs().max() for gradient in gradients), model.scale.grad]
        elif step == 2 and prepared is not None:
            told += [prepared.clip_grad_norm_(0.1)]
        elif step == 2:
            told += [nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
        elif step == 3:
            model.scale.data = model.scale.data.clamp(0, 1.2)
        told += [gradient.norm() for gradient in gradients]
        optimizer.step()
    return [float(one) for one in told], model.state_dict()


@pytest.mark.parametrize(
    "plan",
    [
        "dp_shard=2,zero=3",
        *(pytest.param(f"dp_shard=2,zero=3,{more}=2", marks=pytest.mark.long) for more in ("tp", "dp_replicate")),
        pytest.param("dp_shard=2,zero=2", marks=pytest.mark.long),
    ],
)
def test_its_gradient_is_that_of_one_process_on_every_rank(plan: str, pool: RankPool) -> None:
    ((told, weights),) = pool.run(trained, 1, None)
    for found, held in pool.run(trained, Plan.parse(plan).world_size, plan):
        assert found == pytest.approx(told, rel=BAR)
        assert all(torch.allclose(held[name], value, rtol=BAR, atol=BAR) for name, value in weights.items())
