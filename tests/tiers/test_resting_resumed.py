"""A checkpoint of a run whose state rests by a code is of whole tensors: it goes on by the same code, and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import MODEL, losses_of, weights_of

import shardwise

QUICK = {**MODEL, "batch_samples": 12, "eval_every": 0, "checkpoint_every": 2}
SPLIT = "precision=bf16,masters=split"


def assert_goes_on(before: str, after: str, whole: str, folder: Path) -> None:
    """Two steps under `before` and two under `after` have the bits of four under `whole`."""
    straight = shardwise.train("digits", whole, steps=4, out=str(folder / "a"), **QUICK)
    first = shardwise.train("digits", before, steps=2, out=str(folder / "b"), **QUICK)
    again = shardwise.train("digits", after, steps=4, resume=first.folder, out=str(folder / "b"), **QUICK)
    assert losses_of(again)[-2:] == losses_of(straight)[-2:]
    assert weights_of(again.folder) == weights_of(straight.folder)


def coded(plan: str) -> tuple[str, str, str]:
    return plan, plan, plan


@pytest.mark.parametrize(
    ("before", "after", "whole"),
    [
        coded("optimizer_state=8bit"),
        (SPLIT, "precision=bf16", "precision=bf16"),
        pytest.param("precision=bf16", SPLIT, "precision=bf16", marks=pytest.mark.long),
        pytest.param(*coded("optimizer_state=bf16"), marks=pytest.mark.long),
        pytest.param(*coded("optimizer_state=8bit,offload=optimizer:disk"), marks=pytest.mark.long),
        pytest.param(*coded(f"dp_shard=2,zero=1,optimizer_state=8bit,{SPLIT}"), marks=pytest.mark.long),
        pytest.param(*coded("dp_shard=2,zero=3,optimizer_state=bf16"), marks=pytest.mark.long),
    ],
)
def test_goes_on(before: str, after: str, whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert_goes_on(before, after, whole, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("optimizer_state=8bit", "dp_shard=2,zero=3"),
        ("dp_shard=2,zero=1,optimizer_state=bf16", "optimizer_state=8bit"),
        (f"dp_shard=2,zero=2,{SPLIT}", f"dp_replicate=2,{SPLIT}"),
    ],
)  # fmt: skip
def test_goes_on_under_another_plan(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    first = shardwise.train("digits", before, steps=2, out=str(tmp_path / "b"), **QUICK)
    again = shardwise.train("digits", after, steps=4, resume=first.folder, out=str(tmp_path / "b"), **QUICK)
    straight = shardwise.train("digits", before, steps=4, out=str(tmp_path / "a"), **QUICK)
    assert losses_of(again)[-2:] == pytest.approx(losses_of(straight)[-2:], rel=1e-3)
