"""Pipeline schedules as pure data, made from an entry of schedule_kinds: the order of ops on each rank.

    pp=3, schedule=1f1b, 4 micro-batches (a digit is the micro-batch; B takes two units of time)

    rank 0  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    rank 2  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

F is a forward, B a whole backward. Zero-bubble schedules split B. I computes the gradient of the stage's input, for
which the stage before waits; W the gradients of the weights, for which nobody waits, so that it fills the gaps.

Which schedules there are, and what each is: `schedule_kinds`.

Times and memory are counted from the table, not from formulas; tests compare them with the formulas.

What this does not do: know how long messages take. In the table they take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardwise.errors import RefusedPlan
from shardwise.layout.schedule_kinds import KINDS, Op
from shardwise.layout.timing import in_order, play

if TYPE_CHECKING:
    from shardwise.layout.plan import Plan


Sent = tuple[str, int, int, int]  # a message: ("F", or "B" for a gradient; from stage; to stage; micro-batch)


@dataclass(frozen=True)
class Times:
    """Times of one stage for one micro-batch, in any unit; B takes `input` + `weight`."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0

    def of(self, kind: str) -> float:
        """Returns the time of one op of this kind ("F", "B", "I" or "W")."""
        return {"F": self.forward, "I": self.input, "W": self.weight, "B": self.input + self.weight}[kind]


