"""The rate of a disk is measured as a tier's file moves, and the file's room is given back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.measure import disk_rate
from shardwise.tiers.scratch import ScratchFile


def test_all_of_the_file_moves_past_the_cache_and_its_room_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: dict[str, list[tuple[int, int]]] = {"read": [], "write": []}
    files: list[ScratchFile] = []

    def counted(self: ScratchFile, call: object, verb: str, part: memoryview, start: int) -> None:
        moved[verb].append((start, len(part)))
        files.append(self)

    monkeypatch.setattr(ScratchFile, "_move", counted)
    rates = disk_rate.file_rates(4, 1 << 20)
    assert rates.keys() == {"read", "write"} and all(rate > 0 for rate in rates.values())
    assert sum(size for _, size in moved["read"]) == sum(size for _, size in moved["write"]) == 4 << 20
    assert sorted(moved["read"]) == sorted(moved["write"]), "what is read is what was written"
    assert len({id(file) for file in files}) == 1
    with pytest.raises(OSError):
        os.fstat(files[0].fd)


def test_reads_and_writes_alike_make_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step moves each byte once in both ways: 1 s for the one and 3 for the other are 2 bytes in 4 s."""
    monkeypatch.setattr(disk_rate, "file_rates", lambda groups, size: {"write": 1.0, "read": 1 / 3})
    assert disk_rate.disk_rate() == pytest.approx(0.5)


def test_a_folder_in_memory_has_the_rate_at_which_files_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    monkeypatch.setattr("shardwise.tiers.scratch.file_system", lambda folder: "tmpfs")
    monkeypatch.setattr(disk_rate, "_written_rate", lambda: 7.0)
    assert disk_rate.disk_rate() == 7.0
