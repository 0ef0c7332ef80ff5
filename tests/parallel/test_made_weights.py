"""Weights that a forward makes of its parameters (masked, rounded, normed, drawn) are cut by tp as parameters are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_tasks import images, sequences, squares, task
from torch import Tensor, nn

from shardwise import Plan, Task, verify
from shardwise.engine.tensor_cuts import derive_cuts
from shardwise.look.samples import a_few
from shardwise.precision import Precision
from shardwise.ranks import RankPool
from shardwise.trace.deferred import build


class Made(nn.Linear):
    """A layer whose weight is made in every forward."""

    def __init__(self, kind: str, inner: int, outer: int) -> None:
        super().__init__(inner, outer)
        self.kind = kind
        self.rows, self.columns = nn.Parameter(torch.rand(outer) + 0.5), nn.Parameter(torch.rand(inner) + 0.5)
        self.register_buffer("mask", torch.rand(outer, inner) > 0.3)

    def made(self) -> Tensor:
        w = self.weight
        if self.kind == "masked":
            return w * self.mask * self.rows[:, None] * self.columns
        if self.kind == "rounded":  # with a scale for each row, and a gradient straight through
            scale = w.detach().abs().amax(1, keepdim=True) / 7
            return w + ((w / scale).round().clamp(-8, 7) * scale - w).detach()
        if self.kind == "rounded by one scale":
            scale = w.abs().max() / 7
            return w + ((w / scale).round() * scale - w).detach() + w * scale
        if self.kind == "normed":
            return self.rows[:, None] * w / w.norm(dim=1, keepdim=True)
        return w + F.softplus(self.columns - 3) * torch.randn_like(w)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.made(), self.bias)


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        variance = self.weight.var((1, 2, 3), keepdim=True, unbiased=False)
        return self._conv_forward(x, (self.weight - mean) / (variance + 1e-5).sqrt(), self.bias)


def linear(kind: str) -> nn.Module:
    return nn.Sequential(Made(kind, 6, 11), nn.Tanh(), Made(kind, 11, 7), nn.Tanh(), Made(kind, 7, 3))


def gated() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 14), nn.GLU(), nn.Linear(7, 10), nn.GLU(), nn.Linear(5, 3))


def convolved() -> nn.Module:
    return nn.Sequential(Standardised(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), Standardised(8, 12, 3),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))  # fmt: skip


def pooled(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return squares(output.mean(1), batch)


def made(kind: str) -> Task:
    if kind == "standardised":
        return task(convolved, images)
    return task(gated if kind == "gated" else partial(linear, kind), sequences, loss=pooled)


KINDS = ["masked", "rounded", "rounded by one scale", "normed", "drawn", "gated", "standardised"]


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_cut_and_equal(kind: str, pool: RankPool) -> None:
    plan = "tp=3" if kind in ("masked", "gated", "standardised") else "tp=2"
    whole, taken = made(kind), Plan.parse(f"{plan},precision=fp64")
    built = build(whole.model, 0)
    derived = derive_cuts(whole, taken, Precision.of(taken), built, a_few(whole.batch(0)))
    matrices = [name for name, param in built.module.named_parameters() if param.dim() > 1]
    assert [name for name in matrices if name not in derived.cuts] == [], derived.whole
    parity = verify(partial(made, kind), plan, pool=pool, timeout_s=240)
    assert parity.parity, parity.text()
