"""Pipeline schedules by name, played in time (`layout/timing`), for very many micro-batches too; what stages keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from shardwise.layout.schedule_kinds import KINDS
from shardwise.layout.schedules import LONG, Schedule, few_microbatches, make_schedule
from shardwise.layout.timing import Played, play

SETTLED = 4  # micro-batches for each model stage after which most schedules repeat themselves


@lru_cache(maxsize=64)
def schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Returns the schedule's table of ops by rank; cached."""
    return make_schedule(name, ranks, micro_batches, chunks, checked=False)  # `play` meets what waits for itself


def live_layers(played: Played, layers: Sequence[float], ranks: int) -> list[float]:
    """Returns, by rank, the most layers (times micro-batches) whose activations it keeps at once."""
    kept, most = [0.0] * ranks, [0.0] * ranks
    for rank, row in enumerate(played.table.rows):
        for op in row:
            if op.kind == "F":
                kept[rank] += layers[op.stage]
                most[rank] = max(most[rank], kept[rank])
            # a backward of the input alone keeps the activations for that of the weights
            elif op.kind != "I":
                kept[rank] -= layers[op.stage]
    return most


def stages_of(name: str, ranks: int, chunks: int) -> list[tuple[int, ...]]:
    """Returns, by rank, the model stages that a schedule gives it, ascending."""
    owner = KINDS[name].owners(ranks, chunks)
    return [tuple(stage for stage, at in enumerate(owner) if at == rank) for rank in range(ranks)]


def play_all(
    name: str, ranks: int, micro_batches: int, chunks: int, forward: Sequence[float], backward: Sequence[float],
    weight: Sequence[float], send: Sequence[float], *, blocking: bool = False,
) -> Played:  # fmt: skip
    """Returns a schedule played in time with these seconds by stage; the cost is bounded for very many micro-batches.

    Those are played for a few, for as many more as there are ranks, and once more: where that adds as much both times,
    the rest does too; else more are played first. What does not settle then either grows by the last difference, and is
    no shorter than the busiest rank's own work. `ops` are those of the few.
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
    # no rank ends before its own work: a slower path may come to the fore later than it was played
    return replace(first, seconds=max(grown(second.seconds, third.seconds), *busy), busy=busy, in_flight=kept)
