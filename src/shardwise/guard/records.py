"""A rank's record in shared memory: phase, waits, last collectives. Begun by ranks/worker, watching; read by diagnose.

    header   pid, phase and step, time of the last event, the collective it waits in
    groups   of each process group: a key that is the same on all its ranks, and how many collectives were issued
    rings    the last RING collectives of each group: op, dtype, elements, shape, tag, place in the code
    strings  every text once

One process writes (`RankRecord`), others map the same file and read (`read`), without a lock: a number is written after
what it stands for. Writing costs a rank a few microseconds for each collective.

What this does not do: keep more than RING collectives of a group, MOST_RINGS groups, or texts beyond STRING_BYTES;
what has no place is left out.
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
MOST_RINGS = 48
MOST_GROUPS = 2048  # those of messages between two ranks keep a count alone
STRING_BYTES = 2**17
MOST_TEXT = 2000  # bytes of one text
RUNNING, DONE, FAILED = 1, 2, 3

_AT = {"beat": 24, "moved": 32, "events": 40, "phase": 48, "waits": 72, "groups": 96}  # after pid, rank, world, state
_STATE_AT = 16
_GROUP = struct.Struct("<IiQ")  # key, ring (-1: none), collectives issued
_ENTRY = struct.Struct("<QdqIIIII4x")  # number, time, elements, shape, tag, place, dtype, op
_REST = struct.Struct("<dqIIIII")  # the same without the number
_Q, _D, _I = struct.Struct("<Q"), struct.Struct("<d"), struct.Struct("<I")
_WAIT = struct.Struct("<dIxxxxQ")
_PHASE = struct.Struct("<Ixxxxdq")
_MOVED, _MOVED_AT = struct.Struct("<dQ"), _AT["moved"]  # and events, which follow
_GROUPS_AT = 128
_RINGS_AT = _GROUPS_AT + MOST_GROUPS * _GROUP.size
_STRINGS_AT = _RINGS_AT + MOST_RINGS * RING * _ENTRY.size
SIZE = _STRINGS_AT + STRING_BYTES


@dataclass(frozen=True)
class IssuedCollective:
    """One collective as a rank issued it. `place`: file:line of the user's code, else of ours."""

    number: int  # in its group, from 1
    at: float  # seconds of the monotonic clock
    elements: int  # of the tensor
    shape: str
    tag: str  # what it is for: "gradients", "control"
    place: str
    dtype: str
    op: str

    def __str__(self) -> str:
        tag = f" '{self.tag}'" if self.tag else ""
        shape = f" of {self.dtype} {self.shape}" if self.dtype else ""
        return f"{self.op}{tag}{shape}"


@dataclass(frozen=True)
class GroupRecord:
    """A process group in one rank's record, with how many collectives the rank issued there."""

    key: str  # the same on every rank of the group
    ring: int
    issued: int

    @property
    def axis(self) -> str:
        return self.key.split("|")[0]

    @property
    def ranks(self) -> tuple[int, ...]:
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
    moved: float  # when it last made progress
    events: int  # how often it has
    phase: str  # of guard/points
    since: float  # when the phase began
    step: int
    waits_since: float  # 0: it does not wait
    waits_key: str  # the group in which it waits
    waits_number: int  # for which of that group's collectives
    groups: dict[str, GroupRecord]

    @property
    def ended(self) -> bool:
        return self.state in (DONE, FAILED)


