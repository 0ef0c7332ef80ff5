"""Numbers in a script's loss that may count a rank's samples or be constants, and terms that are nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples
from torch import nn
from torch.nn.functional import kl_div, log_softmax, softmax
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError
from shardwise.ranks import RankPool


def loss_of(kind: str, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of four samples to a rank, and of five and three once: a temperature is 4, and what counts them is not."""
    t = float(len(out)) if kind == "counted" else 4.0
    apart = kl_div(log_softmax(out / t, 1), softmax(y / t, 1), reduction="batchmean") * t * t
    entropy = -(out.softmax(1) * out.log_softmax(1)).sum(1).mean(0)
    return apart + 0.1 * entropy + 0.0 * out[0].sum()


def trained(plan: str | None, kind: str) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(32), batch_size=8)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses, counts = [], []
    for x, y in loader:
        loss = loss_of(kind, model(x), y)
        optimizer.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        counts.append(len(x))
    return losses, model.state_dict(), counts


@pytest.mark.parametrize("plan", ["dp_replicate=2", pytest.param("dp_shard=3,zero=2", marks=pytest.mark.long)])
def test_a_temperature_is_no_count(plan: str, pool: RankPool) -> None:
    losses, weights, _ = trained(None, "constant")
    runs = pool.run(trained, shardwise.Plan.parse(plan).world_size, plan, "constant")
    for theirs, held, _ in runs:
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())
    if plan == "dp_replicate=2":  # found out on the second batch, and not asked again
        assert [counts for _, _, counts in runs] == [[4, 5, 4, 4], [4, 3, 4, 4]]


def test_a_count_where_no_mean_goes_through_is_found_on_the_second_batch(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"prepared.backward\(loss\) without a weight.*test_prepare_numbers.py, line"):
        pool.run(trained, 2, "dp_replicate=2", "counted")
