"""A rank's record in shared memory, which another process reads while it is written."""

from __future__ import annotations

from pathlib import Path

from shardwise.guard.records import _MOVED_AT, RankRecord, Reader, key_of


class _Seen:
    """Memory as another process may see it at any time: whole pieces that are copied into it. It lends no buffer."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[bytes]] = {}

    def __setitem__(self, place: slice, data: bytes) -> None:
        assert place.stop - place.start == len(data)
        self.pieces.setdefault(place.start, []).append(data)


def test_groups_of_many_ranks_and_names_of_any_bytes_are_read_as_they_were_written(tmp_path: Path) -> None:
    record = RankRecord(tmp_path / "0", 0, 1024)
    key, place = key_of("world", "0", range(1024)), "/data/caf\udce9/train.py:3"  # a folder that is no UTF-8
    group = record.group(key)
    record.issue(group, record.text("all_reduce"), 8, 0, 0, 0, record.text(place))
    reader = Reader(tmp_path / "0")
    seen = reader.see()
    assert seen is not None and seen.groups[key].ranks == tuple(range(1024))
    entry = reader.entry(seen.groups[key], 1)
    assert entry is not None and entry.place == "/data/caf?/train.py:3"
    # a record without room for a key has no such group, and can be read
    assert record.group(key_of("world", "1", range(20_000, 50_000))) == -1
    assert list(reader.see().groups) == [key]  # type: ignore[union-attr]


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
