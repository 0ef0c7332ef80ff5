"""A profile of a script's steps: its parts add up, the wait for a batch is one of them, and nothing else changes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import InputError
from shardwise.observe.profile_steps import read_steps_of_script
from shardwise.ranks import RankPool
from shardwise.ranks.script import PROFILE_STEPS


def trained(plan: str, folder: str, steps: str | None) -> float:
    """The last loss of five steps of a script, run in `folder`, of which some may be profiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(TensorDataset(torch.randn(40, 6), torch.randn(40, 3)), batch_size=8)
    before = os.getcwd()
    os.chdir(folder)
    if steps is not None:
        os.environ[PROFILE_STEPS] = steps
    try:
        prepared = model, optimizer, data = shardwise.prepare(model, optimizer, data, plan=plan)
        for x, y in data:
            optimizer.zero_grad()
            prepared.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
    finally:
        os.environ.pop(PROFILE_STEPS, None)
        os.chdir(before)
    return float(prepared.loss)


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", pytest.param("dp_replicate=2", marks=pytest.mark.long)])
def test_steps_of_a_script_are_profiled(plan: str, pool: RankPool, tmp_path: Path) -> None:
    losses = pool.run(trained, 2, plan, str(tmp_path), "2:4")
    assert losses == pool.run(trained, 2, plan, str(tmp_path), None)
    table = json.loads((tmp_path / "profile" / "table.json").read_text())
    assert table["steps"] == [2, 3] and len(table["ranks"]) == 2
    for rank, parts in enumerate(table["ranks"]):
        # two clocks: what stops the process between their readings is in one of them alone
        spent = sum(value for name, value in parts.items() if name != "measured" and not name.startswith("hidden"))
        assert spent == pytest.approx(parts["measured"], rel=0.02, abs=2.0)
        assert parts["input"] > 0 and parts["compute"] > 0 and parts["optimizer"] > 0
        trace = json.loads((tmp_path / "profile" / f"rank{rank}.json").read_text())
        for part in ("step", "input"):
            named = [e for e in trace["traceEvents"] if e.get("name") == f"shardwise.{part}" and e["ph"] == "X"]
            assert len(named) == 2


@pytest.mark.parametrize(("text", "said"), [("1:3", "step 1 of a script"), ("5", "as 10:12"), ("1:99", "at most 20")])
def test_steps_that_cannot_be_profiled(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_steps_of_script(text)
