"""What scripts do that would differ from one process without a word: each equals it, or is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, net, samples
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool

# --- the optimizer's state


def resumed(plan: str | None, when: str) -> tuple[list[float], dict, int]:
    """Goes on from the optimizer state of a run that was left after two steps; part of the model is frozen."""
    model = net()
    model.layers[0].requires_grad_(False)
    first, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    for x, y in loader:
        first.zero_grad()
        (model(x) - y).square().mean().backward()
        first.step()
    saved = copy.deepcopy(first.state_dict())
    optimizer: Any = adamw(model)
    if when == "before" or plan is None:
        optimizer.load_state_dict(saved)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
        if when == "after":
            optimizer.load_state_dict(saved)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        if prepared:
            loss = prepared.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = optimizer.state_dict()["state"] if when != "saved" or plan is None else optimizer.state_dict()
    return losses, prepared.state_dict() if prepared else model.state_dict(), len(state)


@pytest.mark.parametrize("when", ["before", "after"])
def test_state_goes_on_where_every_rank_has_all_of_it(when: str, pool: RankPool) -> None:
    losses, weights, size = resumed(None, when)
    for theirs, held, theirs_size in pool.run(resumed, 2, "dp_replicate=2", when):
        assert theirs == pytest.approx(losses, rel=BAR) and theirs_size == size
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


@pytest.mark.parametrize("plan", ["tp=2", "dp_shard=2,zero=1", "dp_shard=2,zero=3"])
@pytest.mark.parametrize(
    ("when", "kind", "words"),
    [
        ("before", InputError, "has done steps already .*use dp_replicate"),
        ("after", RefusedPlan, r"optimizer.load_state_dict\(\): under plan .* pieces.*dp_replicate"),
        ("saved", RefusedPlan, r"optimizer.state_dict\(\): under plan .*prepared.state_dict\(\)"),
    ],
)
def test_state_of_pieces_is_refused(plan: str, when: str, kind: Any, words: str, pool: RankPool) -> None:
    with pytest.raises(kind, match=words):
        pool.run(resumed, 2, plan, when)


def test_no_group_is_added_later() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    shardwise.prepare(model, optimizer, [])
    with pytest.raises(InputError, match="add every group before prepare"):
        optimizer.add_param_group({"params": model.head.parameters()})


# --- what is said


def test_notices_are_printed_once_by_rank_0(capsys: pytest.CaptureFixture) -> None:
    from shardwise.scripts.saying import Notices

    for rank in (0, 1):
        told = Notices(rank)
        told.say(["one", "two"])
        told.say(["two", "three"])
    assert capsys.readouterr().err == "shardwise: one\nshardwise: two\nshardwise: three\n"


def test_errors_name_the_line() -> None:
    model = net()
    prepared = shardwise.prepare(model, adamw(model), [])
    with pytest.raises(InputError, match=r"\[test_prepare_silent.py, line \d+: prepared.clip_grad_norm_\(1.0\)\]"):
        prepared.clip_grad_norm_(1.0)
