"""A task of one's own as a subject of the search: traced, not described again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from shardwise.cluster import Cluster
from shardwise.costs.layout import RECOMPUTES, Layout
from shardwise.costs.memory import Ledger
from shardwise.costs.software import Software
from shardwise.engine.batching import samples_in
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.dealing import deal
from shardwise.planner.candidates import MICRO_BATCHES, Constraints, divisors
from shardwise.planner.propose import Subject
from shardwise.planner.shares import Cuts, Looks, Shares
from shardwise.planner.tracing import batch_bytes, one_sample, trace, update_of
from shardwise.simulator.cut import memory_of_ranks, refuse, simulate_cut
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.quick import Quick
from shardwise.simulator.traced import Model, memory, simulate_traced
from shardwise.task import Task

DEFAULT_SAMPLES = 32  # of a step, for a task with a data source and no batch of its own
MOST_SHARES, MOST_STAGES = 8, 4  # of a search, unless the user asks for more


def default_samples(task: Task) -> int:
    """Samples of a step, where the user names no number."""
    return samples_in(task.batch(0)) if task.batch is not None else DEFAULT_SAMPLES


def traced_subject(
    task: Task,
    cluster: Cluster,
    software: Software,
    global_batch: int | None,
    precision: str,
    wanted: tuple[str, ...] = RECOMPUTES,
    samples: tuple[int, int] = (1, 2),
    cuts: bool = True,
) -> Subject:
    """The subject of a task: replicas, ZeRO 1 to 3, hybrid sharding, micro-batches, tp or pp, the recompute wanted.

    `cuts`: whether a search looks at tp and pp. `samples`: the two sizes of micro-batch that are traced; what lies
    beyond is on the line through them.
    """
    if global_batch is None:
        global_batch = default_samples(task)
    batch = global_batch
    state, sample = update_of(task), one_sample(task)

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
    looks = Looks(task)

    @lru_cache(maxsize=512)
    def ranks(key: Cuts, sizes: tuple[tuple[int, ...], ...]) -> list[Model]:
        shares = Shares(looks, key)
        found = []
        for tp, pp in shares.ranks:
            traces = [shares.trace(tp, pp, each) for each in sizes]
            found.append(Model(traces[0], traces[-1], state, task.name, whole))
        return found

    def cut(layout: Layout) -> list[Model]:
        refuse(layout)
        if not 0 < layout.global_batch - batch < layout.dp * layout.n_micro * layout.rounds:
            return ranks(Cuts.of(layout, precision), tuple((count,) for count in dict.fromkeys(samples)))
        dealt = deal(batch, layout.n_micro * layout.rounds, layout.dp, 0)
        sizes = [last - first for first, last, _, _ in dealt]
        key = Cuts.of(layout, precision)
        together = layout.pp > 1 and key.microbatches == layout.n_micro  # all that are in flight in a round
        return ranks(key, (tuple(sizes[-layout.n_micro :] if together else [max(sizes)]),))

    def can_cut(layout: Layout) -> bool:
        try:
            cut(layout)
        except (RefusedPlan, InputError) as refused:
            degrees = ", ".join(f"{n}={getattr(layout, n)}" for n in ("tp", "pp") if getattr(layout, n) > 1)
            remark = f"{degrees} is left out: {refused}"
            if remark not in remarks:
                remarks.append(remark)
            return False
        return True

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
        if cuts:
            for layout in cut_layouts(world, batch, node, recomputes, constraints):
                if can_cut(layout):
                    yield layout

    def ledger(layout: Layout) -> Ledger:
        if layout.tp * layout.pp > 1:
            return max(memory_of_ranks(cut(layout), layout, precision), key=lambda found: found.allocated)
        return memory(model(layout.recompute), layout, precision)

    def simulated(layout: Layout) -> Forecast:
        if layout.cp * layout.ulysses * layout.ep > 1:
            raise RefusedPlan("cp, cp_ulysses and ep are not forecast for a traced module, only for decoders by name")
        if layout.tp * layout.pp > 1:
            return simulate_cut(cut(layout), layout, cluster, software, precision)
        return simulate_traced(model(layout.recompute), layout, cluster, software, precision)

    def estimate(layout: Layout) -> Quick:
        return Quick(simulated(layout).step_s, ledger(layout))

    return Subject(task.name, units, batch, 1, layouts, estimate, ledger, simulated, remarks, own=True)


def cut_layouts(
    world: int, batch: int, node: int, recomputes: list[str], constraints: Constraints
) -> Iterator[Layout]:  # fmt: skip
    """Layouts with tp (inside a node) or pp, ZeRO-1 or replicas over what is left.

    Not both axes at once, and no more stages than `MOST_STAGES`: every rank that differs is rehearsed.
    """
    tps = [d for d in divisors(world) if 1 < d <= min(node, constraints.max_tp or MOST_SHARES)]
    pps = [d for d in divisors(world) if 1 < d <= (constraints.max_pp or MOST_STAGES)]
    for tp, sp, pp in [*((tp, sp, 1) for tp in tps for sp in (False, True)), *((1, False, pp) for pp in pps)]:
        dp = world // tp // pp
        if batch % dp or not all(
            constraints.value(name) in (None, have) for name, have in (("tp", tp), ("pp", pp), ("sp", sp))
        ):
            continue
        for micro in MICRO_BATCHES:
            n_micro, left = divmod(batch // dp, micro)
            if left or n_micro < 2 * pp * (pp > 1):  # fewer would leave half of the pipeline waiting
                continue
            for zero, shard in [(0, 1), *([(1, dp)] if dp > 1 else [])]:
                for recompute in recomputes:
                    yield Layout(
                        tp=tp, sp=sp, pp=pp, shard=shard, replicas=dp // shard, zero=zero, micro_batch=micro,
                        n_micro=n_micro, seq=1, recompute=recompute,
                    )  # fmt: skip
