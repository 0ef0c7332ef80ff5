"""Losses of neighbouring samples, two by two: equal to one process, or refused where a batch is dealt within a pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import net, samples
from test_prepare_kept import compare
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool


def run(plan: str | None, count: int, of: int) -> tuple[list[float], dict]:
    """Batches of a few groups of `of` rows, and a smaller last one; a sum with its weight."""
    torch.manual_seed(0)
    model: Any = net()
    optimizer, loader = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(samples(count), batch_size=4 * max(of, 2)),
    )
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for x, _ in loader:
        out = model(x)
        groups = out[: len(out) // of * of].unflatten(0, (-1, of))
        loss = (groups - groups.roll(1, 1)).square().sum()
        optimizer.zero_grad()
        if prepared:
            loss = prepared.backward(loss, len(groups))
        else:
            loss = loss / len(groups)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.long
@pytest.mark.parametrize(("count", "of"), [(20, 2), (18, 1)])
def test_groups_within_a_rank_s_part_are_right(count: int, of: int, pool: RankPool) -> None:
    compare(pool.run(run, 2, "dp_replicate=2", count, of), run(None, count, of))


@pytest.mark.parametrize(("count", "of"), [(22, 2), pytest.param(36, 4, marks=pytest.mark.long)])
def test_a_batch_that_is_dealt_within_a_group_is_refused(count: int, of: int, pool: RankPool) -> None:
    words = rf"this rank's begin after .* groups of {of} neighbours.*drop_last=True.*line \d+"
    with pytest.raises(RefusedPlan, match=words):
        pool.run(run, 2, "dp_replicate=2", count, of)