@dataclass(frozen=True)
class Schedule:
    """The order of ops on each rank. `rows[r]`: ops of rank r in order; `owner[s]`: the rank of stage s."""

    name: str  # of schedule_kinds
    microbatches: int
    owner: tuple[int, ...]
    rows: tuple[tuple[Op, ...], ...]

    @property
    def ranks(self) -> int:
        """Returns how many ranks the pipeline has."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Returns how many stages there are over all ranks."""
        return len(self.owner)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that a rank runs, first to last."""
        return tuple(stage for stage, owner in enumerate(self.owner) if owner == rank)

    @cached_property
    def _all(self) -> frozenset[Op]:
        return frozenset(op for row in self.rows for op in row)

    @cached_property
    def brought(self) -> tuple[dict[tuple[str, int], list[tuple[int, int, int]]], ...]:
        """Returns, for each rank, ("F" or "B", sender) -> [(from stage, to stage, micro-batch)] of messages to it.

        In the order in which they are sent; "F": a forward's output, "B": a gradient. Between two stages on one rank
        there is no message.
        """
        messages: list[dict[tuple[str, int], list[tuple[int, int, int]]]] = [{} for _ in self.rows]
        for rank, row in enumerate(self.rows):
            for op in row:
                # I brings the gradient that a whole backward would; W's gradients stay where they are made
                goal = op.stage + 1 if op.kind == "F" else op.stage - 1
                if op.kind != "W" and 0 <= goal < len(self.owner) and self.owner[goal] != rank:
                    way = "F" if op.kind == "F" else "B", rank
                    messages[self.owner[goal]].setdefault(way, []).append((op.stage, goal, op.microbatch))
        return tuple(messages)

    @cached_property
    def rounds(self) -> tuple[tuple[tuple[Sent, ...], ...], ...]:
        """Returns, for each rank, its rounds: the messages (`Sent`) that it sends or receives at one time of the table.

        All ranks issue the rounds in one order, so that ranks cannot deadlock even if a message is sent only once its
        receiver has posted the receive.
        """
        at: dict[float, list[Sent]] = {}
        for op, (_, end) in self.timeline().items():
            goal = op.stage + 1 if op.kind == "F" else op.stage - 1
            # weights' gradients (W) are sent to nobody; neighbours on one rank share memory
            if op.kind != "W" and 0 <= goal < len(self.owner) and self.owner[goal] != self.owner[op.stage]:
                at.setdefault(end, []).append(("F" if op.kind == "F" else "B", op.stage, goal, op.microbatch))
        # within one time by kind and stage, the same on every rank
        times = [sorted(at[end]) for end in sorted(at)]
        return tuple(
            tuple(mine for messages in times if (mine := tuple(m for m in messages if rank in self._ends(m))))
            for rank in range(self.ranks)
        )

    def _ends(self, message: Sent) -> tuple[int, int]:
        """Returns (rank that sends, rank that receives) of a message."""
        _, source, goal, _ = message
        return self.owner[source], self.owner[goal]

    @cached_property
    def in_order(self) -> list[tuple[int, Op, int, int]]:
        """Returns all ops, each after the one that it waits for (`timing.in_order`), the same for any times."""
        return in_order(self)

    def timeline(self, times: Times | None = None) -> dict[Op, tuple[float, float]]:
        """Returns op -> (start, end) if every rank runs its row as early as it can. `times` None: 1 for F, I and W.

        Raises `RefusedPlan` if the rows wait for each other in a circle.
        """
        times = times or Times()
        forward, back, weight = ([seconds] * self.stages for seconds in (times.forward, times.input, times.weight))
        played = play(self, forward, back, weight, [0.0] * (self.stages - 1))
        return {op: (start, end) for _, op, start, end in played.ops}

    def validate(self) -> None:
        """Raises `RefusedPlan` unless each stage does each micro-batch once, on its rank, in an order that can run."""
        ops = [op for row in self.rows for op in row]
        if len(ops) != len(set(ops)):
            raise RefusedPlan(f"schedule {self.name}: an op stands in it twice")
        wanted: set[Op] = set()
        for stage in range(self.stages):
            for batch in range(self.microbatches):
                # a backward is one op, or two: of inputs (I) and of weights (W)
                whole = Op("B", stage, batch) in self._all
                wanted |= {Op(kind, stage, batch) for kind in (("F", "B") if whole else ("F", "I", "W"))}
        if set(ops) != wanted:
            odd = sorted(set(ops) ^ wanted)[0]
            raise RefusedPlan(f"schedule {self.name}: {odd} is {'missing' if odd in wanted else 'too many'}")
        for rank, row in enumerate(self.rows):
            for op in row:
                if self.owner[op.stage] != rank:
                    raise RefusedPlan(f"schedule {self.name}: {op} stands on rank {rank}, not {self.owner[op.stage]}")
        self.timeline()  # raises where ops wait for each other in a circle

    def span(self, times: Times | None = None) -> float:
        """Returns the time from the start of the first op of any rank to the end of the last of any."""
        return max(end for _, end in self.timeline(times).values())

    def bubble(self, times: Times | None = None) -> float:
        """Returns the fraction of time, of all ranks until all are done, in which they wait."""
        times = times or Times()
        busy = sum(times.of(op.kind) for row in self.rows for op in row)
        return 1.0 - busy / (self.ranks * self.span(times))

    def inner_bubble(self, times: Times | None = None) -> float:
        """Returns a rank's longest wait between its own first and last op, in units of time (papers' bubble size)."""
        times = times or Times()
        done = self.timeline(times)
        waits = []
        for row in self.rows:
            spans = [done[op] for op in row]
            waits.append(spans[-1][1] - spans[0][0] - sum(end - start for start, end in spans))
        return max(waits)

    def live(self) -> tuple[int, ...]:
        """Returns, for each rank, the most forwards (of one stage and micro-batch each) kept for their backward."""
        return self._live

    @cached_property
    def _live(self) -> tuple[int, ...]:
        """Returns what `live` does; cached."""
        most = []
        for row in self.rows:
            kept = peak = 0
            for op in row:
                # what I leaves is kept for its W
                kept += {"F": 1, "B": -1, "W": -1, "I": 0}[op.kind]
                peak = max(peak, kept)
            most.append(peak)
        return tuple(most)

    def last_backward(self, rank: int) -> int:
        """Returns the index, in the rank's row, of the op after which its weights' gradients are complete."""
        return max(place for place, op in enumerate(self.rows[rank]) if op.kind in "BW")


def make_schedule(name: str, ranks: int, microbatches: int, per_rank: int = 1, *, checked: bool = True) -> Schedule:
    """Returns the `Schedule` of kind `name`; raises `RefusedPlan` if it cannot be made for these numbers.

    per_rank  stages on each rank
    checked   Whether to `validate` it, which takes as long as playing it
    """
    kind = KINDS[name]
    why = kind.misfit(ranks, microbatches, per_rank)
    if why:
        raise RefusedPlan(f"schedule {name} {why}")
    rows = tuple(tuple(kind.row(ranks, microbatches, per_rank, rank)) for rank in range(ranks))
    schedule = Schedule(name, microbatches, kind.owners(ranks, per_rank), rows)
    if checked:
        schedule.validate()
    return schedule


def plain_schedule(owner: tuple[int, ...], microbatches: int) -> Schedule:
    """Returns a schedule of all forwards, then all backwards, for stages placed on ranks in any way.

    owner  rank of each stage
    """
    rows = []
    for rank in range(max(owner) + 1):
        # a rank's forwards stage by stage, its backwards from the last stage on: right for any placement
        mine = [stage for stage, at in enumerate(owner) if at == rank]
        forwards = [Op("F", stage, i) for stage in mine for i in range(microbatches)]
        rows.append((*forwards, *(Op("B", stage, i) for stage in reversed(mine) for i in range(microbatches))))
    schedule = Schedule("plain", microbatches, owner, tuple(rows))
    schedule.validate()
    return schedule


LONG = 16  # micro-batches for each model stage; further ones only repeat the phase between filling and emptying


def few_microbatches(ranks: int, microbatches: int, chunks: int, per_stage: int = LONG) -> int:
    """Returns `microbatches`, or a smaller number whose schedule has the same filling, repeating and emptying phases.

    chunks     stages on each rank
    per_stage  micro-batches for each stage that are enough
    """
    most = per_stage * ranks * chunks
    return microbatches if microbatches < most + 2 * ranks else most + microbatches % ranks


def schedule_of(plan: Plan) -> Schedule:
    """Returns the `Schedule` of a plan; raises `RefusedPlan` if it has no pipeline, or its schedule cannot be made."""
    if plan.pp == 1:
        raise RefusedPlan(f"plan {plan} has no pipeline: pp is 1")
    return make_schedule(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_rank)
