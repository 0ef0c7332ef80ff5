"""A prepared script whose optimizer's state, weights or activations lie in a tier, or rest by a code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.ranks import RankPool

DISK, WEIGHTS, BLOCKS = "offload=optimizer:disk", "offload=optimizer:disk|parameters:disk", "offload=activations:disk"
SPLIT = "masters=split"


def trained(plan: str) -> tuple[list[float], int, set[str]]:
    """(Losses and whole weights, calls of the step's hook, where the optimizer's state was seen) of eight steps, in
    which state is loaded, a group is added and the optimizer is replaced."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(7, 32), *blocks, nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model[:5].parameters(), lr=0.02)
    calls, places = [], set()
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    data: object = DataLoader(TensorDataset(torch.randn(96, 7), torch.randint(4, (96,))), batch_size=12)
    prepared = model, optimizer, data = shardwise.prepare(model, optimizer, data, plan=plan)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    losses = []
    for number, (x, y) in enumerate(data):
        if number == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            places |= seen(prepared)
        if number == 4:
            optimizer.add_param_group({"params": model[5].parameters(), "lr": 0.01, "initial_lr": 0.01})
        if number == 6:
            optimizer = prepared.replace_optimizer(torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True))
        optimizer.zero_grad()
        losses.append(float(prepared.backward(nn.functional.cross_entropy(model(x), y))))
        prepared.clip_grad_norm_(0.5)
        optimizer.step()
        if number < 3:  # a group that is added later has no rate of the schedule
            schedule.step()
        places |= seen(prepared)
    weights = torch.cat([value.flatten() for value in prepared.state_dict().values()]).tolist()
    return losses + weights, len(calls), places


def seen(prepared: shardwise.scripts.Prepared) -> set[str]:
    """Returns where the state of the weights lies that the optimizer was made with."""
    tier = prepared.engine.state.tier
    with prepared._gate.open():
        states = [state for param, state in prepared.optimizer.state.items() if param.numel()]
        moments = [state[name] for state in states for name in ("exp_avg", "max_exp_avg_sq") if name in state]
        return {"tier" if tier is not None and tier.rests(tensor) else "memory" for tensor in moments[:4]}


def closed(plan: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    data: object = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4)
    prepared = model, optimizer, data = shardwise.prepare(model, optimizer, data, plan=plan)
    for (x,) in data:
        optimizer.step(lambda x=x: prepared.backward(model(x).mean()))


@pytest.mark.parametrize(
    ("plan", "tier"),
    [("dp_replicate=2", DISK), ("dp_shard=2,zero=3", WEIGHTS), ("dp_shard=2,zero=1,precision=bf16", DISK),
     pytest.param("dp_replicate=2", BLOCKS, marks=pytest.mark.long),
     *(pytest.param(plan, DISK, marks=pytest.mark.long) for plan in ("dp_shard=2,zero=2", "tp=2", "single")),
     ("dp_shard=2,zero=1,precision=bf16", SPLIT),
     *(pytest.param(f"{plan},precision=bf16", SPLIT, marks=pytest.mark.long) for plan in ("dp_replicate=2", "tp=2"))],
)  # fmt: skip
def test_the_bits_are_those_without_a_tier(plan: str, tier: str, pool: RankPool) -> None:
    ranks = 1 if plan == "single" else 2
    plain = pool.run(trained, ranks, plan)
    for (values, calls, places), (expected, known, _) in zip(
        pool.run(trained, ranks, f"{plan},{tier}".removeprefix("single,")), plain, strict=True
    ):
        assert values == expected
        assert calls == known == 6
        assert places == ({"memory"} if tier in (BLOCKS, SPLIT) else {"tier"})


@pytest.mark.parametrize(
    ("plan", "tier"),
    [("dp_shard=2,zero=1", "optimizer_state=8bit"),
     *(pytest.param(*row, marks=pytest.mark.long) for row in (
         ("dp_replicate=2", "optimizer_state=8bit"), ("dp_shard=2,zero=3", "optimizer_state=bf16"),
         ("tp=2", "optimizer_state=8bit"), ("dp_shard=2,zero=2", f"optimizer_state=8bit,{DISK}")))],
)  # fmt: skip
def test_coded_state_is_loaded_joined_and_replaced(plan: str, tier: str, pool: RankPool) -> None:
    """As near as a code rounds: a state that is forgotten as it is loaded moves weights by 0.2 of their norm."""
    (expected, _, _), _ = pool.run(trained, 2, plan)
    (values, calls, places), other = pool.run(trained, 2, f"{plan},{tier}")
    assert values == other[0] != expected
    apart = torch.tensor(values).dist(torch.tensor(expected)) / torch.tensor(expected).norm()
    assert apart < 0.02
    assert calls == 6 and places == {"tier"}


def test_a_closure_is_refused(pool: RankPool) -> None:
    with pytest.raises(
        shardwise.RefusedPlan, match=r"optimizer.step\(closure\) where the plan has it step over few weights"
    ):
        pool.run(closed, 2, f"dp_replicate=2,{DISK}")
