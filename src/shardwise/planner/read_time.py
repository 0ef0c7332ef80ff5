"""Time how long a task's input takes to read, on the machine that plans."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from shardwise.costs.layout import Layout
from shardwise.step.batching import samples_in
from shardwise.task import Task

READS = 3  # of the task's input, of which the quickest is taken
LONG_S = 0.5  # one read that takes as long is enough


@dataclass(frozen=True)
class Reading:
    """What a task's input costs, as timed on the machine that plans.

    seconds   for one sample
    whole     every rank makes the global batch; else each reads its own samples
    """

    seconds: float
    whole: bool

    def wait(self, layout: Layout, batch: int) -> float:
        """Returns the seconds that one reader of a rank takes for a step's samples."""
        return self.seconds * (batch if self.whole else -(-batch // layout.dp))


def timed_reading(task: Task, first_s: float) -> Reading:
    """Times a few reads of the task's input and returns the quickest; `first_s`: seconds of the first read."""
    if task.batch is None and first_s > LONG_S:
        return Reading(first_s, False)
    times = []
    for turn in range(READS):
        began = perf_counter()
        if task.batch is not None:
            count = samples_in(task.batch(turn))
        else:
            assert task.data is not None
            count = 1
            task.data.read([turn % max(1, len(task.data))])
        times.append((perf_counter() - began) / max(1, count))
        if perf_counter() - began > LONG_S:
            break
    return Reading(min(times), task.batch is not None)
