"""The page on unusual modules: some of its cells, drawn by a seed, are still what it says."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from shardwise import verify
from shardwise.ranks import RankPool

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import cells
import unusual
import unusual_tasks

FOUND = cells.written(unusual.PAGE.read_text(encoding="utf-8").split(unusual.TABLE)[1])
# results differ by what the steps of a solver differ by on each rank's part, and `verify` says so
DIFFERS = {("neural_ode_adaptive", "dp_replicate=2")}
CHOSEN = [("complex_pairs", "pp=2"), ("memory_machine", "tp=2,pp=2"), ("routed_by_user", "dp_shard=2,zero=3")]
DRAWN, SEED = 7, 11


def _drawn() -> list[tuple[str, str]]:
    left = [cell for cell in sorted(FOUND) if FOUND[cell][0] != unusual.NO_SPACE and cell not in (*DIFFERS, *CHOSEN)]
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
    assert kinds == dict.fromkeys(DIFFERS, "WRONG")
    assert all(what == unusual.NO_SPACE for (name, plan), (what, _) in FOUND.items()
               if plan == "domain=2" and name not in unusual_tasks.SPACE)  # fmt: skip


def test_a_choice_for_the_whole_batch_is_told(pool: RankPool) -> None:
    """An adaptive solver takes other steps on a part of the batch: nearly nothing, and not equal."""
    parity = verify("unusual_tasks:neural_ode_adaptive", "dp_replicate=2", pool=pool)
    assert not parity.parity
    assert any("runs 'field' " in note and "comes out otherwise on each rank's part" in note for note in parity.notes)
    alike = verify("unusual_tasks:neural_ode", "dp_replicate=2", steps=1, pool=pool)
    assert alike.parity and not any("reads values" in note for note in alike.notes)


def test_a_table_is_read_as_it_was_written() -> None:
    found = {("a_b", "tp=2"): ("equal", ""), ("a_b", "pp=2"): ("refused", "one"), ("c", "pp=2"): ("refused", "one")}
    lines, reasons = cells.rows(found, ["a_b", "c"], ["tp=2", "pp=2"])
    assert reasons == ["1. one"]
    assert cells.written("\n".join([*lines, "", *reasons])) == {**found, ("c", "tp=2"): ("not tried", "")}
