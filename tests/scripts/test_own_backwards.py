"""A backward of the model's own that mixes samples is refused at the first batch; one of each sample is equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_scripts import batches, begin, check_equal, check_refused, made, mse, stepped, weights_of
from torch import nn

from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        ctx.dim = dim
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        size = gradient.norm() if ctx.dim is None else gradient.norm(dim=ctx.dim, keepdim=True)
        return gradient / (size + 1e-2), None


class OwnBackward(nn.Module):
    """With a backward of its own before the head: over the batch (dim None), or over each sample."""

    def __init__(self, kind: str, dim: int | None) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 2)
        self.kind, self.dim = kind, dim
        if kind == "around":
            self.head.register_full_backward_hook(lambda head, given, taken: Normed.backward(self, given[0])[:1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.kind == "function":
            x = Normed.apply(x, self.dim)
        if self.kind == "hook" and x.requires_grad:
            x.register_hook(lambda gradient: Normed.backward(self, gradient)[0])
        return self.head(x)


def own_backward(plan: str | None, kind: str, dim: int | None, scope: str = "sample") -> tuple:
    model = made(lambda: OwnBackward(kind, dim))
    prepared, model, optimizer, loader = begin(plan, model, batches(16, 8), loss_scope=scope)
    losses = [stepped(prepared, optimizer, mse(model, x, y)) for x, y in loader]
    return losses, weights_of(model)


@pytest.mark.parametrize(
    ("kind", "plan", "told"),
    [
        ("function", "dp_replicate=2", "the backward of 'Normed'"),
        ("function", "dp_shard=2,zero=3", "the backward of 'Normed'"),
        ("hook", "dp_replicate=2", "a hook on a gradient that 'OwnBackward.forward' sets"),
        ("around", "dp_shard=2,zero=1", "a backward hook on 'head'"),
    ],
)
def test_a_backward_that_mixes_samples_is_refused(kind: str, plan: str, told: str, pool: RankPool) -> None:
    words = f"{told}.*gives other gradients.*loss_scope=.model"
    check_refused(pool, own_backward, plan, kind, None, RefusedPlan, words)


@pytest.mark.parametrize(
    ("kind", "dim", "plan", "scope"),
    [
        ("function", -1, "dp_shard=2,zero=3", "sample"),
        ("hook", -1, "dp_replicate=2", "sample"),
        ("function", None, "dp_replicate=2", "model"),
    ],
)
def test_a_backward_of_each_sample_is_equal(kind: str, dim: Any, plan: str, scope: str, pool: RankPool) -> None:
    check_equal(pool, own_backward, plan, kind, dim, scope)
