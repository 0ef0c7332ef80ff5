"""Losses that take a fixed number of samples, or go by where samples stand, where a rank has just as many of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples
from torch import nn
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool

K, FIRST = 4, torch.arange(4)
Model = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Settings:
    k: int = 4


def errors(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square()


def each(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return errors(model, x, y).mean(1)


def taken(rows: torch.Tensor, n: int) -> torch.Tensor:
    return rows[:n]


def looped(model: Model, x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
    found = errors(model, x, y)
    return torch.stack([found[i].mean() for i in range(n)]).mean()


def at_most(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    n = min(len(x), 6)
    return errors(model, x, y)[:n].mean()


def by_rows(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return sum((one - other).square().mean() for one, other in zip(model(x), y, strict=True)) / len(x)  # type: ignore


def left(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Those of samples that some value leaves out."""
    found = [one for one, target in zip(each(model, x, y), y, strict=True) if target[0] < 0.5]
    return torch.stack([*found, each(model, x, y).sum() * 0]).sum() / len(x)


def broken_off(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for at, one in enumerate(each(model, x, y)):
        if at >= Settings().k:
            break
        total = total + one
    return total / 4


def of_two_views(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    n = len(x)
    out = model(torch.cat([x, x + 0.1]))
    return (out[:n] - out[n:]).square().mean() + (out[:n] - y).square().mean()


def of_classes(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    n, out = x.shape[0], model(x)
    return (out[torch.arange(n), (y[:, 0] > 0).long()] - torch.ones(n, dtype=x.dtype)).square().mean()


def of_groups(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rewards beside the mean of their two."""
    pairs = each(model, x, y).view(-1, 2)
    return ((pairs - pairs.mean(1, keepdim=True)).square() + pairs).mean()


def in_heads(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As many heads as a rank has samples."""
    n = x.size(0)
    return (model(x).view(n, 2, 1).expand(n, 2, 4).reshape(n, 4, 2).sum(1) - y).square().mean()


def mirrored(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    n = len(x)
    t = torch.randint(0, 10, (n // 2 + 1,))
    t = torch.cat([t, 9 - t])[:n]
    return errors(model, x * t[:, None] / 10, y).mean()


TABLE = torch.arange(300, dtype=torch.float64) / 300


def of_a_table(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rows of a table that is as long as it is, as many as all ranks have samples."""
    rows = TABLE[torch.randint(len(TABLE) - 3, (8,))]
    return errors(model, x, y).mean() + rows.mean() * model[0].weight.square().sum()  # type: ignore[index]


EQUAL: dict[str, Any] = {
    "of a table": of_a_table,
    "counted": lambda model, x, y: taken(errors(model, x, y), len(x)).mean(),
    "views": of_two_views,
    "classes": of_classes,
    "pairs in a row": of_groups,
    "heads": in_heads,
    "never": lambda model, x, y: each(model, x, y).masked_fill(each(model, x, y) < -1, float("-inf")).mean(),
    "all by size": lambda model, x, y: each(model, x, y).topk(len(x))[0].mean(),
    "divided by a constant": lambda model, x, y: errors(model, x, y).sum() / (2 * 8) / 37,
    "looped": lambda model, x, y: looped(model, x, y, len(x)),
    "at least one": lambda model, x, y: errors(model, x, y).mean(1).sum() / max(1, len(x)),
    "row by row": by_rows,
    "left out by a value": left,
}
REFUSED: dict[str, Any] = {
    "first": lambda model, x, y: errors(model, x, y)[:4].mean(),
    "named": lambda model, x, y: errors(model, x, y)[: len(x)][:K].mean(),
    "of six": lambda model, x, y: errors(model, x, y)[:6].mean(),
    "at most": at_most,
    "at most, in the call": lambda model, x, y: errors(model, x, y)[: min(6, x.shape[0])].mean(),
    "at most, by a condition": lambda model, x, y: errors(model, x, y)[: 6 if len(x) > 6 else len(x)].mean(),
    "divided by at most": lambda model, x, y: errors(model, x, y).mean(1).sum() / min(len(x), 6),
    "last": lambda model, x, y: errors(model, x, y)[-1].mean(),
    "indexed": lambda model, x, y: errors(model, x, y)[FIRST].mean(),
    "narrowed": lambda model, x, y: errors(model, x, y).narrow(0, 0, 4).mean(),
    "largest": lambda model, x, y: each(model, x, y).topk(4)[0].mean(),
    "half": lambda model, x, y: errors(model, x, y).chunk(2)[0].mean(),
    "running": lambda model, x, y: each(model, x, y).cumsum(0).mean(),
    "by place": lambda model, x, y: (torch.arange(len(x)).double() * each(model, x, y)).mean(),
    "given": lambda model, x, y: (model(x[:4]) - y[:4]).square().mean(),
    "given half": lambda model, x, y: errors(model, x[: len(x) // 2], y[: len(x) // 2]).mean(),
}
LOOPED: dict[str, Any] = {
    "broken off": broken_off,
    "unbound": lambda model, x, y: torch.stack(errors(model, x, y).unbind()[: Settings().k]).mean(),
    "split": lambda model, x, y: errors(model, x, y).split(4)[0].mean(),
    "by number": lambda model, x, y: torch.stack([each(model, x, y)[at] for at in range(Settings().k)]).mean(),
}
COUNTS = (
    lambda model, x, y: errors(model, x, y).mean() * len(x),
    lambda model, x, y: (model(x) / len(x)).softmax(1).log().square().mean(),
)


def trained(plan: str | None, kind: str, weighed: bool = False) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Losses, weights, and the error that ended it, of which each step before counts."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(24), batch_size=8)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses: list[float] = []
    try:
        for x, y in loader:
            n = len(x)
            if kind == "assumed":
                loss = errors(model, x, y)[: Settings().k].mean()
            elif kind == "mirrored":
                loss = mirrored(model, x, y)
            else:
                loss = (COUNTS[int(kind)] if kind.isdigit() else (EQUAL | REFUSED | LOOPED)[kind])(model, x, y)
            optimizer.zero_grad()
            if prepared is None:
                loss.backward()
            else:
                loss = prepared.backward(loss * n, n) if weighed else prepared.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    except (RefusedPlan, InputError) as error:
        return losses, {}, str(error)
    return losses, model.state_dict(), ""


def check_equal(pool: RankPool, plan: str, kind: str, weighed: bool) -> None:
    losses, weights, _ = trained(None, kind)
    for theirs, held, error in pool.run(trained, shardwise.Plan.parse(plan).world_size, plan, kind, weighed):
        assert not error
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


LONG = pytest.mark.long
WEIGHED = ("looped", "row by row", "left out by a value")  # whose mean is not seen


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=() if one in ("views", "of a table") else LONG) for one in EQUAL]
)
def test_numbers_of_samples_are_one_process_s(kind: str, pool: RankPool) -> None:
    check_equal(pool, "dp_replicate=2", kind, kind in WEIGHED)


QUICK = ("first", "given half")


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one in QUICK else LONG) for one in REFUSED])
def test_a_fixed_number_of_samples_is_refused_before_the_first_update(kind: str, pool: RankPool) -> None:
    for losses, _, error in pool.run(trained, 2, "dp_shard=2,zero=1", kind, True):
        assert not losses
        assert "how many samples there are" in error or "changes with the other samples" in error
        assert "test_prepare_by_number.py, line" in error


@pytest.mark.long
def test_a_number_of_unknown_making_is_tried_on_other_parts(pool: RankPool) -> None:
    for losses, _, error in pool.run(trained, 2, "dp_replicate=2", "assumed"):
        assert len(losses) == 1
        assert "how many samples there are" in error


@pytest.mark.parametrize("kind", ["0", pytest.param("1", marks=LONG), pytest.param("mirrored", marks=LONG)])
def test_a_count_that_the_text_shows_is_refused_before_the_first_update(kind: str, pool: RankPool) -> None:
    for losses, _, error in pool.run(trained, 2, "dp_replicate=2", kind):
        assert not losses
        assert "weight" in error or "by the number of samples" in error or "how many samples there are" in error


def first_refused(plan: str, kind: str) -> None:
    losses, _, error = trained(plan, kind, True)
    if error:
        raise RefusedPlan(f"{len(losses)} steps: {error}")


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one == "unbound" else LONG) for one in LOOPED])
def test_some_of_the_samples_that_a_script_goes_over_are_refused(kind: str, pool: RankPool) -> None:
    with pytest.raises(
        RefusedPlan, match=r"[01] steps: .*(how many samples|other samples|a part of .* samples|fails on)"
    ):
        pool.run(first_refused, 2, "dp_replicate=2", kind)
