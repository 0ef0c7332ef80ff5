"""Pipeline schedules as pure data: for each rank, in which order it runs forwards and backwards of which micro-batch.

    pp=3, schedule=1f1b, 4 micro-batches (a digit is the micro-batch; B takes two units of time)

    rank 0  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    rank 2  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

F is a forward, B a whole backward. Zero-bubble schedules split it: I gives the gradient of the stage's input, which
the stage before waits for; W gives the gradients of the weights, which nobody waits for and which fills the gaps.

    gpipe            all forwards, then all backwards                    Huang et al. (2019)
    1f1b             at most p - r micro-batches in flight on rank r     Narayanan et al., PipeDream (2019)
    interleaved1f1b  several stages on each rank, in turns               Narayanan et al. (2021), section 2.2
    zbh1             1f1b's memory, a third of its bubble                Qi et al. (2024), section 2.3
    zbh2             no bubble between a rank's first and last op        Qi et al. (2024), section 2.3
    interleavedzb    interleaved1f1b with its backwards split            the same idea on several stages
    zbv              stages down the ranks and up again: a V             Qi et al. (2024), section 6
    dualpipev        the same V, F and B of two micro-batches in pairs   DeepSeek-AI (2025), DualPipeV

Times and memory are counted from the table, not from formulas; tests compare them with the formulas.

What this does not do: know how long messages take. In the table they take none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from shardwise.errors import RefusedPlan
from shardwise.layout.plan import Plan

SPLIT = ("zbh1", "zbh2", "interleavedzb", "zbv", "dualpipev")  # backwards in two parts
V_SHAPED = ("zbv", "dualpipev")
INTERLEAVED = ("interleaved1f1b", "interleavedzb")
SEVERAL = (*INTERLEAVED, *V_SHAPED)  # more than one stage on each rank


@dataclass(frozen=True, order=True)
class Op:
    """One box of the table: F forward, B whole backward, I backward of the input, W of the weights."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Times:
    """How long one stage takes for one micro-batch; B takes `input` + `weight`."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0

    def of(self, kind: str) -> float:
        """The time of one op of this kind."""
        return {"F": self.forward, "I": self.input, "W": self.weight, "B": self.input + self.weight}[kind]


Row = list[Op]


@dataclass(frozen=True)
class Schedule:
    """The order of ops on each rank. `rows[r]` is rank r's; `owner[s]` is the rank of stage s."""

    name: str
    microbatches: int
    owner: tuple[int, ...]
    rows: tuple[tuple[Op, ...], ...]

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Stages over all ranks."""
        return len(self.owner)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, first to last."""
        return tuple(stage for stage, owner in enumerate(self.owner) if owner == rank)

    def needs(self, op: Op) -> tuple[Op, ...]:
        """The ops that must be over before this one, wherever they run."""
        stage, batch = op.stage, op.microbatch
        if op.kind == "F":
            return (Op("F", stage - 1, batch),) if stage else ()
        if op.kind == "W":
            return (Op("I", stage, batch),)
        after = () if stage == self.stages - 1 else (self._backward_of(stage + 1, batch),)
        return (Op("F", stage, batch), *after)

    def _backward_of(self, stage: int, batch: int) -> Op:
        whole = Op("B", stage, batch)
        return whole if whole in self._all else Op("I", stage, batch)

    @cached_property
    def _all(self) -> frozenset[Op]:
        return frozenset(op for row in self.rows for op in row)

    def timeline(self, times: Times | None = None) -> dict[Op, tuple[float, float]]:
        """(start, end) of each op when every rank runs its row as early as it can.

        Raises `RefusedPlan` where the rows wait for each other in a circle.
        """
        times = times or Times()
        done: dict[Op, tuple[float, float]] = {}
        at = [0] * self.ranks
        free = [0.0] * self.ranks
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                while at[rank] < len(row):
                    op = row[at[rank]]
                    needed = self.needs(op)
                    if not all(need in done for need in needed):
                        break
                    start = max([free[rank], *(done[need][1] for need in needed)])
                    free[rank] = start + times.of(op.kind)
                    done[op] = (start, free[rank])
                    at[rank] += 1
                    moved = True
        stuck = [row[place] for row, place in zip(self.rows, at, strict=True) if place < len(row)]
        if stuck:
            raise RefusedPlan(
                f"schedule {self.name}: ops wait for each other in a circle: {', '.join(map(str, stuck))}"
            )
        return done

    def validate(self) -> None:
        """Raise `RefusedPlan` unless each stage does each micro-batch once, on its rank, in an order that can run."""
        ops = [op for row in self.rows for op in row]
        if len(ops) != len(set(ops)):
            raise RefusedPlan(f"schedule {self.name}: an op stands in it twice")
        wanted: set[Op] = set()
        for stage in range(self.stages):
            for batch in range(self.microbatches):
                whole = Op("B", stage, batch) in self._all
                wanted |= {Op(kind, stage, batch) for kind in (("F", "B") if whole else ("F", "I", "W"))}
        if set(ops) != wanted:
            odd = sorted(set(ops) ^ wanted)[0]
            raise RefusedPlan(f"schedule {self.name}: {odd} is {'missing' if odd in wanted else 'too many'}")
        for rank, row in enumerate(self.rows):
            for op in row:
                if self.owner[op.stage] != rank:
                    raise RefusedPlan(f"schedule {self.name}: {op} stands on rank {rank}, not {self.owner[op.stage]}")
        self.timeline()

    def span(self, times: Times | None = None) -> float:
        """From the first op of any rank to the last of any."""
        return max(end for _, end in self.timeline(times).values())

    def bubble(self, times: Times | None = None) -> float:
        """Share of the ranks' time, until all are done, in which they wait."""
        times = times or Times()
        busy = sum(times.of(op.kind) for row in self.rows for op in row)
        return 1.0 - busy / (self.ranks * self.span(times))

    def inner_bubble(self, times: Times | None = None) -> float:
        """Longest wait of a rank between its own first and last op, in units of time (the papers' bubble size)."""
        times = times or Times()
        done = self.timeline(times)
        waits = []
        for row in self.rows:
            spans = [done[op] for op in row]
            waits.append(spans[-1][1] - spans[0][0] - sum(end - start for start, end in spans))
        return max(waits)

    def live(self) -> tuple[int, ...]:
        """For each rank, the most forwards (of one stage and micro-batch each) that it holds for their backward."""
        most = []
        for row in self.rows:
            held = peak = 0
            for op in row:
                held += {"F": 1, "B": -1, "W": -1, "I": 0}[op.kind]
                peak = max(peak, held)
            most.append(peak)
        return tuple(most)

    def last_backward(self, rank: int) -> int:
        """Place, in the rank's row, of the op after which its gradients are complete."""
        return max(place for place, op in enumerate(self.rows[rank]) if op.kind in "BW")


