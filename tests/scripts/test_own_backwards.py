"""Backwards of the model's own: what mixes samples is refused; what computes again or reads weights is equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_scripts import batches, begin, check_equal, check_refused, equals_one_process, made, mse, stepped, weights_of
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


# --- backwards that compute the forward again, or read weights: under zero=3 of units that do not run then


class Again(torch.autograd.Function):
    """A checkpoint of one's own; with parameters, it gives their gradients by itself."""

    @staticmethod
    def forward(ctx: Any, run: Callable, x: torch.Tensor, *params: torch.Tensor):
        ctx.run, ctx.x, ctx.params = run, x, params
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        if ctx.params and ctx.params[0].dim():
            return None, *torch.autograd.grad(y, (x, *ctx.params), gradient)
        torch.autograd.backward(y, gradient)
        return None, x.grad, None


class Formula(torch.autograd.Function):
    """A linear layer by its formulas."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Linear, x: torch.Tensor, weight: torch.Tensor):
        ctx.layer, ctx.x = layer, x
        return x @ layer.weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return None, gradient @ ctx.layer.weight, gradient.T @ ctx.x


class Adjoint(torch.autograd.Function):
    """Steps of a solver, and their gradients by steps back, with all weights' in one row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row: torch.Tensor, field: nn.Module):
        with torch.no_grad():
            for _ in range(3):
                x = x + field(x) / 3
        ctx.field, ctx.x, ctx.row = field, x, row
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        x, of_weights = ctx.x, torch.zeros_like(ctx.row)
        for _ in range(3):
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                out = ctx.field(at)
                of_x, *others = torch.autograd.grad(out, (at, *ctx.field.parameters()), gradient)
            x, gradient = x - out.detach() / 3, gradient + of_x / 3
            of_weights = of_weights + torch.cat([other.flatten() for other in others]) / 3
        return gradient, of_weights, None


class Recomputed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.begin, self.end, self.kind = nn.Linear(6, 8), nn.Linear(8, 2), kind
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, token = self.begin(x), torch.ones((), dtype=x.dtype, requires_grad=True)
        for block in self.blocks:
            if self.kind == "parameters":
                x = x + Again.apply(block, x, *block.parameters())
            elif self.kind == "another's weight":
                x = x + Again.apply(lambda x, block=block: block(x) * self.end.weight.mean(), x, token)
            elif self.kind == "weights alone":
                x = x + Again.apply(lambda x, block=block: (x @ block[0].weight).tanh(), x, token)
            elif self.kind == "formula":
                x = x + Formula.apply(block[0], x, block[0].weight)
            else:
                x = Adjoint.apply(x, torch.cat([p.flatten() for p in block.parameters()]), block)
        return self.end(x)


def recomputed(plan: str | None, kind: str) -> tuple:
    prepared, model, optimizer, loader = begin(plan, made(lambda: Recomputed(kind)), batches(24, 8))
    losses = [stepped(prepared, optimizer, mse(model, x, y)) for x, y in loader]
    return losses, weights_of(model)


KINDS = ["parameters", "another's weight", "weights alone", "formula", "adjoint"]
EQUAL = [(recomputed, "dp_shard=2,zero=3", kind) for kind in KINDS]
MORE_EQUAL = [(recomputed, plan, kind) for plan in ("dp_shard=2,zero=1", "dp_shard=3,zero=3", "tp=2") for kind in KINDS]
test_a_script_equals_one_process = equals_one_process(EQUAL, MORE_EQUAL)
