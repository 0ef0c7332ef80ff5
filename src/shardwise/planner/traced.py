"""A task of one's own as a subject of the search: traced, not described again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain, product
from time import perf_counter

from shardwise.cluster import Cluster
from shardwise.costs.layout import RECOMPUTES, Layout
from shardwise.costs.memory import CONTEXT_BYTES, Ledger
from shardwise.costs.software import Software, as_planned
from shardwise.engine.batching import samples_in
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.layout import Plan
from shardwise.layout.dealing import deal
from shardwise.parallel.batchnorm import joins_batch_norms
from shardwise.planner.candidates import MOST_MICRO, Constraints, divisors, micro_batches, plan_of
from shardwise.planner.progress import Say, silent
from shardwise.planner.propose import Reading, Subject
from shardwise.planner.rehearsal import ALIKE, Beside
from shardwise.planner.shares import Cuts, Looks, Shares, once
from shardwise.planner.tracing import batch_bytes, one_sample, trace, update_of
from shardwise.simulator.counted import Counted, Model
from shardwise.simulator.cut import simulate_cut
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.held import memory
from shardwise.simulator.quick import Quick
from shardwise.simulator.traced import simulate_traced, switches
from shardwise.task import Task

DEFAULT_SAMPLES = 32  # of a step, for a task with a data source and no batch of its own
READS = 3  # of the task's input, of which the quickest is taken
MOST_OPS = 60_000  # of the rehearsals of a search: some ten seconds
LONG_S = 0.5  # one read that takes as long is enough
Sizes = tuple[tuple[int, ...], ...]  # of the micro-batches of each rehearsal
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
    say: Say = silent,
) -> Subject:
    """The subject of a task: replicas, ZeRO 1 to 3, hybrid sharding, micro-batches, tp or pp, the recompute wanted.

    `cuts`: whether a search looks at tp and pp. `samples`: the two sizes of micro-batch that are traced; what lies
    beyond is on the line through them. `say`: is told what is being traced.
    """
    batch = default_samples(task) if global_batch is None else global_batch
    return Traced(task, cluster, software, precision, samples, cuts, say).subject(batch, wanted)


class Traced:
    """A task's traces and rehearsals, each made once, and the subjects that rest on them."""

    def __init__(
        self, task: Task, cluster: Cluster, software: Software, precision: str, samples: tuple[int, int], cuts: bool,
        say: Say = silent,
    ):  # fmt: skip
        self.task, self.cluster, self.software, self.precision = task, cluster, software, precision
        self.samples, self.cuts, self.say = samples, cuts, say
        say(f"{task.name}: reading a sample")
        began = perf_counter()
        self.sample = one_sample(task)
        self._first_read_s = perf_counter() - began
        self.state = update_of(task)
        self.whole = batch_bytes(self.sample) if task.batch is not None else 0.0
        self.node = cluster.sizes[0] if len(cluster.tiers) > 1 else cluster.world_size
        self.looks = Looks(task, self.sample)
        self.remarks: list[str] = []
        self._spent = 0  # ops of rehearsals
        self._models: dict[tuple[str, int], Model] = {}
        self._ranks: dict[tuple[Cuts, Sizes, Beside], list[Model] | ShardwiseError] = {}

    @property
    def on_cpu(self) -> bool:
        """Whether ranks hold the global batch, and reduce copies."""
        return self.cluster.device.kind == "cpu"

    def subject(self, batch: int, wanted: tuple[str, ...]) -> Subject:
        """What a search needs to know, for one global batch."""
        units = len(self.model("none").one.units)
        recomputes = self.recomputes(wanted) if units else ["none"]

        def layouts(world: int, constraints: Constraints) -> Iterable[Layout]:
            yield from filter(self.can_run, data_layouts(world, batch, self.node, recomputes))
            if self.cuts:
                cut = [*filter(self.can_run, cut_layouts(world, batch, self.node, recomputes, constraints))]
                own = data_layouts(world, batch, self.node, recomputes) if self.routed else ()
                few, many = (expert_layouts(each, self.node, constraints) for each in (own, cut if self.routed else ()))
                yield from self.cut_within(chain(filter(self.can_run, few), cut, many), batch, constraints)

        def estimate(layout: Layout) -> Quick:
            return Quick(self.simulate(layout, batch).step_s, self.memory(layout, batch))

        return Subject(
            self.task.name, units, batch, 1, layouts, estimate, lambda layout: self.memory(layout, batch),
            lambda layout: self.simulate(layout, batch), self.remarks, own=True,
            with_batch=lambda count: self.subject(count, wanted), reading=lambda: self.reading,
        )  # fmt: skip

    @property
    def routed(self) -> bool:
        """Whether the module chooses among experts."""
        one = self.model("none").one
        return one.balanced or (one.chose and self.looks.holds_experts)

    def model(self, recompute: str, data_ranks: int = 1) -> Model:
        """The traces of the whole module under a recompute policy."""
        return self._model_of(recompute, self.joined(recompute, data_ranks))

    def _model_of(self, recompute: str, joined: int) -> Model:
        key = recompute, joined
        if key not in self._models:
            self.say(f"{self.task.name}: tracing the whole module, remat={recompute}")
            one, two = (self._trace(count, *key) for count in self.samples)
            self._models[key] = self._model(one, two)
        return self._models[key]

    def _trace(self, count: int, recompute: str, joined: int) -> Counted:
        return trace(self.task, count, self.precision, recompute, self.sample, joined)

    def joined(self, recompute: str, data_ranks: int) -> int:
        """Over how many ranks a run joins batch norms: 0 where they are the module's own; 2 stand for many."""
        if not joins_batch_norms(data_ranks, Plan(remat=recompute, precision=self.precision)):
            return 0
        return min(2, data_ranks) if self._model_of("none", 0).one.batch_norms else 0

    def can_run(self, layout: Layout) -> bool:
        """Whether batch norms find more than one value in a micro-batch."""
        return layout.dp * layout.micro_batch > 1 or not self._model_of("none", 0).one.alone

    def _cuts(self, layout: Layout) -> Cuts:
        joined = self.joined(layout.recompute, layout.dp)
        return replace(Cuts.of(layout, self.precision, gloo=self.on_cpu), joined=joined)

    def _model(self, one: Counted, two: Counted) -> Model:
        return Model(one, two, self.state, self.task.name, self.whole, self.on_cpu)

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

    def _left_out(self, what: str, why: str) -> None:
        """One remark for all that have a reason in common."""
        for at, text in enumerate(self.remarks):
            if text.endswith(why):
                named = text.removesuffix(why).split("; ")
                self.remarks[at] = "; ".join(dict.fromkeys([*named, what])) + why
                return
        self._remark(what + why)

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    @cached_property
    def reading(self) -> Reading:
        """How long a sample takes to come, timed here."""
        if self.task.batch is None and self._first_read_s > LONG_S:
            return Reading(self._first_read_s, False)
        self.say(f"{self.task.name}: timing its input")
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

    def ranks(self, key: Cuts, sizes: Sizes, beside: Beside = ALIKE) -> list[Model]:
        """The ranks of a cut module that differ, each rehearsed with the micro-batches given."""
        return once(self._ranks, (key, sizes, beside), lambda: self._rehearsed(key, sizes, beside))

    def _rehearsed(self, key: Cuts, sizes: Sizes, beside: Beside) -> list[Model]:
        self.say(f"{self.task.name}: deriving the cuts of {key.plan}")
        shares = Shares(self.looks, key)
        found = []
        for tp, pp in shares.ranks:
            self.say(f"{self.task.name}: rehearsing {key.plan}, rank {tp} of tp, stage {pp}")
            self._spent += len(sizes) * self.model("none").one.kernels
            traces = [shares.trace(tp, pp, each, beside) for each in sizes]
            found.append(self._model(traces[0], traces[-1]))
        return found

    def cut(self, layout: Layout, batch: int) -> list[Model]:
        """The ranks of a layout, as its fullest data rank has them; `RefusedPlan` as in a run."""
        return self.ranks(*self._key(layout, batch))

    def _key(self, layout: Layout, batch: int) -> tuple[Cuts, Sizes, Beside]:
        """What cuts the module, and the micro-batches to rehearse: each tuple is one rehearsal of a rank."""
        key = self._cuts(layout)
        if not 0 < layout.global_batch - batch < layout.dp * layout.n_micro * layout.rounds:
            return key, tuple((count,) for count in dict.fromkeys(self.samples)), ALIKE
        return key, *played(key, layout, batch, layout.dp - 1)

    def every_rank(self, layout: Layout, batch: int) -> list[Ledger]:
        """Bytes of each rank of the grid, its own share of the batch considered: every one that differs is traced."""
        key = self._cuts(layout)
        alike = Shares(self.looks, key).alike if layout.tp > 1 else [0]
        kinds = list(dict.fromkeys(alike))
        found: dict[tuple[Sizes, Beside], list[Model]] = {}
        ledgers = []
        for replica, pp, shard, tp in product(*map(range, (layout.replicas, layout.pp, layout.shard, layout.tp))):
            data = replica * layout.shard + shard
            most, what = max(dealt(layout, batch, data)), played(key, layout, batch, data)
            if what not in found:
                found[what] = (
                    self.ranks(key, *what) if key.differ else [self._exactly(layout.recompute, key.joined, most)]
                )  # fmt: skip
            model = found[what][pp * len(kinds) + kinds.index(alike[tp])]
            ledgers.append(memory(model, layout.with_(micro_batch=most), self.precision, batch, shard))
        return ledgers

    def _exactly(self, recompute: str, joined: int, count: int) -> Model:
        """The whole module's trace at one number of samples."""
        one = self._trace(count, recompute, joined)
        return self._model(one, one)

    def cut_within(self, layouts: Iterable[Layout], batch: int, constraints: Constraints) -> Iterator[Layout]:
        """Those of the layouts that can be cut, as far as rehearsing them is a matter of seconds.

        Recompute and zero=3 are left out where the same layout fits without, since they only ever add time, and where
        it cannot be cut without, since they cut nothing.
        """
        room = self.cluster.device.memory_bytes * (1 - constraints.headroom) - CONTEXT_BYTES
        asked = any(constraints.value(name) is not None for name in ("tp", "pp", "ep"))
        fitted: set[Layout] = set()
        refused: set[Layout] = set()
        left: dict[str, None] = {}
        for layout in map(constraints.applied, layouts):
            if constraints.fixed and not constraints.allows(plan_of(layout, self.precision)):
                continue  # before it is rehearsed
            plain = layout.with_(recompute="none")
            bare = plain.with_(zero=0, shard=1, replicas=layout.dp) if layout.ep == 1 else plain
            if plain in refused or bare in refused:
                continue
            if plain in fitted and constraints.value("remat") is None:
                continue
            if layout.zero > 1 and constraints.value("zero") is None and plain.with_(zero=1) in fitted:
                continue
            if self._spent > MOST_OPS and not asked and not self._known(layout, batch):
                left[_degrees(layout.with_(sp=False, recompute="none"))] = None
                continue
            if not self.can_cut(layout, batch):
                refused.add(layout)
            else:
                if layout == plain and self.memory(layout, batch).reserved <= room:
                    fitted.add(plain)
                yield layout
        if left:
            self._remark(f"not looked at, since rehearsing all of them takes minutes: {'; '.join(left)} (ask for one "
                         "with --fix)")  # fmt: skip

    def _known(self, layout: Layout, batch: int) -> bool:
        return self._key(layout, batch) in self._ranks

    def can_cut(self, layout: Layout, batch: int) -> bool:
        """Whether a search may have it; a remark where not."""
        try:
            self.cut(layout, batch)
        except (RefusedPlan, InputError) as refused:
            degrees = _degrees(layout.with_(sp=False, recompute="none"))
            self._left_out(degrees, f" is left out: {refused}")
            return False
        return True

    def memory(self, layout: Layout, batch: int) -> Ledger:
        """Bytes of the fullest rank."""
        return max(self.ledgers(layout, batch), key=lambda found: found.allocated)

    def ledgers(self, layout: Layout, batch: int) -> list[Ledger]:
        """Bytes of the fullest data rank of each rank of tp and pp that differs."""
        differ = self._cuts(layout).differ
        found = self.cut(layout, batch) if differ else [self.model(layout.recompute, layout.dp)]
        return [memory(rank, layout, self.precision, batch) for rank in found]

    def simulate(self, layout: Layout, batch: int) -> Forecast:
        """One step."""
        if layout.cp * layout.ulysses > 1:
            raise RefusedPlan("cp and cp_ulysses are not forecast for a traced module, only for decoders by name")
        soft = as_planned(self.software, layout)
        held, where = self.ledgers(layout, batch), (self.cluster, soft, self.precision)
        if layout.tp * layout.pp * layout.ep > 1:
            found = simulate_cut(self.cut(layout, batch), layout, *where, held)
        else:
            found = simulate_traced(self.model(layout.recompute, layout.dp), layout, *where, held)
        uneven = 0 < layout.global_batch - batch < layout.dp * layout.n_micro * layout.rounds
        found.tokens = batch if uneven else layout.global_batch
        found.flops = self.model("none").flops(found.tokens)  # the model's: not what ranks do twice
        found.basis |= switches(layout, eager=bool(self.cluster.device.ops))
        return found


