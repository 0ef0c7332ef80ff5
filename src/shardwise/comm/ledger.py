"""The ledger: calls and bytes received by this rank, by tag, op and mesh axis. Filled by comm/observe.

Bytes for p ranks and a full tensor of n bytes: all-reduce 2n(p-1)/p; all-gather, reduce-scatter and all-to-all
n(p-1)/p, but for an all-to-all of uneven parts what the others sent; broadcast and point to point n. Control traffic (a
few numbers a step) has the tag "control".
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
    """An exchange in a rehearsal, beside which other operations ran.

    came         index on the axis of a sending rank -> bytes
    start, stop  counts of operations (`Ledger.clock`) when it began and when it was waited for
    """

    op: str
    axis: str
    came: dict[int, int]
    start: int
    stop: int


@dataclass
class LedgerEntry:
    """Number of calls, and bytes received, of one (tag, op, axis)."""

    calls: int = 0
    received_bytes: float = 0.0


@dataclass
class Ledger:
    """Calls and bytes by (tag, op, axis) since the last `clear`.

    entries   (tag, op, axis name) -> `LedgerEntry`
    loads     in a rehearsal of one rank: relative amount that each rank of an exchange brings; (): equal ones
    arrivals  in a rehearsal: (op, axis name, index of the sender on the axis) -> bytes, of all-to-alls and messages
    overlaps  in a rehearsal: exchanges that were not waited for at once
    dtypes    (tag, op) -> names of the floating-point dtypes sent; only if an `Observer` fills the ledger
    clock     in a rehearsal: returns the number of operations that have run
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
        """Adds one collective.

        tag             purpose;  op  a key of `FACTORS`;  axis  name of the mesh axis, of `ranks` ranks
        full_bytes      of the full tensor, from which the bytes received follow
        received_bytes  instead of these, if they are known; else None
        """
        entry = self.entries[tag, op, axis]
        entry.calls += 1
        entry.received_bytes += full_bytes * FACTORS[op](ranks) if received_bytes is None else received_bytes

    def leaving(self, tag: str, axis: str) -> None:
        """Called in a rehearsal when a message is sent; adds nothing, since the receiver counts it."""

    def received(self, *, axis: str | None = None, control: bool = False) -> float:
        """Returns the bytes received over `axis` (None: over all). `control`: whether tag "control" counts too."""
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
