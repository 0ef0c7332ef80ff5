"""Tests of tiers need a folder for temporary files that lies on a disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from shardwise.tiers.scratch import IN_MEMORY, file_system


@pytest.fixture(autouse=True)
def on_a_disk() -> None:
    """Skips, in sight, where the folder lies in memory: a plan with `offload=optimizer:disk` is refused there."""
    folder = tempfile.gettempdir()
    if file_system(Path(folder)) in IN_MEMORY:
        pytest.skip(f"{folder} lies in memory: let TMPDIR name a folder on a disk")