def dealt(layout: Layout, batch: int, data_rank: int) -> tuple[int, ...]:
    """Samples of each micro-batch on a data rank; one without any runs a stand-in."""
    parts = deal(batch, layout.n_micro * layout.rounds, layout.dp, data_rank)
    return tuple(max(1, last - first) for first, last, _, _ in parts)


def played(key: Cuts, layout: Layout, batch: int, data_rank: int) -> tuple[Sizes, Beside]:
    """Which of a data rank's micro-batches are played, and with it those of its neighbours in ep."""
    place = data_rank % layout.ep
    group = [dealt(layout, batch, data_rank - place + other) for other in range(layout.ep)]
    chosen = _chosen(key, layout, place, group)
    sizes = (tuple(group[place][index] for index in chosen),)
    if layout.ep == 1:
        return sizes, ALIKE
    return sizes, (place, tuple(tuple(other[index] for other in group) for index in chosen))


def _chosen(key: Cuts, layout: Layout, place: int, group: list[tuple[int, ...]]) -> list[int]:
    """Indices of micro-batches: all that are in flight in a round, else the fullest.

    Where the first leaves gradients behind for those that follow, it and the fullest of these. Of micro-batches in
    which a rank has as many samples of its own, that is fuller in which the others of ep have more: their rows come.

    group  samples of each micro-batch on each rank of ep; this rank is the one at `place`
    """
    everything = range(len(group[place]))

    def load(index: int) -> tuple[int, int]:
        return group[place][index], sum(other[index] for other in group)

    fullest = max(everything, key=load)
    if layout.pp > 1:
        if key.microbatches != layout.n_micro:
            return [fullest]
        return [*everything[: layout.n_micro * (key.rounds - 1)], *everything[-layout.n_micro :]]
    return [0, max(everything[1:], key=load)] if key.microbatches > 1 else [fullest]


