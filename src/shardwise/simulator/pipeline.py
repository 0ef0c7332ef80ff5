"""Plays pipeline schedules in time (`layout/timing`), also for very many micro-batches, and counts live layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from shardwise.layout.schedule_kinds import KINDS
from shardwise.layout.schedules import LONG, Schedule, few_microbatches, make_schedule
from shardwise.layout.timing import Played, play

SETTLED = 4  # micro-batches for each stage after which most schedules repeat themselves


@lru_cache(maxsize=64)
def schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Returns the schedule `name` (a key of KINDS) for `ranks` ranks with `chunks` stages each; cached."""
    return make_schedule(name, ranks, micro_batches, chunks, checked=False)  # `play` finds ops that wait for themselves


def live_layers(played: Played, layers: Sequence[float], ranks: int) -> list[float]:
    """Returns for each rank the most (layer, micro-batch) pairs whose activations it holds; `layers`: by stage."""
    kept, most = [0.0] * ranks, [0.0] * ranks
    for rank, row in enumerate(played.table.rows):
        for op in row:
            if op.kind == "F":
                kept[rank] += layers[op.stage]
                most[rank] = max(most[rank], kept[rank])
            # I (gradients of inputs) keeps the activations for W (gradients of weights)
            elif op.kind != "I":
                kept[rank] -= layers[op.stage]
    return most


def stages_of(name: str, ranks: int, chunks: int) -> list[tuple[int, ...]]:
    """Returns for each of `ranks` ranks the stages that schedule `name` gives it, ascending."""
    owner = KINDS[name].owners(ranks, chunks)
    return [tuple(stage for stage, at in enumerate(owner) if at == rank) for rank in range(ranks)]


def play_all(
    name: str, ranks: int, micro_batches: int, chunks: int, forward: Sequence[float], backward: Sequence[float],
    weight: Sequence[float], send: Sequence[float], *, blocking: bool = False,
) -> Played:  # fmt: skip
    """Returns a schedule played in time; the cost is bounded for very many micro-batches.

    forward, backward, weight  seconds of each stage: F, B (or I), and W
    send      seconds of the message from each stage to the next; `blocking`: whether ranks wait for their sends

    Very many micro-batches are extrapolated: a few are played, then `ranks` more, then `ranks` more again. If both
    additions take equally long, so do all further ones. Otherwise more are played first, and if these do not settle
    either, the last difference is used. The time is at least the busiest rank's own work. `ops` are those of the few.
    """

    def of(count: int) -> Played:
        return play(schedule(name, ranks, count, chunks), forward, backward, weight, send, blocking=blocking)

    for settled in (SETTLED, LONG):
        few = few_microbatches(ranks, micro_batches, chunks, settled)
        if few == micro_batches:
            return of(few)
        first, second, third = of(few), of(few + ranks), of(few + 2 * ranks)
        added = [b.seconds - a.seconds for a, b in ((first, second), (second, third))]
        if abs(added[1] - added[0]) <= 1e-9 * added[0]:
            break
    times = (micro_batches - few - ranks) / ranks

    def grown(a: float, b: float) -> float:
        return a + (b - a) * times

    busy = [grown(a, b) for a, b in zip(second.busy, third.busy, strict=True)]
    kept = [round(grown(a, b)) for a, b in zip(second.in_flight, third.in_flight, strict=True)]
    # a slower path may appear only after more micro-batches than were played, but no rank ends before its own work
    return replace(first, seconds=max(grown(second.seconds, third.seconds), *busy), busy=busy, in_flight=kept)
