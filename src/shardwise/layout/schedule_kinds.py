"""`KINDS`: the facts of each pipeline schedule, with the order of its ops. Plans, rules, forecasts, search read it.

A new schedule is a function that returns a rank's ops, and one entry of the table at the end of this file.

    gpipe            all forwards, then all backwards                    Huang et al. (2019)
    1f1b             at most p - r micro-batches in flight on rank r     Narayanan et al., PipeDream (2019)
    interleaved1f1b  several stages on each rank, in turns               Narayanan et al. (2021), section 2.2
    zbh1             1f1b's memory, a third of its bubble                Qi et al. (2024), section 2.3
    zbh2             no bubble between a rank's first and last op        Qi et al. (2024), section 2.3
    interleavedzb    interleaved1f1b with its backwards split            the same idea on several stages
    zbv              stages down the ranks and up again: a V             Qi et al. (2024), section 6
    dualpipev        the same V, F and B of two micro-batches in pairs   DeepSeek-AI (2025), DualPipeV
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Op:
    """One op of a schedule; `kind`: F forward, B whole backward, I gradient of the input, W of the weights."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Row = list[Op]


# --- functions that return one rank's row: p ranks, m micro-batches, v stages on each rank


def _gpipe(p: int, m: int, v: int, rank: int) -> Row:
    return [Op("F", rank, i) for i in range(m)] + [Op("B", rank, i) for i in range(m)]


def _in_turns(forwards: Row, backwards: Row, ahead: int, delay: int | None) -> Row:
    """Returns a row of `ahead` forwards, then a forward and a backward in turns.

    delay  the number of backwards by which the W of one comes later than its I; None: backwards are not split
    """
    row = forwards[:ahead]
    pending: Row = []
    for place, backward in enumerate(backwards):
        row += forwards[ahead + place : ahead + place + 1]
        if delay is None:
            row.append(backward)
            continue
        row.append(Op("I", backward.stage, backward.microbatch))
        pending.append(Op("W", backward.stage, backward.microbatch))
        if len(pending) > delay:
            row.append(pending.pop(0))
    return row + pending


def _one_stage(m: int, rank: int, ahead: int, delay: int | None) -> Row:
    """Returns `_in_turns` of the forwards and backwards of all m micro-batches on the stage of `rank`."""
    forwards = [Op("F", rank, i) for i in range(m)]
    backwards = [Op("B", rank, i) for i in range(m)]
    return _in_turns(forwards, backwards, min(ahead, m), delay)


def _1f1b(p: int, m: int, v: int, rank: int) -> Row:
    return _one_stage(m, rank, p - rank - 1, None)


def _zbh1(p: int, m: int, v: int, rank: int) -> Row:
    """Returns ZB-H1's row, in which every rank keeps p micro-batches, on later ranks some that lack only their W."""
    return _one_stage(m, rank, p - rank - 1, rank)


def _zbh2(p: int, m: int, v: int, rank: int) -> Row:
    """Returns ZB-H2's row, with forwards ahead until the first gradient is back; a rank keeps 2p - 1 micro-batches."""
    return _one_stage(m, rank, 2 * (p - rank) - 2, 2 * rank)


def _rounds(p: int, m: int, v: int, rank: int, kind: str) -> Row:
    """Returns the ops of `kind` ("F" or "B"): p micro-batches through each of the rank's stages, then the next p."""
    chunks = range(v) if kind == "F" else reversed(range(v))
    order = list(chunks)  # a backward goes through the stages from the last
    return [
        Op(kind, chunk * p + rank, i) for low in range(0, m, p) for chunk in order for i in range(low, min(low + p, m))
    ]


def _interleaved(p: int, m: int, v: int, rank: int) -> Row:
    # two for each later rank, and p micro-batches through all of the rank's stages but the last
    ahead = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
    return _in_turns(_rounds(p, m, v, rank, "F"), _rounds(p, m, v, rank, "B"), ahead, None)


def _interleavedzb(p: int, m: int, v: int, rank: int) -> Row:
    ahead = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
    return _in_turns(_rounds(p, m, v, rank, "F"), _rounds(p, m, v, rank, "B"), ahead, 2 * rank)


class _V:
    """Builds the row of one rank whose first stage (side 0) lies on the way down the ranks, its second (1) up again."""

    def __init__(self, p: int, m: int, rank: int):
        self.stage = (rank, 2 * p - 1 - rank)
        self.m = m
        self.row: Row = []
        self.next = {(kind, side): 0 for kind in "FIWB" for side in (0, 1)}
        self.waiting: Row = []  # W in the order of their I

    def add(self, *boxes: str) -> None:
        """Appends ops such as "F0" or "I1", kind and side (0 down, 1 up), of that kind's next micro-batch.

        "W0" is the oldest W of that side that waits, "W" of any side. Micro-batches beyond m are skipped.
        """
        for box in boxes:
            if box == "W":
                if self.waiting:
                    self.row.append(self.waiting.pop(0))
                continue
            kind, side = box[0], int(box[1])
            counter = ("F", side) if kind == "F" else ("B", side)  # I and B count together
            if kind == "W":
                place = next((i for i, op in enumerate(self.waiting) if op.stage == self.stage[side]), None)
                if place is not None:
                    self.row.append(self.waiting.pop(place))
                continue
            batch = self.next[counter]
            self.next[counter] += 1
            if batch < self.m:  # phases are written for more micro-batches than there may be
                self.row.append(Op(kind, self.stage[side], batch))
                if kind == "I":
                    self.waiting.append(Op("W", self.stage[side], batch))

    def count(self, kind: str, side: int) -> int:
        """Returns how many ops of a kind and side `add` was given; B and I count together."""
        return self.next[("F" if kind == "F" else "B", side)]


