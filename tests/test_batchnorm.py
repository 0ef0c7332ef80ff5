"""Batch norm joined over ranks, on one rank: torch's own. Over several ranks it is proven with the plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise.comm import Axis
from shardwise.parallel.batchnorm import synced_batch_norm
from shardwise.parallel.slots import Phase

CHANNELS = 3


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
            torch.randn(4, CHANNELS), mean, var, None, None, 0.1, 1e-5, Axis.alone("dp"), Phase(stand_in=True)
        )
    assert mean.equal(torch.zeros(CHANNELS)) and var.equal(torch.ones(CHANNELS))
