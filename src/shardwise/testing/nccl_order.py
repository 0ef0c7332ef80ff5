"""Replays the collectives and messages that ranks issued, under strict rules of NCCL, and finds deadlocks.

    rank 0   send A | recv B          one queue for each rank, all communicators in it; nothing is buffered:
    rank 1   send B | recv A          a send ends when its receive runs   -> both wait in their send: a deadlock

    rank 0   [send A, recv B]         operations of one batch begin together
    rank 1   [send B, recv A]         -> both end

`strictest` models a device whose kernels run one after another (no free multiprocessor, CUDA_DEVICE_MAX_CONNECTIONS=1).
`side_by_side` models the best case: a queue for each communicator, and each operation after those that its rank has
waited for. Whether an order ends that passes only the second depends on how a device runs kernels.

Ranks are also compared: collectives of one communicator must agree, and messages have one size on both ends.

What this does not do: see what a compiled program issues, model waits on the host for a file or a store, or time.

Source: NCCL's documentation, "Using multiple NCCL communicators concurrently", "Group calls", "Point-to-point".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.comm.issued import POINT_TO_POINT, Issued, Waited

Entries = Sequence[Issued | Waited]
Key = tuple[object, ...]  # identifies a collective or message; equal on all ranks that take part in it


@dataclass
class _Unit:
    """The operations that one rank begins together: one, those of a batch, or none (a wait)."""

    rank: int
    operations: list[tuple[Issued, Key]] = field(default_factory=list)  # each with its collective's or message's key
    after: list[int] = field(default_factory=list)  # indices of the rank's units that must end before this one begins
    open: set[Key] = field(default_factory=set)  # keys of its operations that have not ended


@dataclass(frozen=True)
class Stuck:
    """An operation in which a rank waits forever, for rank `waits_for`, which waits itself or (`ended`) has ended."""

    rank: int
    operation: Issued
    waits_for: int
    ended: bool

    def __str__(self) -> str:
        why = f", for rank {self.waits_for}, which has ended" if self.ended else f", for rank {self.waits_for}"
        return f"rank {self.rank} waits in {self.operation}{why}"


@dataclass(frozen=True)
class PlayedOrder:
    """The outcome of a replay.

    circle   operations of ranks that wait for each other in a circle; (): no deadlock
    unlike   sentences on operations that differ between ranks; (): none
    """

    circle: tuple[Stuck, ...] = ()
    unlike: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether every operation ends and none differs between ranks."""
        return not self.circle and not self.unlike

    def text(self) -> str:
        """Returns the faults as text, a line for each; "" if there are none."""
        return "\n".join([*self.unlike, *map(str, self.circle)])


def strictest(ranks: Sequence[Entries]) -> PlayedOrder:
    """Returns the outcome if each rank's operations run one after another; `ranks`: each rank's entries, in order."""
    return _played(ranks, one_queue=True)


def side_by_side(ranks: Sequence[Entries]) -> PlayedOrder:
    """Returns the outcome if communicators run independently; `ranks`: each rank's entries, in order."""
    return _played(ranks, one_queue=False)


def communicators(entries: Entries) -> set[str]:
    """Returns names of the communicators that a rank makes.

    There is one for each group, and one for each pair of ranks that exchange messages outside of a batch.
    """
    made = set()
    for entry in entries:
        if isinstance(entry, Issued) and len(entry.ranks) > 1:
            alone = entry.op in POINT_TO_POINT and entry.batch is None
            made.add(f"{entry.group}|pair with {entry.peer}" if alone else entry.group)
    return made


# --- playing


def _played(ranks: Sequence[Entries], *, one_queue: bool) -> PlayedOrder:
    """Returns the outcome of all ranks' entries; `one_queue`: whether a rank has one queue, or one per communicator."""
    units = [_units(rank, entries, one_queue=one_queue) for rank, entries in enumerate(ranks)]
    unlike = _unlike(units)
    if unlike:
        return PlayedOrder(unlike=tuple(unlike))
    return PlayedOrder(circle=_run(units))


def _units(rank: int, entries: Entries, *, one_queue: bool) -> list[_Unit]:
    """Returns a rank's units in the order of issue, with `after` set. A wait is a unit without operations."""
    units: list[_Unit] = []
    unit_of: list[int] = []  # for each operation, in order: the index of its unit
    counts: dict[Key, int] = defaultdict(int)
    last_of: dict[str, int] = {}  # communicator -> index of its last unit so far
    waited, batch = -1, None
    for entry in entries:
        if isinstance(entry, Waited):
            after = [place for place in (waited, unit_of[entry.issued]) if place >= 0]
            waited, batch = len(units), None
            units.append(_Unit(rank, after=after))
            continue
        if entry.batch is None or entry.batch != batch:  # operations of one batch begin together: one unit
            units.append(_Unit(rank, after=[waited] if waited >= 0 else []))
            batch = entry.batch
        place = len(units) - 1
        unit_of.append(place)
        way = _way(rank, entry)
        key = (*way, counts[way])
        counts[way] += 1
        units[place].operations.append((entry, key))
        before = last_of.get(_communicator(rank, entry), place)
        if before != place:  # a communicator's operations run in their order
            units[place].after.append(before)
        last_of[_communicator(rank, entry)] = place
    if one_queue:  # each unit begins after the previous one has ended
        for place, unit in enumerate(units):
            unit.after = [place - 1] if place else []
    for unit in units:
        unit.open = {key for _, key in unit.operations}
    return units


