"""The page on unusual modules: some of its cells, drawn by a seed, are still what it says."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Task, parallelize
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cells
import unusual
import unusual_kit
import unusual_tasks

FOUND = cells.written(unusual.PAGE.read_text(encoding="utf-8").split(unusual.TABLE)[1])
CHOSEN = [("complex_pairs", "pp=2"), ("memory_machine", "tp=2,pp=2"), ("routed_by_user", "dp_shard=2,zero=3"),
          ("energies_and_forces", "dp_shard=2,zero=3")]  # fmt: skip
DRAWN, SEED = 7, 11


def _drawn() -> list[tuple[str, str]]:
    left = [cell for cell in sorted(FOUND) if FOUND[cell][0] != unusual.NO_SPACE and cell not in CHOSEN]
    return [*CHOSEN, *random.Random(SEED).sample(left, DRAWN)]


@pytest.mark.parametrize(("name", "plan"), _drawn())
def test_a_cell_is_what_the_page_says(pool: RankPool, name: str, plan: str) -> None:
    found, reason = cells.cell(f"unusual_tasks:{name}", plan, pool)
    assert (found, _without_ranks(reason)) == (FOUND[name, plan][0], _without_ranks(FOUND[name, plan][1]))


def _without_ranks(reason: str) -> str:
    """Of two ranks that take different branches, whichever comes later tells it."""
    return reason if not reason.startswith(cells.BRANCHES) else cells.BRANCHES


def test_every_module_is_under_every_plan_and_nothing_else_is_wrong() -> None:
    assert list(FOUND) == [(name, plan) for name in unusual_tasks.ALL for plan in unusual.PLANS]
    kinds = {cell: what for cell, (what, _) in FOUND.items() if what not in ("equal", "refused", unusual.NO_SPACE)}
    assert kinds == {}
    assert all(what == unusual.NO_SPACE for (name, plan), (what, _) in FOUND.items()
               if plan == "domain=2" and name not in unusual_tasks.SPACE)  # fmt: skip


class Reads(nn.Module):
    """Each sample is scaled by a number that Python reads: of all samples, of each one, or for a log alone."""

    def __init__(self, what: str, size: float) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)
        self.what, self.size, self.logged = what, size, 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).tanh()
        if self.what == "all":
            x = x * (1 + self.size * float(x.detach().abs().max()))
        elif self.what == "each":
            x = torch.stack([row * (1 + self.size * float(row.detach().abs().max())) for row in x])
        else:
            self.logged = float(x.detach().norm())
        return self.leave(x)


def _reads(what: str, size: float) -> Task:
    return unusual_kit.task(lambda: Reads(what, size))


def _refusal(task: Any, plan: str) -> str:
    task = task() if callable(task) else unusual_tasks.ALL[task]()
    try:
        parallelize(task, plan).close()
    except RefusedPlan as error:
        return str(error)
    return ""


SOLVER, SCALED = "neural_ode_adaptive", partial(_reads, "all", 1e-8)


@pytest.mark.parametrize(
    ("task", "precision"), [(SOLVER, "fp32"), (SOLVER, "fp64"), (SCALED, "fp32"), (SCALED, "bf16")]
)
def test_a_choice_for_the_whole_batch_is_refused(pool: RankPool, task: Any, precision: str) -> None:
    """An adaptive solver takes other steps on a part of the batch: 1e-7 of a gradient, in any precision of the run."""
    for refusal in pool.run(_refusal, 2, task, f"dp_replicate=2,precision={precision}"):
        assert "reads values of tensors in Python" in refusal and "where weights move by" in refusal


@pytest.mark.parametrize("task", ["halting", "neural_ode", partial(_reads, "each", 0.5), partial(_reads, "log", 0.0)])
def test_a_choice_for_each_sample_is_none_for_the_batch(pool: RankPool, task: Any) -> None:
    assert pool.run(_refusal, 2, task, "dp_replicate=2") == ["", ""]


def test_the_whole_batch_may_be_read_where_it_is_whole(pool: RankPool) -> None:
    assert pool.run(_refusal, 2, "neural_ode_adaptive", "tp=2") == ["", ""]


def test_a_table_is_read_as_it_was_written() -> None:
    found = {("a_b", "tp=2"): ("equal", ""), ("a_b", "pp=2"): ("refused", "one"), ("c", "pp=2"): ("refused", "one")}
    lines, reasons = cells.rows(found, ["a_b", "c"], ["tp=2", "pp=2"])
    assert reasons == ["1. one"]
    assert cells.written("\n".join([*lines, "", *reasons])) == {**found, ("c", "tp=2"): ("not tried", "")}
