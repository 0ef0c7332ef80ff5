"""How sums of a loss are compared at the look before the first step."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwise import Task, parallelize, verify
from shardwise.errors import InputError, RunError
from shardwise.look.added_up import added_up, against
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


class Dice(nn.Module):
    """Cells to classes; a loss over all of a batch's cells, and metrics of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = torch.relu(self.inside(x))
        return [self.out(h), self.out(torch.nn.functional.avg_pool2d(h, 2))]


def _dice(output: list[Tensor], batch: Tensor) -> tuple[Tensor, int]:
    chances, is_there = output[0].softmax(1)[:, 1], (batch[:, 0] > 0).to(output[0].dtype)
    overlap = 2 * (chances * is_there).sum() / (chances.sum() + is_there.sum())
    return 1 - overlap + output[1].square().mean(), 1


def _overlap(output: list[Tensor], batch: Tensor) -> dict:
    chosen, is_there = output[0].argmax(1), batch[:, 0] > 0
    return {"overlap": (2 * (chosen * is_there).sum(), chosen.sum() + is_there.sum())}


def dice(mean: bool = False) -> Task:
    def fields(step: int) -> Tensor:
        return torch.randn(5, 1, 8, 6, generator=torch.Generator().manual_seed(step))

    def means(output: list[Tensor], batch: Tensor) -> dict:
        return {"positive": (output[0].sigmoid().mean(), 1)}

    return Task(model=Dice, batch=fields, loss=_dice, metrics=means if mean else _overlap, loss_scope="global")


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", "domain=2,dp_replicate=2", "domain=2,dp_shard=2,zero=2"])
def test_a_loss_of_the_whole_batch_with_metrics(plan: str, pool: RankPool) -> None:
    """Outputs that are tiles are gathered over data ranks as tiles; metrics add up over ranks' own samples."""
    parity = verify(dice, plan, pool=pool)
    assert parity.parity, parity.text()


def test_a_metric_that_does_not_add_up_is_named_as_one(pool: RankPool) -> None:
    refused = verify(partial(dice, mean=True), "dp_replicate=2", pool=pool).refused
    assert refused is not None and "the metric 'positive' of Task.metrics does not add up" in refused


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


OF_CLASSES = torch.tensor([0.3, 1.1, 4.7])  # float32, and kept by nobody


def weighted() -> Task:
    def samples(step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(step)
        return torch.randn(13, 4, generator=g), torch.randint(3, (13,), generator=g)

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        weight = OF_CLASSES.to(output.dtype)
        return nn.functional.cross_entropy(output, batch[1], weight, reduction="sum"), OF_CLASSES[batch[1]].sum()

    return Task(model=Weighted, batch=samples, loss=loss, inputs=lambda batch: ((batch[0],), {}))


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3,precision=fp64,accumulate=3"])
def test_weights_of_classes_in_float32(plan: str, pool: RankPool) -> None:
    """A float64 proof adds them up in float64."""
    parity = verify(weighted, plan, pool=pool)
    assert parity.parity, parity.text()


def _stepped() -> float:
    return parallelize(weighted(), "dp_replicate=2,precision=fp64").step(weighted().batch(0)).loss


def test_a_float32_sum_rounds_in_a_float64_run(pool: RankPool) -> None:
    assert all(map(math.isfinite, pool.run(_stepped, 2)))


class Dropped(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.5, self.training) / 0


def not_a_number() -> Task:
    return replace(weighted(), model=Dropped)


def test_a_loss_that_is_no_number_is_told_as_that(pool: RankPool) -> None:
    """Not as masks that are dealt wrongly, which nothing that is not finite can show."""
    with pytest.raises(InputError, match=r"in one process too: loss .* is not finite in step 1"):
        verify(not_a_number, "dp_replicate=2", pool=pool)


class Alone(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / (0 if torch.distributed.is_initialized() else 1)


def no_number_on_ranks() -> Task:
    return replace(weighted(), model=Alone)


def test_a_loss_that_is_no_number_on_ranks_alone_does_not_blame_the_task(pool: RankPool) -> None:
    with pytest.raises(RunError, match=r"on the ranks alone: .* In one process it is finite"):
        verify(no_number_on_ranks, "dp_replicate=2", pool=pool)
