"""Play a pipeline schedule in time: from seconds of each stage and message to the start and end of each op.

The tables (`schedules`) say in which order a rank works; here every op starts when its rank is free and what it needs
has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.errors import RefusedPlan
from shardwise.layout.schedule_kinds import Op


class ScheduleRows(Protocol):
    """The fields of a table of ops that are read here (`schedules.Schedule` has them)."""

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

    seconds    from the first op to the last
    busy       seconds of work of each rank
    in_flight  the most stage activations kept at once by each rank
    table      what was played; its ops in order started and ended at `starts` and `ends`
    """

    seconds: float
    busy: list[float]
    in_flight: list[int]
    table: ScheduleRows
    starts: list[float]
    ends: list[float]

    @property
    def ops(self) -> list[tuple[int, Op, float, float]]:
        """Returns (rank, op, start, end) of every op, those of a rank in its order."""
        spans = zip(self.table.in_order, self.starts, self.ends, strict=True)
        return [(rank, op, start, end) for (rank, op, _, _), start, end in spans]

    @property
    def bubble(self) -> float:
        """Returns the share of the time in which the busiest rank waits."""
        return 1.0 - max(self.busy) / self.seconds if self.seconds else 0.0

    @property
    def longest_span(self) -> float:
        """Returns the seconds between the first and the last op of one rank, the longest of all ranks."""
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
    """Returns the table, played with the seconds of each stage, and of a message between stages s and s + 1.

    backward   of the input's gradient alone (I); a whole backward (B) takes `weight` (W) on top
    blocking   the sender's compute waits for each message too (send and receive in one call)

    In which order ops find what they wait for is the table's (`Schedule.in_order`), whatever the seconds. Raises
    `RefusedPlan` where the rows wait for each other in a circle.
    """
    both = [b + w for b, w in zip(backward, weight, strict=True)]
    cost = [*forward, *both, *backward, *weight]  # by kind, then by stage, as all that follows
    # a message comes before each forward but the first stage's, and before each backward but the last's; none before W
    into_backward, never = [*send, 0.0], [0.0] * table.stages
    received = [0.0, *send, *into_backward, *into_backward, *never]
    sent = [*send, 0.0, 0.0, *send, 0.0, *send, *never] if blocking else [0.0] * len(cost)
    order = table.in_order
    ends = [0.0] * (len(order) + 1)  # the last, at place -1: of what waits for nothing
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
    """Returns (rank, op, `_KINDS` index * stages + stage, place of the op it waits for, or -1), in an order that runs.

    Raises `RefusedPlan` where the rows wait for each other in a circle.
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
    """Returns, by an op's (kind, stage), the (kind, stage) of the ops of its micro-batch that it waits for.

    I counts as the backward B, and the last stage's backward waits for its own forward.
    """
    last = stages - 1
    after: list[tuple[str, int] | None] = [("B", stage + 1) for stage in range(last)]
    after.append(("F", last))
    return [None, *(("F", stage) for stage in range(last))], after, after, [("B", stage) for stage in range(stages)]
