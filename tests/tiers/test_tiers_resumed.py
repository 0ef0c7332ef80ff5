"""A checkpoint of a run whose state lies in a tier is like any other: it goes on with the tier, and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import MODEL, losses_of, weights_of

import shardwise

DISK = "offload=optimizer:disk"
AS_MADE = f"{DISK},gradients=as_made"
WEIGHTS = "offload=optimizer:disk|parameters:disk"
QUICK = {**MODEL, "batch_samples": 12, "eval_every": 0, "checkpoint_every": 2}


def joined(*parts: str) -> str:
    return ",".join(filter(None, parts)) or "single"


def assert_goes_on(before: str, after: str, same_bits: bool, folder: Path) -> None:
    """Two steps under `before` and two under `after` are four under the plan without a tier."""
    plain = before.replace(WEIGHTS, "").replace(AS_MADE, "").replace(DISK, "").strip(",") or "single"
    whole = shardwise.train("digits", plain, steps=4, out=str(folder / "a"), **QUICK)
    first = shardwise.train("digits", before, steps=2, out=str(folder / "b"), **QUICK)
    again = shardwise.train("digits", after, steps=4, resume=first.folder, out=str(folder / "b"), **QUICK)
    if same_bits:
        assert losses_of(again)[-2:] == losses_of(whole)[-2:]
        assert weights_of(again.folder) == weights_of(whole.folder)
    else:
        assert losses_of(again)[-2:] == pytest.approx(losses_of(whole)[-2:], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("single", DISK, marks=pytest.mark.long),
        (f"precision=bf16,{DISK}", "precision=bf16"),
        (f"precision=bf16,{AS_MADE}", f"precision=bf16,{DISK}"),
        pytest.param("dp_shard=2,zero=3", f"dp_shard=2,zero=3,{AS_MADE}", marks=pytest.mark.long),
        pytest.param(f"dp_shard=2,zero=3,{WEIGHTS}", "dp_shard=2,zero=3", marks=pytest.mark.long),
        pytest.param("dp_shard=2,zero=3", f"dp_shard=2,zero=3,{WEIGHTS}", marks=pytest.mark.long),
    ],
)
def test_goes_on_with_and_without_the_tier(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert_goes_on(before, after, True, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"dp_shard=2,zero=1,{DISK}", f"dp_shard=2,zero=3,{WEIGHTS}"),
        (f"dp_shard=2,zero=3,{WEIGHTS}", "dp_replicate=2"),
        ("dp_replicate=2", f"dp_shard=2,zero=2,precision=bf16,{DISK}"),
    ],
)  # fmt: skip
def test_goes_on_under_another_plan(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if "bf16" in after:
        before = before.replace("dp_replicate=2", "dp_replicate=2,precision=bf16")
    assert_goes_on(before, after, False, tmp_path)
