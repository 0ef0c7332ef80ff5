"""Finds from the records of all ranks the rank at fault, and words the message.

Certain at once, whatever the deadlines are:
    differ    two ranks issued different collectives under one number of a group
    never     ranks wait for each other in a circle, or for one that has ended, and nothing moved between two looks

After the deadline of a phase, counted from the last event in the rank's record:
    late      a rank that waits for nobody does nothing: it is stopped, its interpreter is locked, or it works or sleeps
    wire      all ranks of a group are in a collective, and it does not end

A rank that waits for another is never late itself; the other one is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.guard.points import PHASES
from shardwise.guard.records import DONE, RING, GroupRecord, IssuedCollective, RankSnapshot, Reader
from shardwise.guard.stacks import process_state

# collectives whose number of elements must agree; in the others ranks may have different ones
_EVEN = {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"}
_BEAT_S = 5.0  # after so many seconds without a beat no Python thread runs


@dataclass(frozen=True)
class Deadlines:
    """Seconds within which a rank must do something, by the deadline of its phase (guard/points); 0: no limit.

    start_s  until its first step;  step_s  in a step or an evaluation;  save_s  while a checkpoint is written
    """

    start_s: float = 1800.0
    step_s: float = 1200.0
    save_s: float = 1800.0

    def of(self, phase: str) -> float:
        """Returns for how many seconds a rank may show no progress in the phase named `phase`; 0: no limit."""
        return float(getattr(self, f"{_deadline(phase)}_s"))


ALIKE = "let every rank make the same calls, in the same order"


@dataclass(frozen=True)
class Finding:
    """A hang that was found.

    reason   "differ", "never", "late" or "wire", as in this module's text
    rank     the first one at fault
    lines    of the message
    retry    Whether the same run may get further when it is started again
    waiting  rank -> a line on where it is or for whom it waits
    """

    reason: str
    rank: int
    lines: tuple[str, ...]
    retry: bool
    waiting: dict[int, str] = field(default_factory=dict)

    def text(self) -> str:
        """Returns the whole message."""
        again = "starting again may help" if self.retry else f"starting again would come to the same place: {ALIKE}"
        return "\n".join([*self.lines, *(self.waiting[rank] for rank in sorted(self.waiting)), again])


def differ(first: IssuedCollective, other: IssuedCollective, places: bool = False) -> str:
    """Returns in what two collectives differ that must be the same ("the shape", ...); "" if they do not.

    places   Whether the places in the code must be the same too
    """
    if first.op != other.op:
        return "the operation"
    # a record that is full may lack a dtype, which is no difference
    if first.dtype and other.dtype and first.dtype != other.dtype:
        return "the dtype"
    # ranks may have unequal pieces in some operations, not in those of `_EVEN`
    if first.op in _EVEN and first.elements != other.elements:
        return "the shape"
    if first.tag != other.tag:
        return "its purpose"
    # only where asked for: ranks may issue equal collectives from two branches of the code
    return "the place in the code" if places and first.place != other.place else ""


class RankWatch:
    """Finds hangs in the records of ranks, each time `look` is called.

    readers    rank -> reader of its record; ranks may be added
    deadlines  None: only hangs that are certain are found
    """

    def __init__(self, readers: Mapping[int, Reader], deadlines: Deadlines | None) -> None:
        self.readers, self.deadlines = readers, deadlines
        self._compared: dict[str, int] = {}  # group's key -> number up to which its collectives were compared
        self._before: dict[int, tuple[int, str, int]] = {}  # stuck ranks of the last look -> (events, group, number)

    def see(self) -> dict[int, RankSnapshot]:
        """Returns {rank: snapshot of its record} of the ranks that have begun their records."""
        seen_by_rank = {rank: reader.see() for rank, reader in self.readers.items()}
        return {rank: seen for rank, seen in seen_by_rank.items() if seen is not None}

    def look(self, now: float, gone: Iterable[int] = ()) -> Finding | None:
        """Returns the `Finding` of a hang; None if nothing hangs. A circle of waits is found at the second call.

        now   seconds of the monotonic clock
        gone  ranks whose processes have ended
        """
        ranks, ended = self.see(), set(gone)
        # a rank that raised is not counted as ended, since its own report says why and is on its way
        ended |= {rank for rank, seen in ranks.items() if seen.state == DONE}
        finding = self._differing(ranks) or self._never(ranks, ended)
        if finding is None and self.deadlines is not None:
            finding = self._late(ranks, ended, now, self.deadlines)
        return finding

    def differing(self) -> Finding | None:
        """Returns a finding on the first recorded collective in which ranks differ; None if they do not."""
        return self._differing(self.see())

    def waiting(self) -> dict[int, str]:
        """Returns {rank: a line on where it waits and for whom} of each rank that waits for absent ones."""
        ranks = self.see()
        absent = {rank: missing_of(seen, ranks) for rank, seen in ranks.items() if seen.waits_key and not seen.ended}
        return {rank: self.waiting_line(ranks[rank], missing) for rank, missing in absent.items() if missing}

    # --- certain

    def _differing(self, ranks: Mapping[int, RankSnapshot]) -> Finding | None:
        """Returns a finding on the first collective that ranks issued differently, or None; compares each one once."""
        for key, group in _collective_groups(ranks):
            members = [rank for rank in group.ranks if rank in ranks and key in ranks[rank].groups]
            # one rank alone cannot be compared
            if len(members) < 2:
                continue
            issued = {rank: ranks[rank].groups[key].issued for rank in members}
            # up to the second largest number, which two ranks have; a third may not have come to it yet
            last = sorted(issued.values())[-2]
            for number in range(max(self._compared.get(key, 0), last - RING + 2) + 1, last + 1):
                entries = {
                    rank: self.readers[rank].entry(ranks[rank].groups[key], number)
                    for rank in members
                    if issued[rank] >= number
                }
                kept = {rank: entry for rank, entry in entries.items() if entry is not None}
                finding = _odd_one(kept, key, number, group)
                if finding is not None:
                    return finding
            # collectives that the slowest rank has not issued yet are compared again once it has
            self._compared[key] = min(last, min(issued.values()))
        return None

    def _never(self, ranks: Mapping[int, RankSnapshot], ended: set[int]) -> Finding | None:
        """Returns a finding on ranks that wait in a circle, or for one that has ended, and never go on; else None."""
        stuck = {rank for rank, seen in ranks.items() if seen.waits_key and rank not in ended}
        missing = {rank: missing_of(ranks[rank], ranks) for rank in stuck}
        while True:
            # a rank that waits only for ranks that go on will go on too, and then those that wait only for it
            free = {rank for rank in stuck if not any(other in stuck or other in ended for other in missing[rank])}
            if not free:
                break
            stuck -= free
        now = {rank: (ranks[rank].events, ranks[rank].waits_key, ranks[rank].waits_number) for rank in stuck}
        same = {rank for rank in stuck if self._before.get(rank) == now[rank]}
        self._before = now
        if not stuck or same != stuck:
            return None  # seen once: a record may have been half-way
        return self._never_finding(ranks, ended, sorted(stuck), missing)

    def _never_finding(
        self, ranks: Mapping[int, RankSnapshot], ended: set[int], stuck: list[int], missing: Mapping[int, list[int]]
    ) -> Finding:
        """Returns the finding for the ranks `stuck`, which never go on.

        ended    ranks that have ended;  missing  rank -> ranks that it waits for
        """
        over = sorted({other for rank in stuck for other in missing[rank] if other in ended})
        waits = {rank: self.waiting_line(ranks[rank], missing[rank]) for rank in stuck}
        lines = []
        # a rank that has ended is the cause; without one the ranks wait for each other
        if over:
            first, how = over[0], "has ended"
            # DONE: the rank's function has returned
            if over[0] in ranks and ranks[over[0]].state == DONE:
                how = "has returned"
            lines.append(f"rank {first} {how} and will not come to a collective of {_named(stuck)}:")
            lines += [f"rank {rank} was last in {text}" for rank in over if (text := self.last_line(rank, ranks))]
        else:
            # in a circle the rank that has issued least is most often the one that left out or added a call
            first = min(stuck, key=lambda rank: sum(group.issued for group in ranks[rank].groups.values()))
            lines.append(f"{_named(stuck)} wait for each other, each in another collective:")
        for key in sorted({ranks[rank].waits_key for rank in stuck}):
            lines += self.parted(key, ranks)
        return Finding("never", first, tuple(lines), False, waits)

    def parted(self, key: str, ranks: Mapping[int, RankSnapshot]) -> list[str]:
        """Returns [a line on where ranks of the group `key` first came from different places in the code], or []."""
        members = {rank: seen for rank, seen in ranks.items() if key in seen.groups}
        last = min((seen.groups[key].issued for seen in members.values()), default=0)
        # records hold the last `RING` collectives; before those nothing is kept
        for number in range(max(1, last - RING + 2), last + 1):
            entries = {rank: self.readers[rank].entry(seen.groups[key], number) for rank, seen in members.items()}
            places = {rank: entry.place for rank, entry in entries.items() if entry is not None}
            # the first number that two came to differently is where their paths parted
            if len(set(places.values())) > 1:
                words = "; ".join(f"rank {rank} from {place}" for rank, place in sorted(places.items()))
                return [f"they came to number {number} of that axis from different places already: {words}"]
        return []

    # --- after a deadline

    def _late(
        self, ranks: Mapping[int, RankSnapshot], ended: set[int], now: float, deadlines: Deadlines
    ) -> Finding | None:
        """Returns a finding on a rank past its deadline that waits for no rank which can be judged; else None."""
        late = []
        for rank, seen in ranks.items():
            limit = deadlines.of(seen.phase)
            if rank in ended or not limit or now - seen.moved <= limit:
                continue
            absent = missing_of(seen, ranks) if seen.waits_key else []
            if any(other in ended for other in absent):  # whom it waits for has ended
                return self._never_finding(ranks, ended, [rank], {rank: absent})
            if not absent:  # otherwise the rank that it waits for is judged
                late.append((bool(seen.waits_key), seen.moved, rank))
        if not late:
            return None
        in_collective, _, rank = min(late)
        seen = ranks[rank]
        phase = _deadline(seen.phase)
        age = f"for {now - seen.moved:.0f} s (the deadline of a {phase} is {deadlines.of(seen.phase):g} s)"
        waits = {
            other: self.waiting_line(snapshot, missing_of(snapshot, ranks))
            for other, snapshot in ranks.items()
            if snapshot.waits_key and other not in ended and other != rank
        }
        place = f"in step {seen.step + 1}, {phase}" if seen.step >= 0 else f"in its {phase}"
        # every rank is in it, so the network or a device is at fault and no rank's code
        if in_collective:
            lines = [f"a collective whose ranks have all come to it has not ended {age}: {self.waiting_line(seen, [])}"]
            return Finding("wire", rank, tuple(lines), True, waits)
        lines = [f"rank {rank} has done nothing {age}, {place}: {_why(seen, now)}"]
        last = self.last_line(rank, ranks)
        lines += [f"its last collective was {last}"] if last else []
        return Finding("late", rank, tuple(lines), True, waits)

    # --- in words

    def waiting_line(self, seen: RankSnapshot, absent: list[int]) -> str:
        """Returns a line on where the rank of `seen` waits, and for which ranks (`absent`)."""
        group = seen.groups[seen.waits_key]
        entry = self.readers[seen.rank].entry(group, seen.waits_number)
        if group.between_two:
            start, goal = group.ranks
            what = f"a message from rank {start} to rank {goal}"
        else:
            what = f"number {seen.waits_number} of axis {group.axis}"
            what = f"{entry} ({what}), from {entry.place}" if entry is not None else what
        whom = f" for {_named(absent)}" if absent else ""
        return f"rank {seen.rank} waits{whom} in {what}"

    def last_line(self, rank: int, ranks: Mapping[int, RankSnapshot]) -> str:
        """Returns the newest collective of a rank in words; "" if it has issued none."""
        last = self.readers[rank].last(ranks[rank]) if rank in ranks else None
        if last is None:
            return ""
        group, entry = last
        return f"{entry} (number {entry.number} of axis {group.axis}), from {entry.place}"


def missing_of(seen: RankSnapshot, ranks: Mapping[int, RankSnapshot]) -> list[int]:
    """Returns the ranks of this host that have not come to the collective in which the rank of `seen` waits."""
    group = seen.groups.get(seen.waits_key)
    if group is None:  # it waits in no collective
        return []
    missing = []
    for rank in group.ranks:
        other = ranks.get(rank)
        if other is None or rank == seen.rank:
            continue  # on another host, or not begun
        theirs = other.groups.get(seen.waits_key)
        if theirs is None or theirs.issued < seen.waits_number:  # None: it has issued none in this group
            missing.append(rank)
    return missing


def _collective_groups(ranks: Mapping[int, RankSnapshot]) -> list[tuple[str, GroupRecord]]:
    """Returns (key, group) of all groups that carry collectives, each once."""
    groups = {key: group for seen in ranks.values() for key, group in seen.groups.items() if not group.between_two}
    return list(groups.items())


def _odd_one(entries: Mapping[int, IssuedCollective], key: str, number: int, group: GroupRecord) -> Finding | None:
    """Returns a finding on the rank whose collective differs from the majority's; None if all agree.

    entries  rank -> its collective of this number in the group
    """
    for first in sorted(entries):
        for other in sorted(entries):
            what = differ(entries[first], entries[other]) if first < other else ""
            if not what:
                continue
            odd = min((first, other), key=lambda rank: (_alike(entries, rank), -rank))
            head = f"ranks came to different collectives ({what} differs): number {number} of axis {group.axis}"
            where = {rank: f"rank {rank}: {entry}, from {entry.place}" for rank, entry in entries.items()}
            return Finding("differ", odd, (head,), False, where)
    return None


def _alike(entries: Mapping[int, IssuedCollective], rank: int) -> int:
    """Returns how many ranks issued the same collective as `rank`, itself included."""
    return sum(not differ(entries[rank], entry) for entry in entries.values())


def _why(seen: RankSnapshot, now: float) -> str:
    """Returns in words why a rank makes no progress."""
    state = process_state(seen.pid)
    if state in ("T", "t"):
        return "its process is stopped (SIGSTOP)"
    if now - seen.beat > _BEAT_S:
        return f"its interpreter is locked: no Python thread has run for {now - seen.beat:.0f} s"
    return "it works or sleeps outside of collectives; its stack tells where"


def _deadline(phase: str) -> str:
    """Returns the name of a phase's deadline: "start", "step" or "save"."""
    return PHASES[phase].deadline if phase in PHASES else "step"


def _named(ranks: list[int]) -> str:
    """Returns "rank 3" or "ranks 1, 2", at most 8 of them."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
