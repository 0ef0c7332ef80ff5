"""A pipeline schedule in time: seconds of each stage and of each message make a table's ops start and end.

The tables (`schedules`) say in which order a rank works; here every op starts when its rank is free and what it needs
has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import RefusedPlan
from shardwise.layout.schedule_kinds import Op

if TYPE_CHECKING:
    from shardwise.layout.schedules import Schedule


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
    table: Schedule, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float],
    send: Sequence[float], *, blocking: bool = False,
) -> Played:  # fmt: skip
    """Run the table: seconds of each model stage, and of a message between stages s and s + 1.

    blocking   the sender's compute waits for each message too (send and receive in one call)

    Raises `RefusedPlan` where the rows wait for each other in a circle.
    """
    seconds = {"F": [*forward], "I": [*backward], "W": [*weight]}
    seconds["B"] = [b + w for b, w in zip(backward, weight, strict=True)]
    sent = {"F": [*send, 0.0], "I": [0.0, *send], "B": [0.0, *send], "W": [0.0] * table.stages}
    needs = _needs(table.stages, send)
    ended: dict[str, list[list[float | None]]] = {
        kind: [[None] * table.microbatches for _ in range(table.stages)] for kind in "FBW"
    }
    free, busy = [0.0] * table.ranks, [0.0] * table.ranks
    place, kept, most = [0] * table.ranks, [0] * table.ranks, [0] * table.ranks
    ops: list[tuple[int, Op, float, float]] = []
    waiting: dict[tuple[str, int, int], list[int]] = {}
    todo = list(range(table.ranks))
    while todo:
        rank = todo.pop()
        row = table.rows[rank]
        now, at = free[rank], place[rank]
        while at < len(row):
            op = row[at]
            kind, stage, batch = op.kind, op.stage, op.microbatch
            if (need := needs[kind][stage]) is not None:
                there = ended[need[0]][need[1]][batch]
                if there is None:
                    waiting.setdefault((need[0], need[1], batch), []).append(rank)
                    break
                now = max(now, there + need[2])
            end = now + seconds[kind][stage]
            busy[rank] += seconds[kind][stage]
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
        free[rank], place[rank] = now, at
    if stuck := [str(row[at]) for row, at in zip(table.rows, place, strict=True) if at < len(row)]:
        raise RefusedPlan(f"schedule {table.name}: ops wait for each other in a circle: {', '.join(stuck)}")
    return Played(max(free), busy, ops, most)


def _needs(stages: int, send: Sequence[float]) -> dict[str, list[tuple[str, int, float] | None]]:
    """By kind and stage: (kind, stage, seconds of the message) of what an op waits for, of its own micro-batch.

    I counts as the backward B, and the last stage's backward waits for its own forward.
    """
    last = stages - 1
    after: list[tuple[str, int, float] | None] = [("B", stage + 1, send[stage]) for stage in range(last)]
    after.append(("F", last, 0.0))
    before: list[tuple[str, int, float] | None] = [("F", stage - 1, send[stage - 1]) for stage in range(1, stages)]
    return {"F": [None, *before], "B": after, "I": after, "W": [("B", stage, 0.0) for stage in range(stages)]}