def memory_folder() -> str:
    """Returns a folder whose files lie in memory (/dev/shm), else the one for temporary files."""
    shared = "/dev/shm"
    return shared if os.access(shared, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _mapped(path: str | Path) -> mmap.mmap:
    """Returns a record's file mapped; the first process makes it, wholly allocated, so that a full disk fails here."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(handle).st_size < SIZE:
            os.posix_fallocate(handle, 0, SIZE)
        return mmap.mmap(handle, SIZE)
    finally:
        os.close(handle)


class _Strings:
    """Texts of a record, read by their number, which is their place."""

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
    """Writer of this rank's record. `path`: a file of its own, made where it is missing; `OSError` without space."""

    def __init__(self, path: str | Path, rank: int, world: int) -> None:
        self.memory = _mapped(path)
        self.rank, self.world, self.path = rank, world, Path(path)
        self.events = self._groups = 0
        self.waited_s = self._waits_since = 0.0
        self.own_s: dict[str, float] = {}  # of each phase: time outside of waits, as long as it was in it
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
        """Write into the record as a copy of bytes: `Struct.pack_into` writes zeros first, which a reader would see."""
        self.memory[at : at + len(data)] = data

    def text(self, value: str, whole: bool = False) -> int:
        """Returns the number under which the record holds a text, `whole` or its begin; 0 where the record is full."""
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
        """Returns the number under which the record holds a process group; -1 where the record is full."""
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
        """Note a collective about to be issued; returns its number in its group, from 1. Words are text numbers."""
        number = self._issued[group] + 1
        now, ring = time.monotonic(), self._ring_of[group]
        if ring >= 0:
            at = _RINGS_AT + (ring * RING + number % RING) * _ENTRY.size
            self._write(at, _Q.pack(0))  # what is read meanwhile is neither the old one nor the new
            self._write(at + 8, _REST.pack(now, elements, shape, tag, place, dtype, op))
            self._write(at, _Q.pack(number))
        self._issued[group] = number
        self._write(_GROUPS_AT + group * _GROUP.size + 8, _Q.pack(number))
        self.moved(now)
        return number

    def moved(self, now: float | None = None) -> None:
        """Note progress: the rank is not hanging."""
        self.events += 1
        self._write(_MOVED_AT, _MOVED.pack(time.monotonic() if now is None else now, self.events))

    def waits(self, group: int, number: int) -> None:
        """Note that the rank now does nothing but wait for this collective."""
        self._waits_since = time.monotonic()
        self._write(_AT["waits"], _WAIT.pack(self._waits_since, group, number))

    def goes_on(self) -> None:
        """Note the end of a wait; `waited_s` is the seconds of all waits so far."""
        now = time.monotonic()
        self.waited_s += now - self._waits_since
        self._write(_AT["waits"], _D.pack(0.0))
        self.moved(now)

    def phase(self, name: str, step: int) -> None:
        """Note that the rank begins a part of its work, which has a deadline of its own."""
        now = time.monotonic()
        own = now - self._phase_since - (self.waited_s - self._waited_before)
        self.own_s[self._phase] = self.own_s.get(self._phase, 0.0) + own
        self._phase, self._phase_since, self._waited_before = name, now, self.waited_s
        self._write(_AT["phase"], _PHASE.pack(self.text(name), now, step))
        self.moved(now)

    def beat(self) -> None:
        """Note that the interpreter runs; called about once a second by a thread."""
        self._write(_AT["beat"], _D.pack(time.monotonic()))

    def ended(self, well: bool) -> None:
        """Note that the rank's function has returned or raised."""
        self._write(_STATE_AT, struct.pack("<i", DONE if well else FAILED))


class Reader:
    """A view of one rank's record from another process."""

    def __init__(self, path: str | Path) -> None:
        self.memory = _mapped(path)
        self.strings = _Strings(self.memory)

    def see(self) -> RankSnapshot | None:
        """Returns the record as it is now; None before the rank has begun it."""
        memory, strings = self.memory, self.strings
        pid, rank, _, state = struct.unpack_from("<qiii", memory, 0)
        if state == 0:
            return None
        phase, since, step = _PHASE.unpack_from(memory, _AT["phase"])
        waits, waits_group, waits_number = _WAIT.unpack_from(memory, _AT["waits"])
        (count,) = _I.unpack_from(memory, _AT["groups"])
        listed = [self._group(number) for number in range(count)]
        beat, moved = (_D.unpack_from(memory, _AT[name])[0] for name in ("beat", "moved"))
        # read while the rank writes it: a number may be half-way
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
        """Returns a collective of a group by its number, None where it is no longer (or not yet) kept."""
        # between two ranks: only counted
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
        """Returns (group, the newest collective that the rank issued), None where it has issued none."""
        entries = [(group, self.entry(group, group.issued)) for group in seen.groups.values() if group.issued]
        kept = [(group, entry) for group, entry in entries if entry is not None]
        return max(kept, key=lambda pair: pair[1].at, default=None)

    def close(self) -> None:
        self.memory.close()


def key_of(axis: str, name: str, ranks: Sequence[int]) -> str:
    """Returns a group's key: its axis, its name within torch, its ranks."""
    return f"{axis.replace('|', ' ')}|{name.replace('|', ' ')}|{','.join(map(str, ranks))}"
