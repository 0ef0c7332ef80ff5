"""Batch norm joined over ranks, on one rank: torch's own. Over several ranks it is proven with the plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from norm_tasks import normed
from torch import nn
from torch.nn import functional

from shardwise import Plan, parallelize
from shardwise.comm import Axis
from shardwise.look.kept_statistics import norms_differ
from shardwise.parallel.batchnorm import synced_batch_norm
from shardwise.parallel.slots import Phase
from shardwise.proof.parity import verify
from shardwise.ranks import RankPool

CHANNELS = 3


@pytest.mark.parametrize("plan", ["tp=2", "tp=3", "tp=2,dp_shard=2,zero=3", "tp=2,dp_replicate=2", "tp=2,remat=full"])
def test_channels_that_are_cut_have_their_statistics(plan: str, pool: RankPool) -> None:
    parity = verify("norm_tasks:normed", plan, pool=pool)
    assert parity.parity, parity.text()
    assert f"{plan[:4]} cuts" in parity.text()


@pytest.mark.parametrize(("task", "begins"), [("normed", "body.1"), ("of_groups", "1")])
def test_a_stage_that_begins_with_a_norm_deals_what_it_is_sent(task: str, begins: str, pool: RankPool) -> None:
    """What crosses is whole, and the norm's weights are cut."""
    parity = verify(f"norm_tasks:{task}", f"tp=2,pp=2,stages={begins}", pool=pool)
    assert parity.parity, parity.text()


@pytest.mark.parametrize("remat", ["full", "selective"])
def test_norms_that_are_computed_again_have_the_statistics_of_all_ranks(remat: str, pool: RankPool) -> None:
    parity = verify("norm_tasks:apart", f"dp_replicate=2,remat={remat}", pool=pool)
    assert parity.parity, parity.text()


def test_a_backward_through_joined_statistics_is_differentiated(pool: RankPool) -> None:
    parity = verify("norm_tasks:forces", "dp_replicate=2,accumulate=2", pool=pool)
    assert parity.parity, parity.text()


def stepped(plan: str) -> list[float]:
    task: Any = normed()
    engine = parallelize(task, plan)
    return [engine.step(task.batch(step)).loss for step in range(3)]


@pytest.mark.parametrize("plan", ["single", "pp=2,microbatches=2", "dp_shard=2,zero=2,remat=full"])
def test_sixteen_bits_follow_float32(plan: str, pool: RankPool) -> None:
    """Some forwards run before a backward, or again in it."""
    losses = {
        precision: pool.run(
            stepped, Plan.parse(plan).world_size, f"{plan},precision={precision}".removeprefix("single,")
        )
        for precision in ("fp32", "bf16")
    }
    for wide, narrow in zip(losses["fp32"], losses["bf16"], strict=True):
        assert narrow == pytest.approx(wide, rel=0.1)


def _layer(affine: bool, running: bool) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(CHANNELS, eps=1e-3, momentum=0.3, affine=affine, track_running_stats=running).double()
    with torch.no_grad():
        for tensor in layer.parameters():
            tensor.normal_()
    return layer


@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.parametrize("running", (True, False))
@pytest.mark.parametrize("shape", [(4, CHANNELS), (4, CHANNELS, 5), (2, CHANNELS, 4, 5), (1, CHANNELS, 2, 3, 2)])
def test_on_one_rank_it_is_torchs(shape: tuple[int, ...], running: bool, affine: bool) -> None:
    torch.manual_seed(0)
    x, towards = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    found = []
    for own in (True, False):
        torch.manual_seed(1)
        layer, given = _layer(affine, running), x.clone().requires_grad_()
        words = (given, layer.running_mean, layer.running_var, layer.weight, layer.bias)
        if own:
            y = synced_batch_norm(*words, layer.momentum, layer.eps, Axis.alone("dp"), Phase())
        else:
            y = functional.batch_norm(*words, True, layer.momentum, layer.eps)
        (y * towards).sum().backward()
        gradients = [given.grad, *(parameter.grad for parameter in layer.parameters())]
        found.append([y.detach(), *gradients, *(b for b in (layer.running_mean, layer.running_var) if b is not None)])
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)


def test_a_stand_in_adds_nothing() -> None:
    mean, var = torch.zeros(CHANNELS), torch.ones(CHANNELS)
    with pytest.raises(ValueError, match="more than one value per channel"):
        synced_batch_norm(
            torch.randn(4, CHANNELS), mean, var, None, None, 0.1, 1e-5, Axis.alone("dp"), Phase(samples=0)
        )
    assert mean.equal(torch.zeros(CHANNELS)) and var.equal(torch.ones(CHANNELS))


def test_batch_norms_over_groups_of_samples_are_told() -> None:
    one, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

    def problem(*runs: list[int]) -> tuple[list[str], list[nn.Module]]:
        return norms_differ(*[[(one, rows) for rows in run] + [(other, sum(run))] for run in runs])

    assert problem([5], [2], [3]) == problem([], [], []) == ([], [])
    told, norms = problem([3, 2], [2], [3])
    assert "get 3, 2, 5 values of a channel on some samples, and 2, 2 and 3, 3" in told[0] and norms == [one]
    assert problem([4, 4], [2, 4], [3, 4])[0]
