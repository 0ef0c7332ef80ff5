"""A pipeline schedule in time: the tables of `layout/schedules.py` with seconds of each stage and of each message.

The tables say in which order a rank works; here every op starts when its rank is free and what it needs has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.errors import RefusedPlan
from shardwise.layout.schedule_kinds import KINDS, Op
from shardwise.layout.schedules import LONG, Schedule, few_microbatches, make_schedule

SETTLED = 4  # micro-batches for each model stage after which most schedules repeat themselves


@lru_cache(maxsize=64)
def schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """The table by name; made once."""
    return make_schedule(name, ranks, micro_batches, chunks, checked=False)  # `play` meets what waits for itself


@dataclass
class Played:
    """A schedule in time.

    seconds    from the first op to the last
    busy       seconds of work of each rank
    ops        (rank, op, start, end)
    in_flight  the most stage activations kept at once by each rank
    """

    seconds: float
    busy: list[float]
    ops: list[tuple[int, Op, float, float]]
    in_flight: list[int]

    @property
    def bubble(self) -> float:
        """Share of the time in which the busiest rank waits."""
        return 1.0 - max(self.busy) / self.seconds if self.seconds else 0.0

    @property
    def longest_span(self) -> float:
        """Seconds between the first and the last op of one rank, the longest of all ranks."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for rank, _, start, end in self.ops:
            first[rank] = min(first.get(rank, start), start)
            last[rank] = max(last.get(rank, end), end)
        return max((last[rank] - first[rank] for rank in first), default=0.0)


def live_layers(played: Played, layers: Sequence[float], ranks: int) -> list[float]:
    """The most layers of micro-batches whose activations each rank keeps at once: stages may have unlike numbers."""
    kept, most = [0.0] * ranks, [0.0] * ranks
    for rank, op, _, _ in played.ops:  # of each rank in its order
        if op.kind == "F":
            kept[rank] += layers[op.stage]
            most[rank] = max(most[rank], kept[rank])
        elif op.kind != "I":
            kept[rank] -= layers[op.stage]
    return most


def play(
    table: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    send: Sequence[float],
    *,
    blocking: bool = False,
) -> Played:
    """Run the table: seconds of each model stage, and of a message between stages s and s + 1.

    `blocking`: the sender's compute waits for each message too (send and receive in one call).
    """
    last, count = table.stages - 1, table.microbatches
    seconds = {"F": [*forward], "W": [*weight], "I": [*backward]}
    seconds["B"] = [b + w for b, w in zip(backward, weight, strict=True)]
    before, after = [0.0, *send], [*send, 0.0]  # the message that a forward waits for, and a backward
    sent = {"F": after, "B": before, "I": before, "W": [0.0] * (last + 1)}
    free = [0.0] * table.ranks
    pointer = [0] * table.ranks
    ended: dict[str, list[list[float | None]]] = {k: [[None] * count for _ in range(last + 1)] for k in "FBW"}
    busy, kept, most = [0.0] * table.ranks, [0] * table.ranks, [0] * table.ranks
    ops: list[tuple[int, Op, float, float]] = []
    waiting: dict[tuple[str, int, int], list[int]] = {}
    todo = list(range(table.ranks))
    while todo:
        rank = todo.pop()
        row = table.rows[rank]
        now, at = free[rank], pointer[rank]
        while at < len(row):
            op = row[at]
            kind, stage, batch = op.kind, op.stage, op.microbatch
            if kind == "F":
                need, wire = ("F", stage - 1, batch) if stage else None, before[stage]
            elif kind == "W":
                need, wire = ("B", stage, batch), 0.0
            else:
                need, wire = ("B", stage + 1, batch) if stage < last else ("F", stage, batch), after[stage]
            if need is not None:
                there = ended[need[0]][need[1]][batch]
                if there is None:
                    waiting.setdefault(need, []).append(rank)
                    break
                now = max(now, there + wire)
            took = seconds[kind][stage]
            end = now + took
            busy[rank] += took
            made = "B" if kind == "I" else kind
            ended[made][stage][batch] = end
            ops.append((rank, op, now, end))
            now = end + sent[kind][stage] if blocking else end
            if kind == "F":
                kept[rank] += 1
                most[rank] = max(most[rank], kept[rank])
            elif kind != "I":
                kept[rank] -= 1
            at += 1
            if waiting and (woken := waiting.pop((made, stage, batch), None)) is not None:
                todo += woken
        free[rank], pointer[rank] = now, at
    if any(pointer[r] < len(table.rows[r]) for r in range(table.ranks)):
        raise RefusedPlan(f"schedule {table.name} waits for itself")
    return Played(max(free), busy, ops, most)


def stages_of(name: str, ranks: int, chunks: int) -> list[tuple[int, ...]]:
    """The model stages of each rank of a schedule, first to last."""
    owner = KINDS[name].owners(ranks, chunks)
    return [tuple(stage for stage, at in enumerate(owner) if at == rank) for rank in range(ranks)]


def play_all(
    name: str, ranks: int, micro_batches: int, chunks: int, forward: Sequence[float], backward: Sequence[float],
    weight: Sequence[float], send: Sequence[float], *, blocking: bool = False,
) -> Played:  # fmt: skip
    """`play` for a schedule by name, in a time that does not grow with very many micro-batches.

    Those are played for a few, for as many more as there are ranks, and once more: where that adds as much both times,
    the rest does too; else more are played first. `ops` are those of the few.
    """

    def of(count: int) -> Played:
        return play(schedule(name, ranks, count, chunks), forward, backward, weight, send, blocking=blocking)

    for each in (SETTLED, LONG):
        few = few_microbatches(ranks, micro_batches, chunks, each)
        if few == micro_batches:
            return of(few)
        one, two, three = of(few), of(few + ranks), of(few + 2 * ranks)
        added = [b.seconds - a.seconds for a, b in ((one, two), (two, three))]
        if abs(added[1] - added[0]) <= 1e-9 * added[0]:
            break
    times = (micro_batches - few - ranks) / ranks

    def grown(a: float, b: float) -> float:
        return a + (b - a) * times

    busy = [grown(a, b) for a, b in zip(two.busy, three.busy, strict=True)]
    kept = [round(grown(a, b)) for a, b in zip(two.in_flight, three.in_flight, strict=True)]
    # no rank ends before its own work: a slower path may come to the fore later than it was played
    return Played(max(grown(two.seconds, three.seconds), *busy), busy, one.ops, kept)
