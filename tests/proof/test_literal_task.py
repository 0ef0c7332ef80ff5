"""What a proof looks at of a task by itself: its boundary, its curriculum, sources, seeds of fast masks, saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boundary_tasks
import numpy as np
import pytest
import torch
from mutations.held_out_tasks import growing_forecast
from mutations.plant import Bug, planted

from shardwise.data import ArraySource, Blend, TokenSource
from shardwise.proof.literal_boundary import unlike_boundary
from shardwise.proof.literal_rollout import unlike_curriculum
from shardwise.proof.literal_settings import _fast_masks
from shardwise.proof.literal_sources import one_by_one
from shardwise.proof.plain_run import RunRecord
from shardwise.proof.saved import read_saved
from shardwise.training.keeping import GOES_ON

BOUNDARIES = {
    "box": boundary_tasks.box,
    "globe": boundary_tasks.globe,
    "channel": lambda: boundary_tasks.on_a_globe({"lat": "zeros", "lon": "periodic"}),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_boundaries_are_as_counted_by_hand(name: str) -> None:
    assert unlike_boundary(BOUNDARIES[name]()) == []


@pytest.mark.parametrize(("where", "old", "new", "look"), [
    ("boundary:Edges.padded", "mode=_MODES[kind])", 'mode="replicate")',
     lambda: unlike_boundary(boundary_tasks.box())),
    ("boundary:Edges._turned", "] // 2", "] // 2 + 1", lambda: unlike_boundary(boundary_tasks.globe())),
    ("rollouts:_Growing.__call__", "step >= start", "step >= start + 1 or start == 0",
     lambda: unlike_curriculum(growing_forecast())),
    ("step.seeded_draws:seed_masks", "state.steps_done, *place", "0, *place", lambda: _fast_masks(0)),
    ("step.seeded_draws:seed_masks", "(micro_batch, state.data_rank)", "(micro_batch,)", lambda: _fast_masks(0)),
], ids=["a border", "a pole", "a curriculum", "steps of fast masks", "ranks of fast masks"])  # fmt: skip
def test_a_bug_on_both_sides_is_told(where: str, old: str, new: str, look: Callable[[], list[str]]) -> None:
    assert look() == []
    with planted(Bug("", f"shardwise.{where}", old, new, "", "")) as ran:
        assert look() and ran()


def test_the_packages_sources_are_read_again_sample_by_sample(tmp_path: Path) -> None:
    for number, count in enumerate((31, 45)):
        np.save(tmp_path / f"{number}.npy", np.arange(100 * number, 100 * number + count).astype(np.uint16))
    files = TokenSource([tmp_path / "0.npy", tmp_path / "1.npy"], 6)
    arrays = ArraySource({"x": np.arange(12.0).reshape(6, 2), "y": np.arange(6)})
    blend = Blend({"a": (files.over(1, 4), 1.0), "b": (files.over(4, len(files)), 2.0)})
    for source in (files, files.over(4, 9), arrays, blend):
        read = one_by_one(_First(source), [*range(len(source))])
        for name, tensor in source.read([*range(len(source))]).items():
            assert torch.equal(read[name], tensor), name
    assert one_by_one(_First(SimpleNamespace()), [0]) is None
    bug = Bug("", "shardwise.data.tokens:TokenSource.read", "self.span[0] + index", "index", "", "")
    with planted(bug):
        held_out = files.over(4, 9)
        assert not torch.equal(one_by_one(_First(held_out), [0])["tokens"], held_out.read([0])["tokens"])


class _First:
    """All of a source, as a proof reads it."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)


def test_a_save_that_failed_is_a_difference(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"notices": [f"the disk is full{GOES_ON}"]}))
    record = RunRecord()
    read_saved(tmp_path, record)
    assert "could not be written: the disk is full" in record.differences[0]
