"""`Traced`: forecasts of a task, by traces of its module on fake tensors and rehearsals if it is sharded."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from time import perf_counter, process_time
from typing import Any, cast

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.costs.memory import CONTEXT_BYTES, WEIGHTS_ALONE, MemoryLedger
from shardwise.costs.offload import refuse as refuse_offload
from shardwise.costs.software import Software, as_planned
from shardwise.engine.optimizer import Nature, try_out
from shardwise.engine.optimizer import refuse as refuse_optimizer
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.layout import Plan
from shardwise.layout.offload import of_class, placements
from shardwise.parallel.batchnorm import joins_batch_norms
from shardwise.part.pairs import shapes_outside
from shardwise.planner.alike_layers import DEPTHS, AlikeLayers
from shardwise.planner.candidates import Constraints
from shardwise.planner.rehearsed_sizes import Sizes, played
from shardwise.planner.subject import Reading, timed_reading
from shardwise.precision import met_at, told_met
from shardwise.progress import Say, silent
from shardwise.random import HIDDEN, Randomness
from shardwise.rehearsal.cut_module import ALIKE, Beside, CutRehearsal, Cuts, Place, TaskAnalysis, once
from shardwise.rehearsal.op_counts import update_of
from shardwise.rehearsal.rank_row import trace_of
from shardwise.rehearsal.step_trace import batch_bytes, one_sample, trace
from shardwise.simulator.counted import Model, RankTrace, StepTrace
from shardwise.simulator.cut import same_row, simulate_cut
from shardwise.simulator.depths import NoLine, longer, longer_trace
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.held import memory, policy
from shardwise.simulator.host_room import traced_room
from shardwise.simulator.traced import same_ops, simulate_traced, switches
from shardwise.task import Task


@dataclass(frozen=True)
class BlockMemory:
    """A plan's choices on blocks' memory: recompute, offloaded activations (`moved`), names of the blocks (`wrap`)."""

    recompute: str = "none"
    moved: str = "none"
    wrap: tuple[str, ...] = ()
    moments: bool = False  # whether a trace notes the live bytes at each gradient's arrival

    @classmethod
    def of(cls, layout: Layout) -> BlockMemory:
        """Returns the choices of a layout; `wrap` only if blocks are recomputed or offloaded."""
        moved = of_class(layout.offload, "activations")
        wrap = layout.wrap if (layout.recompute, moved) != ("none", "none") else ()
        return cls(layout.recompute, moved, wrap, layout.gradients == "as_made" and not layout.sharded.weights)


PLAIN = BlockMemory()


class Traced:
    """Makes the traces and rehearsals of a task, each once, and forecasts of layouts from them.

    samples   the two micro-batch sizes that are traced; `cuts`: whether a search shards the module
    layers    equal layers, of which few are traced; None: the whole module is
    """

    def __init__(
        self, task: Task, cluster: Cluster, software: Software, precision: str, samples: tuple[int, int], cuts: bool,
        say: Say = silent, remarks: tuple[str, ...] = (), randomness: Randomness = "global",
        layers: AlikeLayers | None = None,
    ):  # fmt: skip
        if task.loss_scope == "model":
            raise RefusedPlan(
                'no forecast for loss_scope="model": every data rank runs the model on all samples, and forecasts deal '
                "them; time one step in one process, which is a step's time on any number of data ranks"
            )
        self.task, self.cluster, self.software, self.precision = task, cluster, software, precision
        self.samples, self.cuts, self.say, self.follow = samples, cuts, say, randomness == "global"
        say(f"{task.name}: reading a sample")
        began = perf_counter()
        self.sample = one_sample(task)
        self._first_read_s = perf_counter() - began
        self.seen = update_of(task, at_once=not self.on_cpu)
        # CPU ranks that read their own samples hold no global batch; all others hold it, or a micro-batch (GPU)
        self.whole = batch_bytes(self.sample) if task.batch is not None or not self.on_cpu else 0.0
        self.node = cluster.sizes[0] if len(cluster.tiers) > 1 else cluster.world_size
        self.looks = TaskAnalysis(task, self.sample)
        self.remarks = list(remarks)
        self.before_long: Callable[[float], None] = lambda seconds: None  # called before a slow trace
        self._first_trace_s = 0.0
        self.spent = 0  # ops of all rehearsals so far
        self._models: dict[tuple[BlockMemory, int, tuple[int, int]], Model] = {}
        self._traces: dict[tuple[int, BlockMemory, int], StepTrace] = {}
        self._ranks: dict[tuple[Cuts, Sizes, Beside, Place | None], list[Model] | ShardwiseError] = {}
        self.layers, self.few = layers, list[Traced]()
        self.few = [self._with_layers(layers, count) for count in DEPTHS if layers is not None]

    def _with_layers(self, layers: AlikeLayers, count: int) -> Traced:
        """Returns a copy that traces the same module with `count` layers."""
        other = copy(self)
        other.task, other.few, other._models, other._traces, other._ranks = layers.shorter(count), [], {}, {}, {}
        other.looks = TaskAnalysis(other.task, self.sample)
        return other

    @property
    def analysis(self) -> TaskAnalysis:
        """Returns the `TaskAnalysis` of the module, or of its version with few layers if there is one."""
        return self.few[0].looks if self.few else self.looks

    def _of_few(self, ask: Callable[[Traced], Any], line: Callable[..., Any]) -> Any:
        """Returns a figure of the whole module, extended from two small depths; None if that is not possible.

        ask   module with few layers -> its figure
        line  (figure at the first depth, at the second, further layers) -> figure of the whole; raises `NoLine`
        """
        if self.layers is None or not self.few:
            return None
        try:
            return line(*map(ask, self.few), self.layers.count - DEPTHS[1])
        except NoLine:
            return None

    @property
    def on_cpu(self) -> bool:
        """Whether the cluster's ranks are CPU ranks: they hold the whole global batch, and gloo reduces copies."""
        return self.cluster.device.kind == "cpu"

    def of_micro_batch(self, micro: int) -> Traced:
        """Returns a copy that forecasts from a trace of exactly `micro` samples; traces already made are shared."""
        other = copy(self)
        other.samples = (micro, micro)
        other.few = [few.of_micro_batch(micro) for few in self.few]
        return other

    def draws(self, layout: Layout, batch: int) -> tuple[float, float] | None:
        """Returns seconds of a step of replicas (randomness "global", "fast"); None on a CPU, or if none is random."""
        if self.on_cpu or not self.first.follows:
            return None
        own = self.of_micro_batch(layout.micro_batch)
        fast = copy(own)
        # separate caches, since the keys of traces do not include `follow`
        fast.follow, fast._models, fast._traces, fast._ranks, fast.few = False, {}, {}, {}, []
        rows = layout.micro_batch * layout.n_micro * layout.rounds
        plain = Layout(
            replicas=max(1, batch // rows), micro_batch=layout.micro_batch, n_micro=layout.n_micro * layout.rounds,
            seq=1, recompute=layout.recompute,
        )  # fmt: skip
        return own.simulate(plain, batch).step_s, fast.simulate(plain, batch).step_s

    @cached_property
    def first(self) -> StepTrace:
        """Returns the trace of the smaller of the two micro-batches, without recompute; may raise `InputError`."""
        began = process_time()
        try:
            smaller = self._trace(self.samples[0], PLAIN, 0)
        except InputError as error:
            plan = Plan(precision=self.precision)
            # as in a run, a module that refuses mixed dtypes runs in one dtype, and a remark says so
            if (met := met_at(self.task, plan, error)) is None:
                raise
            self.task, self.looks, self.few = met, TaskAnalysis(met, self.sample), []
            self._traces.clear()  # failures are cached too
            self.remark(told_met(plan))
            smaller = self._trace(self.samples[0], PLAIN, 0)
        self._first_trace_s = process_time() - began
        return smaller

    @property
    def second_trace_s(self) -> float:
        """Returns the seconds that the trace of the larger micro-batch will take; 0 if it exists."""
        return 0.0 if (self.samples[1], PLAIN, 0) in self._traces else self._first_trace_s

    @property
    def routed(self) -> bool:
        """Whether the module routes tokens to experts."""
        first = self.first
        return first.balanced or (first.chose and self.analysis.holds_experts)

    def model(self, blocks: BlockMemory | str, data_ranks: int = 1, micro: int | None = None) -> Model:
        """Returns the `Model` of the unsharded module for micro-batches of `micro` samples; may raise `InputError`.

        blocks  choices on memory, or a recompute policy; `micro` itself is traced if two traces ran different ops
        """
        blocks = BlockMemory(blocks) if isinstance(blocks, str) else blocks
        joined = self.joined(blocks.recompute, data_ranks)
        if blocks.moved != "none" and micro is not None:  # a byte limit decides what moves: not linear
            return self._model_at(blocks, joined, (micro, micro))
        return self._model_of(blocks, joined, micro)

    def _model_of(self, blocks: BlockMemory, joined: int, micro: int | None = None) -> Model:
        model = self._model_at(blocks, joined, self._sizes(micro))
        # traces of different operations cannot be interpolated, so exactly this size is traced
        # (test_two_traces_that_differ_are_never_put_on_a_line)
        if micro is None or same_ops(model.small, model.large):
            return model
        return self._model_at(blocks, joined, (micro, micro))

    def _model_at(self, blocks: BlockMemory, joined: int, sizes: tuple[int, int]) -> Model:
        key = blocks, joined, sizes
        if key not in self._models:
            self._models[key] = self._model(*(self._trace(count, blocks, joined) for count in sizes))
        return self._models[key]

    def _sizes(self, micro: int | None) -> tuple[int, int]:
        """Returns the two micro-batch sizes to trace: `self.samples`, or twice `micro` if it is no larger."""
        return (micro, micro) if micro is not None and micro <= self.samples[0] else self.samples

    def _trace(self, count: int, blocks: BlockMemory, joined: int) -> StepTrace:
        """Returns the trace of `count` samples, cached and extended from few layers if possible; or `InputError`."""

        def made() -> StepTrace:
            few = self._of_few(lambda few: few._trace(count, blocks, joined), longer_trace)
            if few is not None:
                return cast(StepTrace, few)
            self.say(f"{self.task.name}: tracing the whole module, {count} samples, remat={blocks.recompute}")
            return trace(self.task, count, self.precision, blocks.recompute, self.sample, joined,
                         fused=not self.on_cpu, follow=self.follow, wrap=blocks.wrap, moved=blocks.moved,
                         moments=blocks.moments)  # fmt: skip

        # refusals are cached too, so that what cannot be traced is not tried again
        return once(self._traces, (count, blocks, joined), made)

    def joined(self, recompute: str, data_ranks: int) -> int:
        """Returns the ranks that share batch statistics: 0 if each computes its own; 2 stands for any more than 1."""
        if not joins_batch_norms(data_ranks, Plan(remat=recompute, precision=self.precision)):
            return 0
        return min(2, data_ranks) if self.first.batch_norms else 0

    def can_run(self, layout: Layout) -> bool:
        """Whether batch norms have more than one value to normalise in a micro-batch."""
        return layout.dp * layout.micro_batch > 1 or not self.first.alone

    def _cuts(self, layout: Layout) -> Cuts:
        joined = self.joined(layout.recompute, layout.dp)
        return replace(Cuts.of(layout, self.precision, gloo=self.on_cpu), joined=joined, fused=not self.on_cpu,
                       follow=self.follow)  # fmt: skip

    def _model(self, small: StepTrace, large: StepTrace) -> Model:
        update = replace(self.seen, whole=self.nature.whole)
        return Model(small, large, update, self.task.name, self.whole, self.on_cpu)

    @cached_property
    def nature(self) -> Nature:
        """Returns the optimizer's `Nature` (elementwise, per tensor or joint), found by the same trial as a run's."""
        module = self.analysis.built.module
        kinds = shapes_outside(module)
        trained = [kinds[name] for name, param in module.named_parameters() if param.requires_grad]
        return try_out(self.task.optimizer, *map(list, zip(*trained, strict=True)))

    def fits(self, layout: Layout, batch: int, constraints: Constraints) -> bool:
        """Whether a layout's fullest rank fits in the device's memory; `batch`: samples of a step."""
        room = self.cluster.device.memory_bytes * (1 - constraints.headroom) - CONTEXT_BYTES
        return self.memory(layout, batch).reserved <= room

    def can_recompute(self, name: str) -> bool:
        """Whether the module can be traced under the recompute policy `name`; adds a remark if not."""
        if name == "none":
            return True
        try:
            self.model(name)
        except InputError as error:
            self.remark(f"remat={name} is left out: {error}")
            return False
        return True

    def _left_out(self, what: str, why: str) -> None:
        """Adds `what` to the remark that ends in the reason `why`, or as a new remark."""
        for at, text in enumerate(self.remarks):
            if text.endswith(why):
                named = text.removesuffix(why).split("; ")
                self.remarks[at] = "; ".join(dict.fromkeys([*named, what])) + why
                return
        self.remark(what + why)

    def remark(self, text: str) -> None:
        """Adds a line for people to the search's result, once."""
        if text not in self.remarks:
            self.remarks.append(text)

    @cached_property
    def reading(self) -> Reading:
        """Returns the time of reading the task's input, measured on this machine."""
        self.say(f"{self.task.name}: timing its input")
        return timed_reading(self.task, self._first_read_s)

    # --- cut modules

    def ranks(self, key: Cuts, sizes: Sizes, beside: Beside = ALIKE, place: Place | None = None) -> list[Model]:
        """Returns a `Model` of each rank that differs, cached; `place`: of one tile, None: of all that count."""
        return once(self._ranks, (key, sizes, beside, place), lambda: self._rehearsed(key, sizes, beside, place))

    def _rehearsed(self, key: Cuts, sizes: Sizes, beside: Beside, place: Place | None) -> list[Model]:
        """Rehearses each rank that differs, or extends ranks of few layers; raises `RefusedPlan`."""
        if key.pp == 1 and (models := self._of_few(lambda few: few.ranks(key, sizes, beside, place), _longer_rows)):
            self.spent += sum(len(sizes) * few.model("none").small.kernels for few in self.few)
            return cast(list[Model], models)
        self.say(f"{self.task.name}: deriving the cuts of {key.plan}")
        shares = CutRehearsal(self.looks, key)
        # the trace of the whole module knows which modules cannot be units of zero=3
        if key.sharded.weights:
            self.looks.enclosed.setdefault(key.wrap, set(self.model("none").small.enclosed))
        models = []
        # a search rehearses only the most demanding places, the forecast of a single plan all that may differ
        all_places = shares.places if self.samples[0] == self.samples[1] else shares.telling_places
        for at, tp, pp in shares.ranks(all_places if place is None else [place]):
            tile = f"share {'x'.join(map(str, at))} of positions, " if key.cut_positions > 1 else ""
            self.say(f"{self.task.name}: rehearsing {key.plan}, {tile}rank {tp} of tp, stage {pp}")
            self.spent += len(sizes) * self.model("none").small.kernels
            traces = [trace_of(shares, tp, pp, counts, beside, at) for counts in sizes]
            models.append(self._model(traces[0], traces[-1]))
        return models

    def cut(self, layout: Layout, batch: int) -> list[Model]:
        """Returns a `Model` of each rank that differs, on the fullest data rank; raises `RefusedPlan` as a run."""
        key, sizes, beside = self._key(layout, batch)
        rows = self._first_of_two if self._has_more(key, layout, batch) else self.ranks
        models = rows(key, sizes, beside)
        # two sizes with different operations or collectives cannot be interpolated
        if len(sizes) == 1 or all(same_row(rank.small, rank.large) for rank in models):
            return models
        return rows(key, ((layout.micro_batch,),), beside)

    def _first_of_two(self, key: Cuts, sizes: Sizes, beside: Beside) -> list[Model]:
        """Returns a `Model` of each rank with one micro-batch in flight, taken from its rehearsal with two."""
        return once(self._ranks, (key, sizes, beside, None), lambda: [
            replace(rank, small=cast(RankTrace, rank.small).of_one, large=cast(RankTrace, rank.large).of_one)
            for rank in self.ranks(replace(key, microbatches=2), sizes, beside)
        ])  # fmt: skip

    def _has_more(self, key: Cuts, layout: Layout, batch: int) -> bool:
        """Whether a search will also need this layout under zero=3 with several micro-batches."""
        data = layout.world_size == layout.dp and layout.ep == 1
        even = layout.global_batch == batch > layout.dp
        return key.sharded.weights and key.microbatches == 1 and data and even and self.samples[0] < self.samples[1]

    def _key(self, layout: Layout, batch: int) -> tuple[Cuts, Sizes, Beside]:
        """Returns (cuts of the module, micro-batch sizes of each rehearsal, `Beside` of them).

        A single sample is interpolated too; if such a plan leads a search, exact traces decide (`Subject.exact`).
        """
        key = self._cuts(layout)
        uneven = 0 < layout.global_batch - batch < layout.dp * layout.n_micro * layout.rounds
        if key.moved != "none" and not uneven:
            return key, ((layout.micro_batch,),), ALIKE
        # an uneven batch has micro-batches of several sizes, which are rehearsed themselves, not interpolated
        if not 0 < layout.global_batch - batch < layout.dp * layout.n_micro * layout.rounds:
            return key, tuple((count,) for count in dict.fromkeys(self.samples)), ALIKE
        return key, *played(key, layout, batch, layout.dp - 1)

    def is_rehearsed(self, layout: Layout, batch: int) -> bool:
        """Whether a layout's ranks were rehearsed already."""
        return (*self._key(layout, batch), None) in self._ranks

    def can_hold(self, layout: Layout, batch: int) -> bool:
        """Whether a layout of data ranks alone can be traced; adds a remark if not."""
        cut = self._cuts(layout).differ or layout.sharded.state
        can = self.can_cut(layout, batch) if cut else True
        return can and bool(self.weights_alone(layout) or self.can_recompute(layout.recompute))

    def _refuse(self, layout: Layout) -> None:
        """Raises `RefusedPlan` for compiled random operations, offload, or an optimizer that cannot be sharded so."""
        if layout.compile and self.model("none").small.follows:
            raise RefusedPlan(f"the model draws random numbers, {HIDDEN}")
        refuse_offload(layout, traced=True)
        refuse_optimizer(self.nature, layout.sharded, layout.tp, layout.ep, layout.pp)

    def weights_alone(self, layout: Layout) -> float:
        """Returns the least bytes of a rank's weights if these alone exceed its device; 0 if not, or offloaded."""
        if placements(layout.offload, "parameters"):
            return 0.0
        ranks = layout.tp * layout.pp * layout.ep * (layout.shard_ranks if layout.sharded.weights else 1)
        least = self.first.parameters / ranks * policy(self.precision, 0.0, layout).weight
        return least if least > self.cluster.device.memory_bytes else 0.0

    def can_cut(self, layout: Layout, batch: int) -> bool:
        """Whether a sharded layout can be rehearsed; adds a remark if not."""
        try:
            self._refuse(layout)
            if self.weights_alone(layout):  # it does not fit, whatever a rehearsal says
                return True
            if self._cuts(layout).differ:  # else the trace of the whole module is enough
                self.cut(layout, batch)
        except (RefusedPlan, InputError) as refused:
            plain = layout.with_(sp=False, recompute="none")
            self._left_out(degrees_text(plain) or f"zero={layout.zero}", f" is left out: {refused}")
            return False
        return True

    def memory(self, layout: Layout, batch: int) -> MemoryLedger:
        """Returns the memory of the rank that allocates most; of its weights alone if these do not fit."""
        if least := self.weights_alone(layout):
            return MemoryLedger({"weights": least}, WEIGHTS_ALONE)
        return max(self.ledgers(layout, batch), key=lambda ledger: ledger.allocated)

    def ledgers(self, layout: Layout, batch: int) -> list[MemoryLedger]:
        """Returns the memory of each rank of tp and pp that differs, on the fullest data rank."""
        differ = self._cuts(layout).differ
        where = BlockMemory.of(layout), layout.dp, layout.micro_batch
        ranks = self.cut(layout, batch) if differ else [self.model(*where)]
        return [memory(rank, layout, self.precision, batch) for rank in ranks]

    def simulate(self, layout: Layout, batch: int) -> Forecast:
        """Returns the forecast of a step of `batch` samples under a layout; raises `RefusedPlan`."""
        self._refuse(layout)
        soft = as_planned(self.software, layout)
        ledgers, where = self.ledgers(layout, batch), (self.cluster, soft, self.precision)
        if layout.tp * layout.pp * layout.ep * layout.cut_positions * layout.position_chunks > 1:
            ranks = self.cut(layout, batch)
            forecast = simulate_cut(ranks, layout, *where, ledgers)
        else:
            model = self.model(BlockMemory.of(layout), layout.dp, layout.micro_batch)
            if self._cuts(layout).sharded.weights:
                # zero=3 gathers the engine's units, which need not be the repeated blocks
                model = replace(model, gathered=tuple(self.cut(layout, batch)[0].small.units))
            ranks = [model]
            forecast = simulate_traced(model, layout, *where, ledgers)
        states = policy(self.precision, ranks[0].update.state_elements, layout)
        forecast.room = traced_room(ranks, layout, self.cluster, states)
        rounded_up = 0 < layout.global_batch - batch < layout.dp * layout.n_micro * layout.rounds
        forecast.samples = batch if rounded_up else layout.global_batch
        # model FLOPs, without work that ranks repeat; the trace of the smaller micro-batch may be the only one
        alone = layout.micro_batch if layout.micro_batch == self.samples[0] else None
        forecast.flops = self.model("none", micro=alone).flops(forecast.samples)
        forecast.basis |= switches(layout, eager=bool(self.cluster.device.ops))
        return forecast


def _longer_rows(few: list[Model], more: list[Model], layers: int) -> list[Model]:
    return [longer(before, after, layers) for before, after in zip(few, more, strict=True)]


def places(degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns every coordinate on axes of these degrees, outermost first, in rank order."""
    return [*product(*map(range, degrees))]


def degrees_text(layout: Layout) -> str:
    """Returns the degrees above 1 of axes that cut the module, as in a plan: "tp=2, pp=4, sp"."""
    degrees = [f"domain={'x'.join(map(str, layout.domain))}"] if layout.tiles > 1 else []
    named = (*layout.along.items(), ("tp", layout.tp), ("pp", layout.pp), ("ep", layout.ep))
    degrees += [f"{name}={degree}" for name, degree in named if degree > 1]
    degrees += ["sp"] if layout.sp else []
    degrees += [f"remat={layout.recompute}"] if layout.recompute != "none" else []
    return ", ".join(degrees)
