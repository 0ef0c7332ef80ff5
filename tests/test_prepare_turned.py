"""`prepare` where samples lie behind time: in what a model gives, in what it is given, and in modules inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.ranks import RankPool
from shardwise.scripts.divisor import Held, divisor_of

WORDS = 5


class Reader(nn.Module):
    """(samples, time, 3), or (time, samples, 3) where it is `turned`, to (time, samples, words)."""

    def __init__(self, turned: bool = False, mixes: bool = False, drops: float = 0.0, own: Any = None) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, WORDS)
        self.turned, self.mixes, self.drops, self.own = turned, mixes, drops, own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.turned else x.transpose(0, 1)
        x = x - x.mean(1, keepdim=True) if self.mixes else x
        out = self.head(F.dropout(self.rnn(x)[0], self.drops, self.training))
        return self.own(out, None) if self.own else out


def ctc(out: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    lengths = [torch.full((out.shape[1],), n) for n in (len(out), words.shape[1])]
    return F.ctc_loss(out.log_softmax(2), words, *lengths)


def of_words(out: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out[-1], words[:, 0])


def contrasted(out: torch.Tensor, words: Any) -> torch.Tensor:
    return (out.logsumexp(1) - out.mean(1)).mean()  # at each time, over samples


def by_time(out: torch.Tensor, words: Any) -> torch.Tensor:
    return out.square().mean()


def summed_means(out: torch.Tensor, words: Any) -> torch.Tensor:
    return out.square().mean(1).sum()


def over_times(out: torch.Tensor, words: Any) -> torch.Tensor:
    return out.square().sum() / len(out)


def script(plan: str | None, steps: int, loss: Callable, weighs: bool, **how: Any) -> tuple[list[float], dict]:
    torch.manual_seed(0)
    model: Any = Reader(**how).double()
    optimizer: Any = adamw(model)
    data = TensorDataset(torch.randn(11, steps, 3).double(), torch.randint(1, WORDS, (11, 1)))
    loader: Any = DataLoader(data, batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    losses = []
    for x, words in loader:
        out = model(x.transpose(0, 1) if how.get("turned") else x)
        found = out if how.get("own") else loss(out, words)
        if prepared:
            found = prepared.backward(found, mean_over=len(x)) if weighs else prepared.backward(found)
        else:
            found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
        assert len(losses) > 2 or not any("not checked" in one for one in (prepared._told._said if prepared else []))
    return losses, prepared.state_dict() if prepared else model.state_dict()


def on_ranks(plan: str | None, steps: int, loss: Callable, weighs: bool, how: dict) -> tuple[list[float], dict]:
    return script(plan, steps, loss, weighs, **how)


@pytest.mark.parametrize(
    ("plan", "steps", "loss", "how"),
    [
        ("dp_replicate=2", 4, ctc, {}),  # twice as many steps as a rank has samples
        ("dp_shard=2,zero=3", 2, ctc, {}),  # as many
        ("dp_replicate=2", 2, of_words, {"turned": True}),
        ("dp_shard=2,zero=2", 5, of_words, {"turned": True, "drops": 0.3}),
        ("dp_replicate=2", 2, of_words, {"drops": 0.3}),  # as many steps as a rank has samples, by the look at fewer
        ("dp_replicate=2", 4, None, {"own": by_time}),
    ],
)
def test_samples_behind_time_are_found(plan: str, steps: int, loss: Any, how: dict, pool: RankPool) -> None:
    ((losses, weights),) = pool.run(on_ranks, 1, None, steps, loss, True, how)
    for theirs, held in pool.run(on_ranks, 2, plan, steps, loss, True, how):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


@pytest.mark.parametrize(
    ("steps", "loss", "weighs", "how", "error", "told"),
    [
        (4, contrasted, True, {}, RefusedPlan, "no sum or mean over samples"),
        (4, None, True, {"own": contrasted}, RefusedPlan, "no sum or mean over samples"),  # the model's own
        (4, by_time, True, {"mixes": True}, RefusedPlan, "does not add up over samples"),
        (5, by_time, True, {"mixes": True}, RefusedPlan, "does not add up over samples"),
        (4, summed_means, False, {}, InputError, "cannot be seen"),
        (4, over_times, False, {}, InputError, "cannot be seen"),
    ],
)
def test_time_is_not_taken_for_samples(
    steps: int, loss: Any, weighs: bool, how: dict, error: type[ShardwiseError], told: str, pool: RankPool
) -> None:
    with pytest.raises(error, match=told):
        pool.run(on_ranks, 2, "dp_replicate=2", steps, loss, weighs, how)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda x: x.pow(2).sum(), "sum"),
        (lambda x: x.pow(2).sum() / 4, "mean"),  # samples
        (lambda x: x.pow(2).sum() / 12, "mean"),  # samples and times
        (lambda x: x.pow(2).sum() / 3, "unknown"),  # times
        (lambda x: x.pow(2).mean(1).sum(), "unknown"),
        (lambda x: x.pow(2).mean(-2).sum(), "unknown"),
        (lambda x: x.pow(2).mean(2).sum(), "sum"),
    ],
)
def test_of_samples_behind_time_a_sum_and_a_mean_are_told_apart(make: Callable, kind: str) -> None:
    x = torch.randn(3, 4, 5, requires_grad=True)
    assert divisor_of(make(x * 1.0), Held(4, others=frozenset([1]))).kind == kind
