"""A rank's record in shared memory: phase, waits, last collectives.

Written by ranks/worker, watching; read by diagnose.
    header   pid, phase and step, time of the last event, the collective it waits in
    groups   of each process group: a key that is the same on all its ranks, and how many collectives were issued
    rings    the last RING collectives of each group: op, dtype, elements, shape, tag, place in the code
    strings  every text once

One process writes (`RankRecord`), others map the same file and read (`Reader`), without a lock: a count is written
after the data that it covers. Writing costs a rank a few microseconds for each collective.

What this does not do: keep more than RING collectives of a group, MOST_RINGS groups, or STRING_BYTES of texts; what
does not fit is left out.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RING = 128  # collectives kept for each group
MOST_RINGS = 48  # groups whose collectives are kept
MOST_GROUPS = 2048  # with those of messages between two ranks, which have a count and no ring
STRING_BYTES = 2**17
MOST_TEXT = 2000  # bytes of one text
RUNNING, DONE, FAILED = 1, 2, 3  # states of a rank's function; 0: its record has not begun

_AT = {"beat": 24, "moved": 32, "events": 40, "phase": 48, "waits": 72, "groups": 96}  # offsets, after pid, rank, ...
_STATE_AT = 16
_GROUP = struct.Struct("<IiQ")  # key, ring (-1: none), collectives issued
_ENTRY = struct.Struct("<QdqIIIII4x")  # number, time, elements, shape, tag, place, dtype, op
_REST = struct.Struct("<dqIIIII")  # the same without the number
_Q, _D, _I = struct.Struct("<Q"), struct.Struct("<d"), struct.Struct("<I")
_WAIT = struct.Struct("<dIxxxxQ")  # since, group, number
_PHASE = struct.Struct("<Ixxxxdq")  # name (text), since, step
_MOVED, _MOVED_AT = struct.Struct("<dQ"), _AT["moved"]  # time of the last event, and number of events, which follows it
_GROUPS_AT = 128
_RINGS_AT = _GROUPS_AT + MOST_GROUPS * _GROUP.size
_STRINGS_AT = _RINGS_AT + MOST_RINGS * RING * _ENTRY.size
SIZE = _STRINGS_AT + STRING_BYTES


@dataclass(frozen=True)
class IssuedCollective:
    """One collective as a rank issued it."""

    number: int  # in its group, from 1
    at: float  # seconds of the monotonic clock
    elements: int  # of the tensor on this rank
    shape: str
    tag: str  # what it is for: "gradients", "control"
    place: str  # file:line of the user's code, else of ours
    dtype: str
    op: str

    def __str__(self) -> str:
        tag = f" '{self.tag}'" if self.tag else ""
        shape = f" of {self.dtype} {self.shape}" if self.dtype else ""
        return f"{self.op}{tag}{shape}"


@dataclass(frozen=True)
class GroupRecord:
    """A process group in one rank's record."""

    key: str  # `key_of`; the same on every rank of the group
    ring: int  # which ring holds its collectives; -1: messages between two ranks, not kept
    issued: int  # how many the rank has issued

    @property
    def axis(self) -> str:
        """Returns the mesh axis of the group."""
        return self.key.split("|")[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns the global ranks of the group, in its order."""
        return tuple(int(rank) for rank in self.key.split("|")[2].split(","))

    @property
    def between_two(self) -> bool:
        """Returns whether the group carries messages from its first rank to its second, not collectives."""
        return self.ring < 0


@dataclass(frozen=True)
class RankSnapshot:
    """A rank's record as a watcher read it at one moment."""

    rank: int
    pid: int
    state: int  # RUNNING, DONE or FAILED
    beat: float  # when a Python thread of it last ran; seconds of the monotonic clock
    moved: float  # when it last made progress, by the same clock
    events: int  # how often it has made progress
    phase: str  # name of a point (guard/points)
    since: float  # when the phase began
    step: int  # optimizer steps done; -1: none has begun
    waits_since: float  # 0: it does not wait
    waits_key: str  # key of the group in which it waits; ""
    waits_number: int  # for which of that group's collectives
    groups: dict[str, GroupRecord]  # by key

    @property
    def ended(self) -> bool:
        """Returns whether the rank's function has returned or raised."""
        return self.state in (DONE, FAILED)


def memory_folder() -> str:
    """Returns a folder whose files lie in memory (/dev/shm), else the one for temporary files."""
    shared = "/dev/shm"
    return shared if os.access(shared, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _mapped(path: str | Path) -> mmap.mmap:
    """Returns a record's file, mapped; made at its full size if it is missing, so that a full disk fails here."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(handle).st_size < SIZE:
            os.posix_fallocate(handle, 0, SIZE)
        return mmap.mmap(handle, SIZE)
    finally:
        os.close(handle)


class _Strings:
    """Texts of a record, read by their id, which is an offset."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory, self.texts = memory, {0: ""}

    def __getitem__(self, at: int) -> str:
        if at not in self.texts:
            if not 0 <= at < STRING_BYTES:
                return "?"
            start = _STRINGS_AT + at
            (size,) = _I.unpack_from(self.memory, start)
            if size > STRING_BYTES:
                return "?"
            self.texts[at] = self.memory[start + 4 : start + 4 + size].decode(errors="replace")
        return self.texts[at]


class RankRecord:
    """Writer of this rank's record in the file `path`, which is made if missing; `OSError` without space.

    waited_s  seconds of all waits so far
    own_s     phase -> seconds that the rank was in it, without its waits
    """

    def __init__(self, path: str | Path, rank: int, world: int) -> None:
        self.memory = _mapped(path)
        self.rank, self.world, self.path = rank, world, Path(path)
        self.events = self._groups = 0
        self.waited_s = self._waits_since = 0.0
        self.own_s: dict[str, float] = {}
        self._phase, self._phase_since, self._waited_before = "start", time.monotonic(), 0.0
        self._strings: dict[str, int] = {"": 0}
        self._used = 4
        self._rings = 0
        self._issued: list[int] = []
        self._ring_of: list[int] = []
        self._lock = threading.Lock()
        now = time.monotonic()
        self._write(_AT["beat"], _D.pack(now))
        self._write(_AT["moved"], _D.pack(now))
        self.phase("start", -1)
        self._write(0, struct.pack("<qiii", os.getpid(), rank, world, RUNNING))

    def _write(self, at: int, data: bytes) -> None:
        """Writes bytes at an offset, as one copy; `Struct.pack_into` writes zeros first, which a reader could see."""
        self.memory[at : at + len(data)] = data

    def text(self, value: str, whole: bool = False) -> int:
        """Returns the id under which the record holds a text; 0 if the record is full.

        whole  Whether all of it is needed, else its first MOST_TEXT bytes
        """
        at = self._strings.get(value)
        if at is None:
            with self._lock:
                # a file's name need be no UTF-8; of a group's key, which is read again, all is needed
                data = value.encode(errors="replace")[: STRING_BYTES if whole else MOST_TEXT]
                # no room left: the diagnosis goes without this text
                if self._used + 4 + len(data) > STRING_BYTES:
                    return 0
                at, start = self._used, _STRINGS_AT + self._used
                self._write(start, _I.pack(len(data)) + data)
                self._used += 4 + len(data)
                self._strings[value] = at
        return at

    def group(self, key: str, between_two: bool = False) -> int:
        """Returns the id under which the record holds a process group; -1 if the record is full.

        between_two  Whether it carries messages from its first rank to its second
        """
        words = self.text(key, whole=True)
        # without its key nobody could say whose group it is
        if not words:
            return -1
        with self._lock:
            ring = -1
            # messages between two ranks are counted, not kept one by one: they need no ring of entries
            if not between_two:
                ring, self._rings = self._rings, self._rings + 1
            if self._groups == MOST_GROUPS or ring >= MOST_RINGS:
                return -1
            number, self._groups = self._groups, self._groups + 1
        self._write(_GROUPS_AT + number * _GROUP.size, _GROUP.pack(words, ring, 0))
        self._write(_AT["groups"], _I.pack(self._groups))
        self._issued.append(0)
        self._ring_of.append(ring)
        return number

    def issue(self, group: int, op: int, elements: int, shape: int, dtype: int, tag: int, place: int) -> int:
        """Notes a collective that is about to be issued; returns its number in its group, from 1.

        group is an id of `group`; op, shape, dtype, tag and place are ids of `text`
        """
        number = self._issued[group] + 1
        now, ring = time.monotonic(), self._ring_of[group]
        if ring >= 0:
            at = _RINGS_AT + (ring * RING + number % RING) * _ENTRY.size
            self._write(at, _Q.pack(0))  # 0 tells a reader that the entry is being written
            self._write(at + 8, _REST.pack(now, elements, shape, tag, place, dtype, op))
            self._write(at, _Q.pack(number))
        self._issued[group] = number
        self._write(_GROUPS_AT + group * _GROUP.size + 8, _Q.pack(number))
        self.moved(now)
        return number

    def moved(self, now: float | None = None) -> None:
        """Notes progress at `now` (None: the present), so that the rank does not count as hanging."""
        self.events += 1
        self._write(_MOVED_AT, _MOVED.pack(time.monotonic() if now is None else now, self.events))

    def waits(self, group: int, number: int) -> None:
        """Notes that the rank now only waits for collective `number` of `group`."""
        self._waits_since = time.monotonic()
        self._write(_AT["waits"], _WAIT.pack(self._waits_since, group, number))

    def goes_on(self) -> None:
        """Notes the end of a wait, and adds its seconds to `waited_s`."""
        now = time.monotonic()
        self.waited_s += now - self._waits_since
        self._write(_AT["waits"], _D.pack(0.0))
        self.moved(now)

    def phase(self, name: str, step: int) -> None:
        """Notes that the rank begins the phase `name`, which has a deadline of its own.

        step  optimizer steps done, -1 before the first
        """
        now = time.monotonic()
        own = now - self._phase_since - (self.waited_s - self._waited_before)
        self.own_s[self._phase] = self.own_s.get(self._phase, 0.0) + own
        self._phase, self._phase_since, self._waited_before = name, now, self.waited_s
        self._write(_AT["phase"], _PHASE.pack(self.text(name), now, step))
        self.moved(now)

    def beat(self) -> None:
        """Notes that the interpreter runs; called about once a second by a thread."""
        self._write(_AT["beat"], _D.pack(time.monotonic()))

    def ended(self, well: bool) -> None:
        """Notes that the rank's function has returned (`well`) or raised."""
        self._write(_STATE_AT, struct.pack("<i", DONE if well else FAILED))


class Reader:
    """A view of one rank's record from another process."""

    def __init__(self, path: str | Path) -> None:
        self.memory = _mapped(path)
        self.strings = _Strings(self.memory)

    def see(self) -> RankSnapshot | None:
        """Returns the record's present content; None before the rank has begun it."""
        memory, strings = self.memory, self.strings
        pid, rank, _, state = struct.unpack_from("<qiii", memory, 0)
        if state == 0:
            return None
        phase, since, step = _PHASE.unpack_from(memory, _AT["phase"])
        waits, waits_group, waits_number = _WAIT.unpack_from(memory, _AT["waits"])
        (count,) = _I.unpack_from(memory, _AT["groups"])
        listed = [self._group(number) for number in range(count)]
        beat, moved = (_D.unpack_from(memory, _AT[name])[0] for name in ("beat", "moved"))
        # the rank writes meanwhile, so that its wait may name a group which this read does not have
        key = listed[waits_group].key if waits and waits_group < count else ""
        return RankSnapshot(
            rank=rank, pid=pid, state=state, beat=beat, moved=moved,
            events=_Q.unpack_from(memory, _AT["events"])[0],
            phase=strings[phase], since=since, step=step,
            waits_since=waits, waits_key=key, waits_number=waits_number,
            groups={group.key: group for group in listed},
        )  # fmt: skip

    def _group(self, number: int) -> GroupRecord:
        key, ring, issued = _GROUP.unpack_from(self.memory, _GROUPS_AT + number * _GROUP.size)
        return GroupRecord(self.strings[key], ring, issued)

    def entry(self, group: GroupRecord, number: int) -> IssuedCollective | None:
        """Returns collective `number` of a group; None if it is no longer (or not yet) kept."""
        # messages between two ranks are only counted
        if group.ring < 0:
            return None
        at = _RINGS_AT + (group.ring * RING + number % RING) * _ENTRY.size
        number_there, now, elements, *texts = _ENTRY.unpack_from(self.memory, at)
        (still,) = _Q.unpack_from(self.memory, at)
        # the rank writes meanwhile: another collective may have taken this place, before or during the read
        if number_there != number or still != number:
            return None
        shape, tag, place, dtype, op = (self.strings[text] for text in texts)
        return IssuedCollective(number, now, elements, shape, tag, place, dtype, op)

    def last(self, seen: RankSnapshot) -> tuple[GroupRecord, IssuedCollective] | None:
        """Returns (group, the newest collective that the rank issued); None if it has issued none."""
        entries = [(group, self.entry(group, group.issued)) for group in seen.groups.values() if group.issued]
        kept = [(group, entry) for group, entry in entries if entry is not None]
        return max(kept, key=lambda pair: pair[1].at, default=None)

    def close(self) -> None:
        self.memory.close()


def key_of(axis: str, name: str, ranks: Sequence[int]) -> str:
    """Returns a group's key "axis|name|ranks": its mesh axis, its name in torch, its global ranks with commas."""
    return f"{axis.replace('|', ' ')}|{name.replace('|', ' ')}|{','.join(map(str, ranks))}"