def _degrees(layout: Layout) -> str:
    degrees = [f"{n}={getattr(layout, n)}" for n in ("tp", "pp", "ep") if getattr(layout, n) > 1]
    return ", ".join(
        [
            *degrees,
            *(["sp"] if layout.sp else []),
            *([f"remat={layout.recompute}"] if layout.recompute != "none" else []),
        ]
    )


def data_layouts(world: int, batch: int, node: int, recomputes: list[str]) -> Iterator[Layout]:
    """Replicas and ZeRO 1 to 3 over all ranks, and ZeRO-3 inside a node.

    A batch that does not divide over all ranks is dealt unevenly, as a run deals it; beside that, it is dealt evenly
    over the most ranks that it does divide over.
    """
    even = [world] if batch % world == 0 else [d for d in divisors(world) if batch % d == 0][-1:]
    for dp in dict.fromkeys([*even, *([world] if batch >= world else [])]):
        inside = max((d for d in divisors(dp) if d <= node), default=1)
        shardings = {(0, 1), *((z, dp) for z in (1, 2, 3) if dp > 1), *(((3, inside),) if 1 < inside < dp else ())}
        for zero, shard in sorted(shardings):
            for micro, n_micro in _dealt_over(batch, dp):
                for recompute in recomputes:
                    yield Layout(
                        shard=shard, replicas=dp // shard, zero=zero, micro_batch=micro, n_micro=n_micro, seq=1,
                        recompute=recompute,
                    )  # fmt: skip


