"""Stages of ZeRO are rows: nobody asks for one by its number, and another row is another stage everywhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise import Plan, parallelize
from shardwise.costs.layout import Layout
from shardwise.costs.memory import rank_memory
from shardwise.costs.software import software
from shardwise.layout.zero_stages import SHARDED, STAGES, UNSHARDED, ZeroStage
from shardwise.models import tasks
from shardwise.planner.decoders import decoder_by_name
from shardwise.ranks import RankPool

SOURCE = Path(shardwise.__file__).parent
# gathers a unit once for its forward and its backward, and frees it after both
KEPT = ZeroStage(
    len(STAGES), "kept", "and gathers once", state=True, gradients=True, weights=True, gathers=1, searched=False
)


def test_each_row_shards_what_the_one_before_it_does() -> None:
    assert [stage.number for stage in STAGES.values()] == list(STAGES) == list(range(len(STAGES)))
    for less, more in zip(STAGES.values(), SHARDED, strict=False):
        assert (less.state, less.gradients, less.weights) < (more.state, more.gradients, more.weights)


def test_one_rank_shards_nothing() -> None:
    assert Plan.parse("dp_shard=2,zero=3").sharded is STAGES[3]
    assert Plan.parse("cp=2,zero=1").sharded is STAGES[1]
    assert Plan.parse("single").sharded is Layout(zero=3).sharded is UNSHARDED


def numbers_asked_for(tree: ast.AST) -> list[int]:
    """Returns the lines in which something called `zero` is compared with a number."""
    return [
        node.lineno for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and "zero" in (getattr(node.left, "attr", ""), getattr(node.left, "id", ""))
        and any(isinstance(leaf, ast.Constant) and isinstance(leaf.value, int) for to in node.comparators
                for leaf in ast.walk(to))
    ]  # fmt: skip


def test_no_file_asks_for_a_stage_by_its_number() -> None:
    assert numbers_asked_for(ast.parse("plan.zero == 3 or zero in (1, 2)")) == [1, 1]
    asked = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py") if (lines := numbers_asked_for(ast.parse(path.read_text())))
    }  # fmt: skip
    assert list(asked) == ["layout/plan.py"], asked  # -1 is the default, which is filled in there
    assert len(asked["layout/plan.py"]) == 1


def test_a_row_is_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between 2 and 3: shards of weights as 3 keeps them, and beside them all layers gathered at a time."""
    monkeypatch.setitem(STAGES, KEPT.number, KEPT)
    shape, soft = decoder_by_name("llama-2-7b"), software("torchtitan")

    def held(zero: int) -> dict[str, float]:
        layout = Layout(shard=16, zero=zero, seq=4096, recompute="full")
        return dict(rank_memory(shape, layout, soft, layers=shape.layers, first=True, last=True, in_flight=1.0).terms)

    assert held(KEPT.number)["optimizer"] == held(3)["optimizer"]
    assert held(KEPT.number)["buffers"] > 8 * held(3)["buffers"]


def _stepped(zero: int) -> tuple[list[torch.Tensor], float]:
    """Returns whole parameters after two steps, and the bytes of weights that the second one gathered on a rank."""
    STAGES[KEPT.number] = KEPT
    try:
        task = tasks.decoder_tied()
        engine = parallelize(task, f"dp_shard=2,zero={zero}")
        engine.step(task.batch(0))
        with engine.observe() as ledger:
            engine.step(task.batch(1))
        gathered = sum(row["received_bytes"] for row in ledger.rows() if "all_gather" in row["op"])
        return [param.clone() for _, param in engine.full_parameters()], gathered
    finally:
        del STAGES[KEPT.number]


def test_a_row_runs(pool: RankPool) -> None:
    """Nothing beside the row: shards of weights as 3 has them, gathered half as often."""
    freed, kept = (pool.run(_stepped, 2, zero) for zero in (3, KEPT.number))
    for (expected, twice), (params, once) in zip(freed, kept, strict=True):
        assert all(map(torch.equal, params, expected))
        assert 0.4 * twice < once < 0.6 * twice
