"""The ledger: bytes received by this rank, by tag, op (`FACTORS`), axis. Filled by observe; subclass: observe/profile.

all-reduce 2n(p-1)/p; all-gather, reduce-scatter and all-to-all n(p-1)/p with n the full tensor (an all-to-all of
uneven parts: what the others sent); broadcast and point to point n. Control traffic (a few numbers a step) stands
under its own tag.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

FACTORS = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    "broadcast": lambda p: 1.0,
    "point_to_point": lambda p: 1.0,
    "barrier": lambda p: 0.0,
}


@dataclass(frozen=True)
class Overlap:
    """An exchange of a rehearsal that operations `start` to `stop` ran beside.

    came  bytes by the rank of the axis that sends them
    """

    op: str
    axis: str
    came: dict[int, int]
    start: int
    stop: int


@dataclass
class LedgerEntry:
    """Calls and bytes received of one (tag, op, axis)."""

    calls: int = 0
    received_bytes: float = 0.0


@dataclass
class Ledger:
    """Calls and bytes by (tag, op, axis) since the last `clear`.

    loads     in a rehearsal of one rank: how much each rank of an exchange brings; () for all alike
    arrivals  in a rehearsal: bytes by (op, axis, rank of it that they come from), where an op sends to each rank apart
    overlaps  in a rehearsal: the exchanges that were not waited for at once
    dtypes    names of the floating-point dtypes that were carried, by (tag, op); where an `Observer` fills the ledger
    clock     in a rehearsal: how many operations have run
    """

    entries: dict[tuple[str, str, str], LedgerEntry] = field(default_factory=lambda: defaultdict(LedgerEntry))
    loads: tuple[int, ...] = ()
    arrivals: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    overlaps: list[Overlap] = field(default_factory=list)
    dtypes: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    clock: Callable[[], int] = lambda: 0

    def record(
        self, tag: str, op: str, axis: str, full_bytes: int, ranks: int, received_bytes: float | None = None
    ) -> None:
        """Add one collective over `ranks` ranks whose full tensor has `full_bytes`; `received_bytes` where known."""
        entry = self.entries[tag, op, axis]
        entry.calls += 1
        entry.received_bytes += full_bytes * FACTORS[op](ranks) if received_bytes is None else received_bytes

    def leaving(self, tag: str, axis: str) -> None:
        """Note in a rehearsal that a message is sent. Adds nothing, since whoever receives it does so."""

    def received(self, *, axis: str | None = None, control: bool = False) -> float:
        """Returns the bytes received, of one axis or all, with or without control traffic."""
        return sum(
            entry.received_bytes
            for (tag, _, on), entry in self.entries.items()
            if (axis is None or on == axis) and (control or tag != "control")
        )

    def rows(self) -> list[dict]:
        """Returns {"tag", "op", "axis", "calls", "received_bytes"} for each (tag, op, axis), sorted."""
        return [
            {"tag": t, "op": o, "axis": a, "calls": e.calls, "received_bytes": round(e.received_bytes)}
            for (t, o, a), e in sorted(self.entries.items())
        ]

    def clear(self) -> None:
        """Drop all entries."""
        self.entries.clear()
        self.arrivals.clear()
        self.overlaps.clear()
        self.dtypes.clear()