def _way(rank: int, entry: Issued) -> Key:
    """Returns (group,) of a collective or (group, sender, receiver) of a message.

    The n-th operation with this key on one rank meets the n-th on the others.
    """
    if entry.op not in POINT_TO_POINT:
        return (entry.group,)
    ends = (rank, entry.peer) if entry.op == "send" else (entry.peer, rank)
    return (entry.group, *ends)


def _communicator(rank: int, entry: Issued) -> str:
    alone = entry.op in POINT_TO_POINT and entry.batch is None
    return f"{entry.group}|{min(rank, entry.peer)},{max(rank, entry.peer)}" if alone else entry.group


def _members(entry: Issued, rank: int) -> tuple[int, ...]:
    return (rank, entry.peer) if entry.op in POINT_TO_POINT else entry.ranks


def _unlike(units: list[list[_Unit]]) -> list[str]:
    """Returns a sentence for each group, or pair, whose operations differ between ranks in kind, dtype or size."""
    first: dict[Key, tuple[int, Issued]] = {}
    differing: dict[Key, str] = {}  # only the first of each `_way`, since later ones are shifted by it
    for rank, own in enumerate(units):
        for unit in own:
            for entry, key in unit.operations:
                other, theirs = first.setdefault(key, (rank, entry))
                if _alike(entry) != _alike(theirs):
                    differing.setdefault(key[:-1], f"rank {other} issues {theirs}, where rank {rank} issues {entry}")
    return list(differing.values())


def _alike(entry: Issued) -> tuple[object, ...]:
    """Returns (op, device, dtype, elements), which must be equal on all ranks; elements -1 if sizes may differ."""
    if entry.op in POINT_TO_POINT:
        return ("message", entry.device, entry.dtype, math.prod(entry.shape))
    size = -1 if entry.op in ("all_to_all", "gather", "scatter") else math.prod(entry.shape)
    return (entry.op, entry.device, entry.dtype, size)


def _run(units: list[list[_Unit]]) -> tuple[Stuck, ...]:
    """Runs all units until none can go on; returns the circle of operations that wait, () if all have ended."""
    begun: dict[Key, set[int]] = defaultdict(set)  # key -> ranks that have begun it
    holders: dict[Key, list[tuple[int, int]]] = defaultdict(list)  # key -> (rank, index) of its units
    missing = [[len(unit.after) for unit in own] for own in units]
    followers: list[list[list[int]]] = [[[] for _ in own] for own in units]
    for rank, own in enumerate(units):
        for place, unit in enumerate(own):
            for before in unit.after:
                followers[rank][before].append(place)
            for _, key in unit.operations:
                holders[key].append((rank, place))
    ready = [(rank, place) for rank, own in enumerate(units) for place, unit in enumerate(own) if not unit.after]
    ended: set[tuple[int, int]] = set()
    while ready:
        rank, place = ready.pop()
        for entry, key in units[rank][place].operations:
            begun[key].add(rank)
            if begun[key] == set(_members(entry, rank)):  # all of its ranks have begun it, so it runs and ends
                for at in holders[key]:
                    units[at[0]][at[1]].open.discard(key)
        for at in {(rank, place), *(at for _, key in units[rank][place].operations for at in holders[key])}:
            # a unit ends once it has begun and all of its operations have
            started = missing[at[0]][at[1]] == 0
            if at in ended or not started or units[at[0]][at[1]].open:
                continue
            ended.add(at)
            for follower in followers[at[0]][at[1]]:
                missing[at[0]][follower] -= 1
                if missing[at[0]][follower] == 0:
                    ready.append((at[0], follower))
    return _circle(units, missing, ended, begun)


def _circle(
    units: list[list[_Unit]], missing: list[list[int]], ended: set[tuple[int, int]], begun: dict[Key, set[int]]
) -> tuple[Stuck, ...]:
    """Returns the operations of ranks that wait for each other in a circle, or of one that waits for an ended rank.

    missing   for each rank and unit, how many units it still has to wait for
    ended     (rank, index) of units that have ended; `begun`: key -> ranks that have begun it
    """
    stuck = {rank: stopped for rank, own in enumerate(units)
             for stopped in _stopped(rank, own, missing[rank], ended, begun)}  # fmt: skip
    if not stuck:
        return ()
    path: list[int] = [min(stuck)]
    while (other := stuck[path[-1]].waits_for) in stuck and other not in path:
        path.append(other)
    circle = path[path.index(other) :] if other in path else path[-1:]
    return tuple(Stuck(rank, stuck[rank].operation, stuck[rank].waits_for, other not in stuck) for rank in circle)


def _stopped(
    rank: int, units: list[_Unit], missing: list[int], ended: set[tuple[int, int]], begun: dict[Key, set[int]]
) -> Iterator[Stuck]:
    """Yields the first operation that a rank has begun but that cannot end, if there is one."""
    for place, unit in enumerate(units):
        if (rank, place) in ended or missing[place]:
            continue
        for entry, key in unit.operations:
            if key in unit.open:
                absent = sorted(set(_members(entry, rank)) - begun[key])
                yield Stuck(rank, entry, absent[0], ended=False)
                return


def check(ranks: Sequence[Entries]) -> tuple[PlayedOrder, PlayedOrder]:
    """Returns (outcome of `strictest`, outcome of `side_by_side`); `ranks`: each rank's entries, in order."""
    return strictest(ranks), side_by_side(ranks)


__all__ = ["PlayedOrder", "Stuck", "check", "communicators", "side_by_side", "strictest"]
