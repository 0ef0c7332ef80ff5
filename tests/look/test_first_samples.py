"""How sums of a loss are compared at the look before the first step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwise import Task, verify
from shardwise.look.first_samples import added_up, against
from shardwise.ranks import RankPool
from shardwise.step.loss import Loss


def test_sums_under_autocast_are_compared_as_its_dtype_rounds() -> None:
    """Terms that cancel leave the rounding of all of them; without autocast float32 has to add up."""

    class Cancelling(Loss):
        terms = 10.0

    whole = Cancelling(torch.tensor(0.4), 5.0)
    assert not added_up("sum", whole, 0.43, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert added_up("sum", whole, 0.43, torch.float32) and not added_up("sum", whole, 1.4, torch.float32)
        assert not added_up("weight", whole, 5.4, torch.float32) and not added_up("sum", whole, 0.43, torch.float64)
    assert not added_up("sum", Loss(torch.tensor(0.4), 5.0), 0.43, torch.bfloat16)


def test_sums_that_differ_are_told_with_as_many_digits_as_show_it() -> None:
    assert against(76.8341, 56.9418) == "76.8341 against 56.9418"
    assert against(225.92213, 225.92205) == "225.92213 against 225.92205"
    assert against(1.0, 1.0 + 2**-52) == "1 against 1.0000000000000002"


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int | None) -> Tensor:
        ctx.dim = dim
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        size = gradient.norm() if ctx.dim is None else gradient.norm(dim=ctx.dim, keepdim=True)
        return gradient / (size + 1e-2), None


class OwnBackward(nn.Module):
    """Words to numbers, with a backward of its own between: over the batch (dim None), or over each sample."""

    def __init__(self, kind: str, dim: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6, scale_grad_by_freq=kind == "frequency")
        self.head = nn.Linear(6, 3)
        self.kind, self.dim = kind, dim
        if kind == "around":
            self.head.register_full_backward_hook(lambda head, given, taken: Normed.backward(self, given[0])[:1])

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        if self.kind == "function":
            x = Normed.apply(x, self.dim)
        if self.kind == "hook" and x.requires_grad:
            x.register_hook(lambda gradient: Normed.backward(self, gradient)[0])
        return self.head(x)


def own_backward(kind: str, dim: int | None = None, scope: str = "sample") -> Task:
    def words(step: int) -> Tensor:
        return torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(step))

    model = partial(OwnBackward, kind, dim)
    task = Task(model=model, batch=words, loss=lambda output, batch: (output.square().sum(), len(output)))
    return replace(task, loss_scope=scope)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("function", "the backward of 'Normed'"),
        ("hook", "a hook on a gradient that 'OwnBackward.forward' sets"),
        ("around", "a backward hook on 'head'"),
        ("frequency", "scale_grad_by_freq of 'table'"),
    ],
)
def test_a_backward_that_mixes_samples(kind: str, told: str, pool: RankPool) -> None:
    """Its loss adds up over samples and its gradients do not: refused, and equal where every rank has all samples."""
    refused = verify(partial(own_backward, kind), "dp_replicate=2", pool=pool).refused
    assert refused is not None and told in refused and "gives other gradients" in refused
    assert verify(partial(own_backward, kind, scope="model"), "dp_shard=2,zero=2", pool=pool).parity


@pytest.mark.parametrize("kind", ["function", "hook", "around"])
def test_a_backward_of_each_sample_by_itself(kind: str, pool: RankPool) -> None:
    assert verify(partial(own_backward, kind, -1), "dp_replicate=2", pool=pool).parity
