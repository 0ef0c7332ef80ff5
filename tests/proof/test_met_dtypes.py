"""Modules that hold or make tensors of 32 bits beside weights of 16, or of 64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Plan, Task, parallelize, simulate
from shardwise.errors import InputError
from shardwise.precision import _OneDtype, met_at
from shardwise.proof.literal_dtypes import OneDtype
from shardwise.proof.own_precision import plain_steps
from shardwise.proof.settings import Settings
from shardwise.ranks import RankPool


class Block(nn.Module):
    """Adds a table of positions, and weighs by distances that it makes: float32, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.randn(1, 5, 8))
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.places)
        at = torch.arange(5, dtype=torch.float32, device=x.device)
        near = torch.exp(-(at[:, None] - at).abs())
        return near @ self.inner(x).tanh()


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks, self.leave = nn.Linear(4, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.blocks(self.enter(x)))


def test_a_forward_that_meets_dtypes_keeps_the_names_of_its_arguments() -> None:
    task = met_at(placed(), Plan.parse("precision=bf16"), RuntimeError("expected scalar type Float"))
    assert task is not None and [*inspect.signature(task.model().forward).parameters] == ["x"]


def placed() -> Task:
    def batch(step: int) -> torch.Tensor:
        return torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(step))

    def loss(output: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output - x[..., :3]).square().sum(), len(x)

    return Task(Placed, batch=batch, loss=loss, inputs=lambda x: ((x,), {}))


def trained(plan: str) -> tuple[list[float], list[str]]:
    task: Any = placed()
    engine = parallelize(task, plan)
    return [engine.step(task.batch(step)).loss for step in range(3)], list(engine.notices)


@pytest.mark.parametrize("plan", [
    "precision=bf16", "dp_shard=2,zero=3,precision=bf16,remat=full", "tp=2,precision=bf16-full",
    "pp=2,microbatches=2,precision=fp16", "dp_replicate=2,precision=fp64",
])  # fmt: skip
def test_they_train_as_in_float32(plan: str, pool: RankPool) -> None:
    ((expected, notices),) = pool.run(trained, 1, "single")
    assert not any("autocast" in notice for notice in notices)
    for losses, told in pool.run(trained, Plan.parse(plan).world_size, plan):
        assert losses == pytest.approx(expected, rel=0.02)
        assert any("as under torch.autocast" in notice for notice in told)


def test_forecast_and_second_proof_know_them() -> None:
    assert simulate(placed(), "precision=bf16", "1x1 h100-sxm-80gb").step_s > 0
    losses = plain_steps(placed(), Plan(precision="bf16"), Settings()).losses
    assert losses == pytest.approx(plain_steps(placed(), Plan(), Settings()).losses, rel=0.02)


def test_what_is_no_matter_of_dtypes_stays_an_error() -> None:
    assert met_at(placed(), Plan(precision="bf16"), RuntimeError("shape '[2]' is invalid")) is None
    assert met_at(placed(), Plan(), RuntimeError("expected scalar type Float")) is None
    with pytest.raises(InputError, match="dtype"):
        parallelize(placed(), "precision=bf16,compile=true")


def put(into: torch.Tensor, value: torch.Tensor) -> None:
    into.index_put_((torch.tensor([0]),), value)


def scatter(into: torch.Tensor, value: torch.Tensor) -> None:
    into.scatter_(0, torch.zeros(1, 2, dtype=torch.long), value[None])


MODES = pytest.mark.parametrize("mode", [_OneDtype, OneDtype])  # the engine's, and that of a proof's one process


@MODES
@pytest.mark.parametrize("write", [put, scatter])
@pytest.mark.parametrize("wide", [True, False])
def test_what_is_written_into_keeps_its_dtype(write: Callable[..., None], wide: bool, mode: Any) -> None:
    dtypes = (torch.float32, torch.bfloat16) if wide else (torch.bfloat16, torch.float32)
    into, value = torch.zeros(3, 2, dtype=dtypes[0]), torch.ones(2, dtype=dtypes[1])
    with pytest.raises(RuntimeError):
        write(into.clone(), value)
    with mode(torch.bfloat16):
        write(into, value)
    assert into.dtype == dtypes[0] and into.sum() == 2


@MODES
def test_running_statistics_are_written_into_as_they_are(mode: Any) -> None:
    layer = nn.InstanceNorm1d(3, affine=True, track_running_stats=True).to(torch.bfloat16)
    layer.running_mean, layer.running_var = torch.zeros(3), torch.ones(3)
    x = torch.randn(4, 3, 5, dtype=torch.bfloat16)
    with mode(torch.bfloat16):
        layer(x)
    assert layer.running_mean.abs().sum() > 0


@MODES
def test_a_tensor_that_is_given_for_the_result_is_not_copied(mode: Any) -> None:
    a, b, out = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16)
    with mode(torch.bfloat16), pytest.raises(RuntimeError):
        torch.mm(a, b, out=out)
