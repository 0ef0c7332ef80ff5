"""A task of one's own as a subject of the search: traced, not described again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from time import perf_counter

from shardwise.cluster import Cluster
from shardwise.costs.layout import RECOMPUTES, Layout
from shardwise.costs.memory import Ledger
from shardwise.costs.software import Software
from shardwise.engine.batching import samples_in
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.dealing import deal
from shardwise.planner.candidates import MICRO_BATCHES, Constraints, divisors
from shardwise.planner.propose import Reading, Subject
from shardwise.planner.shares import Cuts, Looks, Shares
from shardwise.planner.tracing import batch_bytes, one_sample, trace, update_of
from shardwise.simulator.cut import memory_of_ranks, refuse, simulate_cut
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.quick import Quick
from shardwise.simulator.traced import Counted, Model, memory, simulate_traced
from shardwise.task import Task

DEFAULT_SAMPLES = 32  # of a step, for a task with a data source and no batch of its own
READS = 3  # of the task's input, of which the quickest is taken
LONG_S = 0.5  # one read that takes as long is enough
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
    batch = default_samples(task) if global_batch is None else global_batch
    return Traced(task, cluster, software, precision, samples, cuts).subject(batch, wanted)


class Traced:
    """A task's traces and rehearsals, each made once, and the subjects that rest on them."""

    def __init__(
        self, task: Task, cluster: Cluster, software: Software, precision: str, samples: tuple[int, int], cuts: bool
    ):
        self.task, self.cluster, self.software, self.precision = task, cluster, software, precision
        self.samples, self.cuts = samples, cuts
        self.state, self.sample = update_of(task), one_sample(task)
        self.whole = batch_bytes(self.sample) if task.batch is not None else 0.0
        self.node = cluster.sizes[0] if len(cluster.tiers) > 1 else cluster.world_size
        self.looks = Looks(task)
        self.remarks: list[str] = []
        self._models: dict[str, Model] = {}
        self._ranks: dict[tuple[Cuts, tuple[tuple[int, ...], ...]], list[Model]] = {}

    def subject(self, batch: int, wanted: tuple[str, ...]) -> Subject:
        """What a search needs to know, for one global batch."""
        units = len(self.model("none").one.units)
        recomputes = self.recomputes(wanted) if units else ["none"]

        def layouts(world: int, constraints: Constraints) -> Iterable[Layout]:
            yield from data_layouts(world, batch, self.node, recomputes)
            for layout in cut_layouts(world, batch, self.node, recomputes, constraints) if self.cuts else ():
                if self.can_cut(layout, batch):
                    yield layout

        def estimate(layout: Layout) -> Quick:
            return Quick(self.simulate(layout, batch).step_s, self.memory(layout, batch))

        return Subject(
            self.task.name, units, batch, 1, layouts, estimate, lambda layout: self.memory(layout, batch),
            lambda layout: self.simulate(layout, batch), self.remarks, own=True,
            with_batch=lambda count: self.subject(count, wanted), reading=lambda: self.reading,
        )  # fmt: skip

    def model(self, recompute: str) -> Model:
        """The traces of the whole module under a recompute policy."""
        if recompute not in self._models:
            one, two = (trace(self.task, count, self.precision, recompute, self.sample) for count in self.samples)
            self._models[recompute] = self._model(one, two)
        return self._models[recompute]

    def _model(self, one: Counted, two: Counted) -> Model:
        return Model(one, two, self.state, self.task.name, self.whole, self.cluster.device.kind == "cpu")

    def recomputes(self, wanted: tuple[str, ...]) -> list[str]:
        """Those of the policies wanted under which the module can be traced; a remark on each other one."""
        found = ["none"]
        for name in wanted:
            if name == "none":
                continue
            try:
                self.model(name)
                found.append(name)
            except InputError as error:
                self._remark(f"remat={name} is left out: {error}")
        return found

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    @cached_property
    def reading(self) -> Reading:
        """How long a sample takes to come, timed here."""
        times = []
        for turn in range(READS):
            began = perf_counter()
            if self.task.batch is not None:
                count = samples_in(self.task.batch(turn))
            else:
                assert self.task.data is not None
                count = 1
                self.task.data.read([turn % max(1, len(self.task.data))])
            times.append((perf_counter() - began) / max(1, count))
            if perf_counter() - began > LONG_S:
                break
        return Reading(min(times), self.task.batch is not None)

    # --- cut modules

    def ranks(self, key: Cuts, sizes: tuple[tuple[int, ...], ...]) -> list[Model]:
        """The ranks of a cut module that differ, each rehearsed with the micro-batches given."""
        if (key, sizes) not in self._ranks:
            shares = Shares(self.looks, key)
            found = []
            for tp, pp in shares.ranks:
                traces = [shares.trace(tp, pp, each) for each in sizes]
                found.append(self._model(traces[0], traces[-1]))
            self._ranks[key, sizes] = found
        return self._ranks[key, sizes]

    def cut(self, layout: Layout, batch: int) -> list[Model]:
        """The ranks of a layout; `RefusedPlan` as in a run."""
        refuse(layout)
        if not 0 < layout.global_batch - batch < layout.dp * layout.n_micro * layout.rounds:
            sizes = tuple((count,) for count in dict.fromkeys(self.samples))
            return self.ranks(Cuts.of(layout, self.precision), sizes)
        dealt = deal(batch, layout.n_micro * layout.rounds, layout.dp, 0)
        each = [last - first for first, last, _, _ in dealt]
        key = Cuts.of(layout, self.precision)
        together = layout.pp > 1 and key.microbatches == layout.n_micro  # all that are in flight in a round
        return self.ranks(key, (tuple(each[-layout.n_micro :] if together else [max(each)]),))

    def can_cut(self, layout: Layout, batch: int) -> bool:
        """Whether a search may have it; a remark where not."""
        try:
            self.cut(layout, batch)
        except (RefusedPlan, InputError) as refused:
            degrees = ", ".join(f"{n}={getattr(layout, n)}" for n in ("tp", "pp") if getattr(layout, n) > 1)
            self._remark(f"{degrees} is left out: {refused}")
            return False
        return True

    def memory(self, layout: Layout, batch: int) -> Ledger:
        """Bytes of the fullest rank."""
        if layout.tp * layout.pp > 1:
            ranks = memory_of_ranks(self.cut(layout, batch), layout, self.precision)
            return max(ranks, key=lambda found: found.allocated)
        return memory(self.model(layout.recompute), layout, self.precision)

    def simulate(self, layout: Layout, batch: int) -> Forecast:
        """One step."""
        if layout.cp * layout.ulysses * layout.ep > 1:
            raise RefusedPlan("cp, cp_ulysses and ep are not forecast for a traced module, only for decoders by name")
        if layout.tp * layout.pp > 1:
            return simulate_cut(self.cut(layout, batch), layout, self.cluster, self.software, self.precision)
        return simulate_traced(self.model(layout.recompute), layout, self.cluster, self.software, self.precision)


def data_layouts(world: int, batch: int, node: int, recomputes: list[str]) -> Iterator[Layout]:
    """Replicas and ZeRO 1 to 3 over all ranks, and ZeRO-3 inside a node.

    Where the batch does not divide over all ranks, over the most that it does.
    """
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