# --- the rows of each schedule: (ranks, micro-batches, stages on each rank, rank) -> row


def _gpipe(p: int, m: int, v: int, rank: int) -> Row:
    return [Op("F", rank, i) for i in range(m)] + [Op("B", rank, i) for i in range(m)]


def _in_turns(forwards: Row, backwards: Row, ahead: int, delay: int | None) -> Row:
    """`ahead` forwards, then one forward and one backward in turns. `delay`: W comes that many backwards later."""
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


def _one_stage(p: int, m: int, rank: int, ahead: int, delay: int | None) -> Row:
    forwards = [Op("F", rank, i) for i in range(m)]
    backwards = [Op("B", rank, i) for i in range(m)]
    return _in_turns(forwards, backwards, min(ahead, m), delay)


def _1f1b(p: int, m: int, v: int, rank: int) -> Row:
    return _one_stage(p, m, rank, p - rank - 1, None)


def _zbh1(p: int, m: int, v: int, rank: int) -> Row:
    """Every rank holds p micro-batches, those of later ranks waiting for their W alone."""
    return _one_stage(p, m, rank, p - rank - 1, rank)


def _zbh2(p: int, m: int, v: int, rank: int) -> Row:
    """As many forwards ahead as a gradient takes to come back: 2p - 1 micro-batches on every rank."""
    return _one_stage(p, m, rank, 2 * (p - rank) - 2, 2 * rank)


def _rounds(p: int, m: int, v: int, rank: int, kind: str) -> Row:
    """p micro-batches through each of the rank's stages in turn, then the next p."""
    chunks = range(v) if kind == "F" else reversed(range(v))
    order = list(chunks)
    return [
        Op(kind, chunk * p + rank, i) for low in range(0, m, p) for chunk in order for i in range(low, min(low + p, m))
    ]


def _interleaved(p: int, m: int, v: int, rank: int) -> Row:
    ahead = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
    return _in_turns(_rounds(p, m, v, rank, "F"), _rounds(p, m, v, rank, "B"), ahead, None)


