"""Simulate a pipeline schedule in time: from seconds of each stage and message to the start and end of each op.

The tables (`schedules`) give the order of ops on a rank; here every op starts when its rank is free and its input has
arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.errors import RefusedPlan
from shardwise.layout.schedule_kinds import Op


class ScheduleRows(Protocol):
    """Protocol of a schedule, the members that are read here (`schedules.Schedule` has them)."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> tuple[tuple[Op, ...], ...]: ...
    @property
    def ranks(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def in_order(self) -> list[tuple[int, Op, int, int]]: ...
    def live(self) -> tuple[int, ...]: ...


@dataclass
class Played:
    """The outcome of playing a schedule.

    seconds        from the start of the first op to the end of the last, with the last blocking message
    busy           seconds of work of each rank
    in_flight      for each rank the most forwards kept at once
    table          the schedule
    starts, ends   seconds of each op, in the order of `table.in_order`
    """

    seconds: float
    busy: list[float]
    in_flight: list[int]
    table: ScheduleRows
    starts: list[float]
    ends: list[float]

    @property
    def ops(self) -> list[tuple[int, Op, float, float]]:
        """Returns (rank, op, start, end), in seconds, of every op; those of one rank are in its order."""
        spans = zip(self.table.in_order, self.starts, self.ends, strict=True)
        return [(rank, op, start, end) for (rank, op, _, _), start, end in spans]

    @property
    def bubble(self) -> float:
        """Returns the fraction of time in which the busiest rank waits."""
        return 1.0 - max(self.busy) / self.seconds if self.seconds else 0.0

    @property
    def longest_span(self) -> float:
        """Returns the longest time of any rank, in seconds, from the start of its first op to the end of its last."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for rank, _, start, end in self.ops:
            first[rank] = min(first.get(rank, start), start)
            last[rank] = max(last.get(rank, end), end)
        return max((last[rank] - first[rank] for rank in first), default=0.0)


def play(
    table: ScheduleRows, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float],
    send: Sequence[float], *, blocking: bool = False,
) -> Played:  # fmt: skip
    """Returns the schedule `table` played with these seconds for each stage.

    forward    seconds of F;  weight  of W
    backward   seconds of the input's gradient alone (I); a whole backward (B) takes `weight` on top
    send       seconds of a message between stages s and s + 1, one entry fewer than stages
    blocking   Whether the sender's compute waits for each message too (send and receive in one call)

    Raises `RefusedPlan` if the rows wait for each other in a circle.
    """
    both = [b + w for b, w in zip(backward, weight, strict=True)]
    cost = [*forward, *both, *backward, *weight]  # by kind, then by stage, as all that follows
    # a message comes before each forward but the first stage's, and before each backward but the last's; none before W
    into_backward, never = [*send, 0.0], [0.0] * table.stages
    received = [0.0, *send, *into_backward, *into_backward, *never]
    sent = [*send, 0.0, 0.0, *send, 0.0, *send, *never] if blocking else [0.0] * len(cost)
    order = table.in_order
    ends = [0.0] * (len(order) + 1)  # the last stands for `need` -1, of an op that waits for nothing
    free, busy = [0.0] * table.ranks, [0.0] * table.ranks
    starts = ends[:-1]
    for at, (rank, _, kind, need) in enumerate(order):
        start = ends[need] + received[kind]
        if start < free[rank]:
            start = free[rank]
        seconds = cost[kind]
        ends[at] = end = start + seconds
        busy[rank] += seconds
        free[rank] = end + sent[kind]
        starts[at] = start
    return Played(max(free), busy, [*table.live()], table, starts, ends[:-1])


def in_order(table: ScheduleRows) -> list[tuple[int, Op, int, int]]:
    """Returns all ops, each after the one that it waits for: (rank, op, kind and stage as one index, need).

    The index is `_KINDS.index(kind) * stages + stage`; `need` the position in this list of the op that it waits for,
    -1 for none. Raises `RefusedPlan` if the rows wait for each other in a circle.
    """
    needs = dict(zip(_KINDS, _needs(table.stages), strict=True))
    done: dict[tuple[str, int, int], int] = {}
    place, todo = [0] * table.ranks, list(range(table.ranks))
    order: list[tuple[int, Op, int, int]] = []
    waiting: dict[tuple[str, int, int], list[int]] = {}
    while todo:
        rank = todo.pop()
        row, at = table.rows[rank], place[rank]
        for op in row[at:]:
            need = -1
            if (before := needs[op.kind][op.stage]) is not None:
                key = *before, op.microbatch
                if (there := done.get(key)) is None:
                    waiting.setdefault(key, []).append(rank)
                    break
                need = there
            # the stage before waits for the gradient, whichever op makes it
            made = "B" if op.kind == "I" else op.kind, op.stage, op.microbatch
            done[made] = len(order)
            order.append((rank, op, _KINDS.index(op.kind) * table.stages + op.stage, need))
            at += 1
            if waiting and (woken := waiting.pop(made, None)) is not None:
                todo += woken
        place[rank] = at
    if stuck := [str(row[at]) for row, at in zip(table.rows, place, strict=True) if at < len(row)]:
        raise RefusedPlan(f"schedule {table.name}: ops wait for each other in a circle: {', '.join(stuck)}")
    return order


_KINDS = "FBIW"


def _needs(stages: int) -> tuple[list[tuple[str, int] | None], ...]:
    """Returns, for each kind of `_KINDS`, for each stage, the (kind, stage) of the op that it waits for, or None.

    Of the same micro-batch. I counts as the backward B, and the last stage's backward waits for its own forward.
    """
    last = stages - 1
    after: list[tuple[str, int] | None] = [("B", stage + 1) for stage in range(last)]
    after.append(("F", last))
    return [None, *(("F", stage) for stage in range(last))], after, after, [("B", stage) for stage in range(stages)]
