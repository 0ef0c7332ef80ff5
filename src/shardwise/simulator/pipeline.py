"""A pipeline schedule in time: the tables of `layout/schedules.py` with seconds of each stage and of each message.

The tables say in which order a rank works; here every op starts when its rank is free and what it needs has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.errors import RefusedPlan
from shardwise.layout.schedule_kinds import Op
from shardwise.layout.schedules import Schedule, few_microbatches, make_schedule


@lru_cache(maxsize=64)
def schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """The table by name; made once."""
    return make_schedule(name, ranks, micro_batches, chunks)


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
    last = table.stages - 1
    free = [0.0] * table.ranks
    done: dict[tuple[str, int, int], float] = {}
    pointer = [0] * table.ranks
    busy, kept, most = [0.0] * table.ranks, [0] * table.ranks, [0] * table.ranks
    ops: list[tuple[int, Op, float, float]] = []
    waiting: dict[tuple[str, int, int], list[int]] = {}
    todo = list(range(table.ranks))
    while todo:
        rank = todo.pop()
        row = table.rows[rank]
        while pointer[rank] < len(row):
            op = row[pointer[rank]]
            kind, stage, batch = op.kind, op.stage, op.microbatch
            need, wire = _needs(kind, stage, batch, last, send)
            if need is not None and need not in done:
                waiting.setdefault(need, []).append(rank)
                break
            start = max(free[rank], done[need] + wire if need is not None else 0.0)
            if kind == "F":
                seconds = forward[stage]
            elif kind == "W":
                seconds = weight[stage]
            else:
                seconds = backward[stage] + (weight[stage] if kind == "B" else 0.0)
            end = start + seconds
            sent = _sends(kind, stage, last, send) if blocking else 0.0
            free[rank] = end + sent
            busy[rank] += seconds
            key = ("b" if kind in "BI" else kind, stage, batch)
            done[key] = end
            ops.append((rank, op, start, end))
            if kind == "F":
                kept[rank] += 1
                most[rank] = max(most[rank], kept[rank])
            elif kind in "BW":
                kept[rank] -= 1
            pointer[rank] += 1
            todo += waiting.pop(key, [])
    if any(pointer[r] < len(table.rows[r]) for r in range(table.ranks)):
        raise RefusedPlan(f"schedule {table.name} waits for itself")
    return Played(max(free), busy, ops, most)


def outline(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """The table of a schedule, of fewer micro-batches where there are very many: the stages are the same."""
    return schedule(name, ranks, few_microbatches(ranks, micro_batches, chunks), chunks)


def play_all(
    name: str, ranks: int, micro_batches: int, chunks: int, forward: Sequence[float], backward: Sequence[float],
    weight: Sequence[float], send: Sequence[float], *, blocking: bool = False,
) -> Played:  # fmt: skip
    """`play` for a schedule by name, in a time that does not grow with very many micro-batches.

    Those are played for a few, and for as many more as there are ranks; the rest adds as much each time. `ops` are
    those of the few.
    """
    few = few_microbatches(ranks, micro_batches, chunks)

    def of(count: int) -> Played:
        return play(schedule(name, ranks, count, chunks), forward, backward, weight, send, blocking=blocking)

    if few == micro_batches:
        return of(few)
    one, two, times = of(few), of(few + ranks), (micro_batches - few) / ranks

    def grown(a: float, b: float) -> float:
        return a + (b - a) * times

    busy = [grown(a, b) for a, b in zip(one.busy, two.busy, strict=True)]
    kept = [round(grown(a, b)) for a, b in zip(one.in_flight, two.in_flight, strict=True)]
    return Played(grown(one.seconds, two.seconds), busy, one.ops, kept)


def _needs(
    kind: str, stage: int, batch: int, last: int, send: Sequence[float]
) -> tuple[tuple[str, int, int] | None, float]:
    if kind == "F":
        return (("F", stage - 1, batch), send[stage - 1]) if stage else (None, 0.0)
    if kind == "W":
        return ("b", stage, batch), 0.0
    return (("b", stage + 1, batch), send[stage]) if stage < last else (("F", stage, batch), 0.0)


def _sends(kind: str, stage: int, last: int, send: Sequence[float]) -> float:
    if kind == "F":
        return send[stage] if stage < last else 0.0
    return send[stage - 1] if kind in "BI" and stage else 0.0
