"""Several backwards before one step, which the plan does not tell: gradients add up, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError
from shardwise.ranks import RankPool


class Heads(nn.Module):
    """One of two heads answers, so that each backward reaches parameters that the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.one, self.other = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return getattr(self, head)(self.trunk(x))


def attacked(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A clipped backward, a step into the weights along its gradient, another backward there, and the way back."""
    torch.manual_seed(0)
    model: Any = Heads().double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(14), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    told = []
    for x, y in loader:
        optimizer.zero_grad()
        for head in ("one", "other"):
            loss = (model(x, head) - y).square().mean()
            loss = prepared.backward(loss) if prepared else (loss.backward(), loss)[1]
            if head == "one":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                kept = model.trunk[0].weight.data.clone()
                model.trunk[0].weight.data.add_(model.trunk[0].weight.grad, alpha=0.5)
            told.append(loss.item())
        model.trunk[0].weight.data = kept
        told += [sum(param.grad.square().sum().item() for param in model.parameters())]
        norm = prepared.clip_grad_norm_(0.3) if prepared else nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        told.append(norm.item())
        optimizer.step()
    return told, {name: weight.clone() for name, weight in model.state_dict().items()}


@pytest.mark.parametrize(
    "plan", ["dp_replicate=2", "dp_shard=3,zero=1", "dp_shard=2,zero=2", "dp_shard=3,zero=3", "tp=2"]
)
def test_backwards_of_one_step_add_up(plan: str, pool: RankPool) -> None:
    expected, weights = attacked(None)
    for told, trained in pool.run(attacked, shardwise.Plan.parse(plan).world_size, plan):
        assert told == pytest.approx(expected, rel=BAR)
        for name, weight in weights.items():
            assert float((trained[name] - weight).abs().max()) < BAR, name


def read_early(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2).double()
    prepared: Any = shardwise.prepare(model, adamw(model), DataLoader(samples(14), batch_size=4), plan=plan)
    for x, y in prepared.loader:
        prepared.backward((prepared.model(x) - y).square().mean())
        assert model.weight.grad is not None


@pytest.mark.parametrize(
    "plan", ["dp_replicate=2,accumulate=2", "dp_shard=2,zero=1,accumulate=2", "dp_shard=2,zero=3,accumulate=2"]
)
def test_a_sum_of_some_ranks_is_not_shown(plan: str, pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"before the plan's last micro-batch.*leave accumulate out.*line \d+: assert"):
        pool.run(read_early, 2, plan)
