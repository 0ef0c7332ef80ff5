"""Twenty cells of the table of modules that nobody chose, drawn by a seed: each is still what the table says."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from shardwise.ranks import RankPool

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sweep
import sweep_tasks

CELLS, SEED = 20, 13
KINDS = {"nn": 16, "hf": 4}  # how many of each
UNPROVEN = {  # one epsilon moves their gradients in one process too
    *(("lib:timm ghostnet", plan) for plan in sweep.PLANS if plan != "pp=2"),
    *(("lib:timm mobilenetv4", plan) for plan in sweep.PLANS if plan not in ("tp=2", "pp=2")),
}


def _table() -> dict[tuple[str, str], tuple[sweep_tasks.Recipe, str]]:
    """(module, plan) -> recipe and outcome, as the table has them."""
    rows = {}
    for line in sweep.TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith(("nn:", "hf:", "lib:")):
            recipe = tuple(int(number) for number in cells[1].split("/"))
            rows |= {(cells[0], plan): (recipe, outcome) for plan, outcome in zip(sweep.PLANS, cells[2:], strict=True)}
    return {cell: found for cell, found in rows.items() if found[1]}


def _drawn() -> list[tuple[str, str]]:
    draw = random.Random(SEED)
    names = sorted(_table().keys() - UNPROVEN)
    return [
        cell
        for kind, count in KINDS.items()
        for cell in draw.sample([c for c in names if c[0].startswith(f"{kind}:")], count)
    ]


@pytest.mark.parametrize(("name", "plan"), _drawn())
def test_a_cell_is_what_the_table_says(pool: RankPool, name: str, plan: str) -> None:
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    recipe, outcome = _table()[name, plan]
    found, reason = sweep.cell(name, recipe, plan, pool)
    assert found == outcome, reason
    assert found in ("equal", "refused"), reason


def test_the_table_has_nothing_wrong_and_blames_nobody() -> None:
    bad = {cell: outcome for cell, (_, outcome) in _table().items() if outcome not in ("equal", "refused")}
    assert bad == dict.fromkeys(UNPROVEN, "unproven")


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []

    def cell(name: str, recipe: sweep_tasks.Recipe, plan: str, pool: RankPool) -> tuple[str, str]:
        ran.append((name, plan))
        return ("wrong", "it differs") if plan == "tp=2" and len(ran) < 6 else ("equal", "")

    monkeypatch.setattr(sweep, "cell", cell)
    file = tmp_path / "cells.jsonl"
    sweep.run(file, ["nn:GELU", "nn:Container"], 100, [])
    assert ran == [("nn:GELU", plan) for plan in sweep.PLANS]
    cells = sweep.read(file)
    assert cells["nn:GELU", "tp=2"]["outcome"] == "wrong" and cells["nn:Container", ""]["outcome"] == "none"
    assert "| `tp=2` | 0 | 0 | 0 | 1 | 0 | 0 | 0% |" in sweep.as_page(cells)
    sweep.run(file, ["nn:GELU", "nn:Container"], 100, ["wrong"])
    assert ran[5:] == [("nn:GELU", "tp=2")]
    assert sweep.read(file)["nn:GELU", "tp=2"]["outcome"] == "equal"