def _dealt_over(batch: int, dp: int) -> list[tuple[int, int]]:
    """(samples of the largest micro-batch, micro-batches) of a rank."""
    if batch % dp == 0:
        return [(micro, batch // dp // micro) for micro in micro_batches(batch // dp)]
    found = []
    for micro in range(1, min(-(-batch // dp), MOST_MICRO) + 1):
        n_micro = -(-batch // (dp * micro))
        fits = -(-batch // (dp * n_micro)) == micro  # else the same number of them is smaller ones
        if fits and batch // n_micro >= dp and (micro in (1, 3) or micro & (micro - 1) == 0 or n_micro == 1):
            found.append((micro, n_micro))
    return found


def cut_layouts(
    world: int, batch: int, node: int, recomputes: list[str], constraints: Constraints
) -> Iterator[Layout]:  # fmt: skip
    """Layouts with tp (inside a node), pp, or both; over what is left replicas, ZeRO-1 or 3, and ZeRO-2 if asked for.

    Of small degrees first, and no more stages than `MOST_STAGES`: every rank that differs is rehearsed.
    """
    tps = [d for d in divisors(world) if 1 < d <= min(node, constraints.max_tp or MOST_SHARES)]
    pps = [d for d in divisors(world) if 1 < d <= (constraints.max_pp or MOST_STAGES)]
    degrees = [
        (tp, sp, pp)
        for tp in (1, *tps)
        for sp in ((False, True) if tp > 1 else (False,))
        for pp in (1, *pps)
        if tp * pp > 1
    ]
    for tp, sp, pp in sorted(degrees, key=lambda d: (d[0] > 1 and d[2] > 1, d[0] * d[2], d[1], d)):
        dp, left_over = divmod(world, tp * pp)
        if (
            left_over
            or batch % dp
            or not all(constraints.value(name) in (None, have) for name, have in (("tp", tp), ("pp", pp), ("sp", sp)))
        ):
            continue
        for micro in micro_batches(batch // dp):
            n_micro = batch // dp // micro
            if n_micro < 2 * pp * (pp > 1):  # fewer would leave half of the pipeline waiting
                continue
            stages = (1, 3) if constraints.value("zero") is None else (1, 2, 3)
            for zero, shard in [(0, 1), *((zero, dp) for zero in stages if dp > 1)]:
                for recompute in recomputes:
                    yield Layout(
                        tp=tp, sp=sp, pp=pp, shard=shard, replicas=dp // shard, zero=zero, micro_batch=micro,
                        n_micro=n_micro, seq=1, recompute=recompute,
                    )  # fmt: skip


def expert_layouts(layouts: Iterable[Layout], node: int, constraints: Constraints) -> Iterator[Layout]:
    """The same layouts with experts dealt over ranks of dp_shard, inside a node and up to `MOST_SHARES`."""
    asked = constraints.value("ep")
    for layout in layouts:
        for degree in divisors(layout.shard):
            if 1 < degree <= min(node, MOST_SHARES) and asked in (None, degree):
                yield layout.with_(ep=degree)
