"""`measure_rank`: really runs one rank of a plan of any size on this machine, without the other ranks.

The rank's process joins a *fake* process group of the plan's world size, whose collectives return at once and move
nothing. So compute time and peak live bytes are exactly those of the real rank. Its values are not, since data of other
ranks is missing. Callers add simulated communication.

    rank r of N:   parallelize ── step ── step ── step      all_gather, reduce_scatter: no-ops
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError
from shardwise.layout import Plan, check
from shardwise.measure.plan_here import batches_of
from shardwise.ranks import launch
from shardwise.task import Task

if TYPE_CHECKING:
    from shardwise.random import Randomness

STEPS = 4  # steps, of which the first is not timed


def run_alone(
    make: Callable[[], Task], plan_text: str, samples: int, rank: int, randomness: Randomness
) -> dict[str, Any]:
    """Runs the steps of rank `rank` in this process; returns a dict as `measure_rank`; raises as a run does."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardwise.engine.engine import parallelize
    from shardwise.memory.live import LiveBytes

    plan = Plan.parse(plan_text)
    if dist.is_initialized():  # the group of one rank in which this process was started
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    task = make()
    batch_of = batches_of(task, samples)
    times: list[float] = []
    rest = 0
    with LiveBytes() as live:
        engine = parallelize(task, plan, check_loss=False, randomness=randomness)
        engine.state.on_nonfinite = "use"  # fake collectives may leave NaN, and the update must still run
        for step in range(2):
            engine.step(batch_of(step))
            if step == 0:  # the peak is that of the second step, when the optimizer has its state
                rest = live.now
                live.reset_peak()
        peak = live.peak
    random = engine.state.global_random
    engine.state.watch.idle = random is not None and not random.met
    for step in range(STEPS):  # without modes, which slow every op
        batch = batch_of(step)
        began = time.perf_counter()
        engine.step(batch)
        times.append(time.perf_counter() - began)
    memory = {name: count for name, count in engine.memory().items() if count is not None}
    return {
        "rank": rank,
        "peak_live": peak,
        "rest_live": rest,
        "seconds": min(times[1:]),
        "threads": torch.get_num_threads(),
        **memory,
    }


def measure_rank(
    make: Callable[[], Task], plan: Plan, samples: int, rank: int = 0, randomness: Randomness = "global"
) -> dict[str, Any]:
    """Runs one rank of a plan and returns its peak live bytes and compute seconds.

    make     builds the task, and can be pickled
    samples  samples of a step, if the task reads a source

    Keys: rank, peak_live and rest_live (bytes, at the peak and between steps), seconds (of the fastest step), threads
    (of torch), and those of `Engine.memory`.

    Raises `RefusedPlan` for a plan that cannot run, `InputError` for a rank that it does not have.
    """
    check(plan)
    if not 0 <= rank < plan.world_size:
        raise InputError(f"--measure-rank: plan {plan} has ranks 0 to {plan.world_size - 1}, not {rank}")
    return launch(run_alone, 1, (make, str(plan), samples, rank, randomness), timeout_s=600.0)[0]