def _interleavedzb(p: int, m: int, v: int, rank: int) -> Row:
    ahead = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
    return _in_turns(_rounds(p, m, v, rank, "F"), _rounds(p, m, v, rank, "B"), ahead, 2 * rank)


class _V:
    """Writes the row of one rank of a V: its stage 0 on the way down, its stage 1 on the way up."""

    def __init__(self, p: int, m: int, rank: int):
        self.stage = (rank, 2 * p - 1 - rank)
        self.m = m
        self.row: Row = []
        self.next = {(kind, side): 0 for kind in "FIWB" for side in (0, 1)}
        self.waiting: Row = []  # W in the order of their I

    def add(self, *boxes: str) -> None:
        """Boxes such as "F0" or "I1": the next micro-batch of this kind and side. "W" is the oldest that waits."""
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
            if batch < self.m:
                self.row.append(Op(kind, self.stage[side], batch))
                if kind == "I":
                    self.waiting.append(Op("W", self.stage[side], batch))

    def count(self, kind: str, side: int) -> int:
        """How many of these were asked for."""
        return self.next[("F" if kind == "F" else "B", side)]


def _zbv(p: int, m: int, v: int, rank: int) -> Row:
    """Fewer than 2p - 1 micro-batches: the row for 2p - 1 without the others."""
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
    """The eight phases of DualPipeV; where F and B run as a pair there, F comes first here."""
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


ROWS: dict[str, Callable[[int, int, int, int], Row]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved1f1b": _interleaved,
    "zbh1": _zbh1,
    "zbh2": _zbh2,
    "interleavedzb": _interleavedzb,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}


def owners(name: str, ranks: int, per_rank: int) -> tuple[int, ...]:
    """The rank of each stage: around and around, or down and up again for a V."""
    if name in V_SHAPED:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(ranks * per_rank))


def make_schedule(name: str, ranks: int, microbatches: int, per_rank: int = 1) -> Schedule:
    """The table of a schedule; raises `RefusedPlan` where the schedule cannot be made for these numbers."""
    if name in V_SHAPED and per_rank != 2:
        raise RefusedPlan(f"schedule {name} has two stages on each rank, not {per_rank}")
    if name in INTERLEAVED and per_rank < 2:
        raise RefusedPlan(f"schedule {name} needs two stages or more on each rank: name them with stages=, or use 1f1b")
    if name not in SEVERAL and per_rank != 1:
        raise RefusedPlan(f"schedule {name} has one stage on each rank, not {per_rank}: use interleaved1f1b")
    if name in INTERLEAVED and microbatches % ranks:
        raise RefusedPlan(
            f"schedule {name} sends micro-batches through in rounds of pp={ranks}: microbatches={microbatches} is not "
            "a multiple of it"
        )
    if name == "dualpipev" and microbatches < 2 * ranks:
        raise RefusedPlan(
            f"schedule dualpipev fills both ways of its V before it turns: it needs microbatches of at least "
            f"2 pp = {2 * ranks}, got {microbatches}"
        )
    rows = tuple(tuple(ROWS[name](ranks, microbatches, per_rank, rank)) for rank in range(ranks))
    schedule = Schedule(name, microbatches, owners(name, ranks, per_rank), rows)
    schedule.validate()
    return schedule


def plain_schedule(owner: tuple[int, ...], microbatches: int) -> Schedule:
    """For any number of micro-batches, on stages that lie anywhere: all forwards, then all backwards."""
    rows = []
    for rank in range(max(owner) + 1):
        mine = [stage for stage, at in enumerate(owner) if at == rank]
        forwards = [Op("F", stage, i) for stage in mine for i in range(microbatches)]
        rows.append((*forwards, *(Op("B", stage, i) for stage in reversed(mine) for i in range(microbatches))))
    schedule = Schedule("plain", microbatches, owner, tuple(rows))
    schedule.validate()
    return schedule


LONG = 16  # micro-batches for each model stage; more repeat what is between filling and emptying
TOLD = 4  # as many tell whether a schedule can be made at all


def few_microbatches(ranks: int, microbatches: int, chunks: int, each: int = LONG) -> int:
    """As many, or where there are very many, fewer that show the same: filling, repeating, emptying.

    each   of them for each model stage
    """
    most = each * ranks * chunks
    return microbatches if microbatches < most + 2 * ranks else most + microbatches % ranks


def schedule_of(plan: Plan) -> Schedule:
    """The table that a plan asks for."""
    if plan.pp == 1:
        raise RefusedPlan(f"plan {plan} has no pipeline: pp is 1")
    return make_schedule(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_rank)
