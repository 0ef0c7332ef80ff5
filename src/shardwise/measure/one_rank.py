"""Run one rank of a plan of any size for real on this machine: its shard, its micro-batches, no neighbours.

The rank's process joins a *fake* process group of the plan's world size: collectives return at once and move nothing.
So compute time and the peak of live bytes are those of the real rank, down to the byte; what it computes is not, since
what others would have sent is missing. Simulated communication is added by whoever asks.

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

STEPS = 4  # the first is not timed


def run_alone(
    make: Callable[[], Task], plan_text: str, samples: int, rank: int, randomness: Randomness
) -> dict[str, Any]:
    """Runs the steps of one rank, in a process of its own; returns bytes and seconds by name; raises as a run does."""
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
        engine.state.on_nonfinite = "use"  # before torch 2.13 sums stay as memory was; the update is one all the same
        for step in range(2):
            engine.step(batch_of(step))
            if step == 0:  # the peak is that of the second step, which finds the optimizer's state
                rest = live.now
                live.reset_peak()
        peak = live.peak
    random = engine.state.global_random
    engine.state.watch.idle = random is not None and not random.met
    for step in range(STEPS):  # without the mode, which slows every op
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
    """Returns peak of live bytes and compute seconds of one rank of a plan that this version can run.

    Keys: rank, peak_live and rest_live (bytes), seconds (of the fastest step), threads, and those of `Engine.memory`.

    `make` builds the task and can be pickled; `samples` as in `measure_here`. Raises `RefusedPlan` for a plan that
    cannot run, `InputError` for a rank outside it.
    """
    check(plan)
    if not 0 <= rank < plan.world_size:
        raise InputError(f"--measure-rank: plan {plan} has ranks 0 to {plan.world_size - 1}, not {rank}")
    return launch(run_alone, 1, (make, str(plan), samples, rank, randomness), timeout_s=600.0)[0]