def _zbv(p: int, m: int, v: int, rank: int) -> Row:
    """Returns ZBV's row; for m below 2p - 1 the row for 2p - 1 micro-batches without those from m on."""
    padded = max(m, 2 * p - 1)
    row = _V(p, m, rank)
    row.add(*["F0"] * (2 * (p - rank) - 1))
    row.add(*["F1", "F0"] * rank)
    row.add(*["F1", "I1", "W1"] * (p - rank))
    while row.count("F", 1) < padded:
        row.add(*(["F0"] if row.count("F", 0) < padded else []), "I0", "W0", "F1", "I1", "W1")
    row.add(*["I0", "I1"] * rank)
    row.add(*["I0", "W0"] * (p - rank))
    return row.row + sorted(row.waiting, key=lambda op: (-op.stage, op.microbatch))


def _dualpipev(p: int, m: int, v: int, rank: int) -> Row:
    """Returns DualPipeV's row, its eight phases; F comes first where DualPipeV runs F and B as a pair."""
    row = _V(p, m, rank)
    left = p - rank - 1
    row.add(*["F0"] * (2 * left))
    row.add(*["F0", "F1"] * (rank + 1))
    row.add(*["I1", "W", "F1"] * left)
    row.add(*["F0", "B1", "F1", "B0"] * (m - 2 * p + rank + 1))
    row.add(*["B1", "F1", "B0"] * left)
    boxes = ["B1", "B0"] * (rank + 1)
    whole = rank + 1  # the first half keeps whole backwards, the second leaves its W for later
    row.add(*boxes[:whole], *(box.replace("B", "I") for box in boxes[whole:]))
    row.add(*["W", "I0"] * left)
    return row.row + row.waiting


# --- the table


@dataclass(frozen=True)
class Kind:
    """The facts of one schedule. p: ranks, m: micro-batches, v: stages on each rank.

    row        (p, m, v, rank) -> the rank's ops in order
    placed     placement of stages: "one" on each rank, "around" the ranks v times, or "v", down the ranks and up again
    in_flight  (p, m, v, rank) -> most micro-batches kept at once, in units of all the rank's layers; may exceed m
    bubble     its bubble as a fraction of 1f1b's on as many stages, an estimate for the search
    split      Whether backwards come in two parts, I and W
    searched   Whether a search tries it by default
    least      p -> the fewest micro-batches
    """

    row: Callable[[int, int, int, int], Row]
    placed: str
    in_flight: Callable[[int, int, int, int], float]
    bubble: float
    split: bool = False
    searched: bool = False
    least: Callable[[int], int] = lambda p: 1

    @property
    def stages_per_rank(self) -> int:
        """Returns the number of stages on each rank unless a plan says otherwise."""
        return 1 if self.placed == "one" else 2

    def misfit(self, p: int, m: int, v: int) -> str | None:
        """Returns why the schedule cannot be made for these numbers, a text after its name; None if it can."""
        # a V goes down the ranks and back, so each has two stages
        if self.placed == "v" and v != 2:
            return f"has two stages on each rank, not {v}"
        if self.placed == "around" and v < 2:
            return "needs two stages or more on each rank: give stages_per_rank=, name them with stages=, or use 1f1b"
        if self.placed == "one" and v != 1:
            return f"has one stage on each rank, not {v}: use interleaved1f1b"
        # each round fills the pipeline once
        if self.placed == "around" and m % p:
            return f"sends micro-batches through in rounds of pp={p}: microbatches={m} is not a multiple of it"
        if m < self.least(p):
            return (
                f"fills both ways of its V before it turns: it needs microbatches of at least 2 pp = {self.least(p)}, "
                f"got {m}"
            )
        return None

    def owners(self, p: int, v: int) -> tuple[int, ...]:
        """Returns the rank of each of the p * v stages."""
        if self.placed == "v":
            return (*range(p), *reversed(range(p)))
        return tuple(stage % p for stage in range(p * v))


def _in_rounds(p: int, m: int, v: int, rank: int) -> float:
    return min(m * v, (p - rank - 1) * 2 + (v - 1) * p + 1) / v


KINDS: dict[str, Kind] = {
    "gpipe": Kind(_gpipe, "one", lambda p, m, v, rank: m, 1.0),
    "1f1b": Kind(_1f1b, "one", lambda p, m, v, rank: p - rank, 1.0, searched=True),
    "interleaved1f1b": Kind(_interleaved, "around", _in_rounds, 1.0, searched=True),
    "zbh1": Kind(_zbh1, "one", lambda p, m, v, rank: p, 1 / 3, split=True, searched=True),
    "zbh2": Kind(_zbh2, "one", lambda p, m, v, rank: 2 * p - 1, 0.0, split=True),
    "interleavedzb": Kind(_interleavedzb, "around", lambda p, m, v, rank: _in_rounds(p, m, v, 0), 1 / 3, split=True),
    "zbv": Kind(_zbv, "v", lambda p, m, v, rank: p, 0.1, split=True),
    "dualpipev": Kind(_dualpipev, "v", lambda p, m, v, rank: p + 0.5, 0.1, split=True, least=lambda p: 2 * p),
}


def in_flight(name: str, p: int, m: int, v: int, rank: int) -> float:
    """Returns the micro-batches that a rank keeps at once, in units of all its layers; 1.0 if p is 1 (no pipeline)."""
    return float(min(m, KINDS[name].in_flight(p, m, v, rank))) if p > 1 else 1.0


def listed(which: Callable[[Kind], bool]) -> str:
    """Returns the names of the schedules for which `which(kind)`, in words, such as "zbh1, zbh2 and zbv"."""
    *names, last = [name for name, kind in KINDS.items() if which(kind)]
    return f"{', '.join(names)} and {last}" if names else last
