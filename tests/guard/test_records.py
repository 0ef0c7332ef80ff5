"""A rank's record in shared memory, which another process reads while it is written."""

from __future__ import annotations

from pathlib import Path

from shardwise.guard.records import _MOVED_AT, RankRecord


class _Seen:
    """Memory as another process may see it at any time: whole pieces that are copied into it. It lends no buffer."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[bytes]] = {}

    def __setitem__(self, place: slice, data: bytes) -> None:
        assert place.stop - place.start == len(data)
        self.pieces.setdefault(place.start, []).append(data)


def test_a_record_never_shows_a_half_written_time(tmp_path: Path) -> None:
    """Of a time of 0, which `Struct.pack_into` writes first, a watcher makes a hang as long as the machine is up."""
    record = RankRecord(tmp_path / "0", 0, 1)
    record.memory = seen = _Seen()  # type: ignore[assignment]
    group = record.group("data")
    record.phase("step", 3)
    record.issue(group, record.text("all_reduce"), 8, record.text("(8,)"), 0, 0, 0)
    record.waits(group, 1)
    record.goes_on()
    record.beat()
    record.ended(True)
    moved = [data[:8] for data in seen.pieces[_MOVED_AT]]
    assert len(moved) == 3
    assert bytes(8) not in moved
