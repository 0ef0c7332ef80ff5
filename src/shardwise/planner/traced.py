"""A task of one's own as a subject of the search: traced, not described again."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from shardwise.cluster import Cluster
from shardwise.costs.layout import RECOMPUTES, Layout
from shardwise.costs.memory import Ledger
from shardwise.costs.software import Software
from shardwise.engine.batching import samples_in
from shardwise.errors import InputError
from shardwise.planner.candidates import MICRO_BATCHES, Constraints, divisors
from shardwise.planner.propose import Subject
from shardwise.planner.tracing import batch_bytes, one_sample, optimizer_state, trace
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.quick import Quick
from shardwise.simulator.traced import Model, memory, simulate_traced
from shardwise.task import Task

DEFAULT_SAMPLES = 32  # of a step, for a task with a data source and no batch of its own


def traced_subject(
    task: Task,
    cluster: Cluster,
    software: Software,
    global_batch: int | None,
    precision: str,
    wanted: tuple[str, ...] = RECOMPUTES,
    samples: tuple[int, int] = (1, 2),
) -> Subject:
    """The subject of a task: replicas, ZeRO 1 to 3, hybrid sharding, micro-batches, and the recompute that is wanted.

    `samples`: the two sizes of micro-batch that are traced; what lies beyond is on the line through them.
    """
    if global_batch is None:
        global_batch = samples_in(task.batch(0)) if task.batch is not None else DEFAULT_SAMPLES
    batch = global_batch
    state, sample = optimizer_state(task), one_sample(task)

    whole = batch_bytes(sample) if task.batch is not None else 0.0

    @lru_cache(maxsize=8)
    def model(recompute: str) -> Model:
        one, two = (trace(task, count, precision, recompute, sample) for count in samples)
        return Model(one, two, state, task.name, whole)

    units = len(model("none").one.units)
    recomputes, remarks = ["none"], []
    for policy in [name for name in wanted if name != "none"] if units else ():
        try:
            model(policy)
            recomputes.append(policy)
        except InputError as error:
            remarks.append(f"remat={policy} is left out: {error}")
    node = cluster.sizes[0] if len(cluster.tiers) > 1 else cluster.world_size

    def layouts(world: int, constraints: Constraints) -> Iterable[Layout]:
        for dp in [world] if world == 1 or batch % world == 0 else [d for d in divisors(world) if batch % d == 0][-1:]:
            inside = max((d for d in divisors(dp) if d <= node), default=1)
            shardings = {(0, 1), *((z, dp) for z in (1, 2, 3) if dp > 1), *(((3, inside),) if 1 < inside < dp else ())}
            for zero, shard in sorted(shardings):
                for micro in MICRO_BATCHES:
                    if (batch // dp) % micro == 0:
                        for recompute in recomputes:
                            yield Layout(
                                shard=shard, replicas=dp // shard, zero=zero, micro_batch=micro,
                                n_micro=batch // dp // micro, seq=1, recompute=recompute,
                            )  # fmt: skip

    def ledger(layout: Layout) -> Ledger:
        return memory(model(layout.recompute), layout, precision)

    def simulated(layout: Layout) -> Forecast:
        return simulate_traced(model(layout.recompute), layout, cluster, software, precision)

    def estimate(layout: Layout) -> Quick:
        return Quick(simulated(layout).step_s, ledger(layout))

    return Subject(task.name, units, batch, 1, layouts, estimate, ledger, simulated, tuple(remarks), own=True)
