"""`prepared.whole()` opens and closes over parameters of every dtype, and around what an optimizer's wrapper does."""

from __future__ import annotations

import pytest
import torch
from small_scripts import back, batches, begin, check_equal, mse, net, weights_of, whole
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.ranks import RankPool


class Ordered(nn.Module):
    """Features in an order that is a frozen parameter of integers, kept or left out by one of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(7, 13), nn.Linear(13, 3)
        self.order = nn.Parameter(torch.randperm(13), requires_grad=False)
        self.kept = nn.Parameter(torch.arange(13) != 4, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.enter(x))[:, self.order] * self.kept)


def trained(plan: str | None) -> list[float]:
    """Whole weights after three steps, each followed by a decay that the script writes by itself."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = Ordered()
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
        data: object = DataLoader(TensorDataset(torch.randn(15, 7), torch.randint(3, (15,))), batch_size=5)
        prepared = None
        if plan is not None:
            prepared = model, optimizer, data = shardwise.prepare(model, optimizer, data, plan=plan)
        for x, y in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward() if prepared is None else prepared.backward(loss)
            optimizer.step()
            if prepared is None:
                decay(model)
            else:
                with prepared.whole():
                    decay(model)
        state = model.state_dict() if prepared is None else prepared.state_dict()
        return torch.cat([value.double().flatten() for value in state.values()]).tolist()
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def decay(model: nn.Module) -> None:
    assert sorted(model.order.tolist()) == list(range(13))
    for param in model.parameters():
        if param.is_floating_point():
            param.mul_(0.9)


@pytest.mark.parametrize("plan", ["dp_shard=3,zero=3", pytest.param("tp=2", marks=pytest.mark.long)])
def test_parameters_of_integers_are_whole_too(plan: str, pool: RankPool) -> None:
    for found in pool.run(trained, 3 if "3" in plan else 2, plan):
        assert found == pytest.approx(trained(None), rel=1e-12, abs=1e-14)


class Climbing(torch.optim.Optimizer):
    """Steps of another optimizer by gradients from higher up the slope, to which it climbs and from which it returns,
    as sharpness-aware minimisation has it."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"rho": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        params = self.param_groups[0]["params"]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["before"] = param.data.clone()
            param.add_(param.grad * (0.1 / norm))
        self.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.data = self.state[param]["before"]
        self.inner.step()
        self.zero_grad()


def climbed(plan: str | None) -> tuple:
    model = net()
    optimizer = Climbing(model.parameters())
    prepared, model, _, loader = begin(plan, model, batches(15), optimizer.inner)
    losses = []
    for x, y in loader:
        losses.append(back(prepared, mse(model, x, y)))
        with whole(prepared, grads=True):
            optimizer.climb()
        losses.append(back(prepared, mse(model, x, y)))
        with whole(prepared, grads=True):
            optimizer.step()
    return losses, weights_of(model)


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", *(pytest.param(p, marks=pytest.mark.long) for p in (
    "dp_replicate=2", "dp_shard=2,zero=1", "tp=2"))])  # fmt: skip
def test_a_wrapper_does_its_part_on_whole_weights(plan: str, pool: RankPool) -> None:
    check_equal(pool, climbed, plan)
