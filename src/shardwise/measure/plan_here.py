"""`measure_here`: runs a plan for a few steps on this machine, for `compare`: step time, bytes, loss."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from shardwise.errors import RefusedPlan
from shardwise.layout import Plan, check
from shardwise.ranks import launch
from shardwise.task import Task

if TYPE_CHECKING:
    from shardwise.random import Randomness

STEPS = 8  # timed steps; two more run before them, of which the second is observed for its bytes


def ranks_at_hand() -> int:
    """Returns the number of ranks this machine can run: one per accelerator, else one per CPU core, at least two."""
    from shardwise.device import device_count

    return device_count() or max(2, os.cpu_count() or 1)


def batches_of(task: Task, samples: int) -> Callable[[int], Any]:
    """Returns a function step -> global batch: the task's own, or `samples` samples of its source in order.

    After the last sample the source begins again.
    """
    if task.batch is not None:
        return task.batch
    from shardwise.random.reading_seeds import drawing

    source = task.data
    assert source is not None
    length = len(source)

    def read(step: int) -> Any:
        first, count = step * samples, min(samples, length)
        # random operations of a source are seeded as in training
        with drawing(0, first // length, first):
            return source.read([(first + place) % length for place in range(count)])

    return read


def steps_of_a_rank(
    make: Callable[[], Task], plan_text: str, steps: int, randomness: Randomness, samples: int
) -> dict[str, Any]:
    """Runs `steps` timed steps on one rank; returns {"step_s", "peak_live", "received_bytes", "loss"}.

    make     builds the task; `samples`: of a step, if the task reads a source
    """
    from shardwise.device import synchronize
    from shardwise.engine.engine import parallelize
    from shardwise.memory.live import LiveBytes

    task = make()
    batch_of = batches_of(task, samples)
    with LiveBytes() as live:
        engine = parallelize(task, plan_text, randomness=randomness)
        engine.step(batch_of(0))
        live.reset_peak()
        with engine.observe() as sent:
            result = engine.step(batch_of(1))
        peak = live.peak
    times: list[float] = []
    for step in range(2, 2 + steps):  # without modes, which slow every op
        batch = batch_of(step)
        began = time.perf_counter()
        result = engine.step(batch)
        synchronize(engine.device)
        times.append(time.perf_counter() - began)
    return {"step_s": median(times), "peak_live": peak, "received_bytes": sent.received(), "loss": result.loss}


def measure_here(
    make: Callable[[], Task], plan: Plan, samples: int, steps: int = STEPS, randomness: Randomness = "global"
) -> dict[str, Any]:
    """Runs a plan for `steps` steps on this machine and returns what was measured.

    make     builds the task, and can be pickled
    samples  samples of a step, if the task reads a source

    Keys: step_s (seconds of the slowest rank), peak_live and received_bytes (bytes of the rank with most), loss, steps
    (with two that are not timed), load (the machine's load average).

    Raises `RefusedPlan` for a plan that cannot run or needs more ranks than this machine has.
    """
    check(plan)
    if plan.world_size > ranks_at_hand():
        raise RefusedPlan(f"plan {plan} needs {plan.world_size} ranks; {ranks_at_hand()} are at hand to measure it on")
    rows = launch(steps_of_a_rank, plan.world_size, (make, str(plan), steps, randomness, samples), timeout_s=600.0)
    return {
        "step_s": max(row["step_s"] for row in rows),
        "peak_live": max(row["peak_live"] for row in rows),
        "received_bytes": max(row["received_bytes"] for row in rows),
        "loss": rows[0]["loss"],
        "steps": steps + 2,
        "load": os.getloadavg()[0],
    }
