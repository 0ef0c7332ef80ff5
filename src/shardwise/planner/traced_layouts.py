"""`traced_subject`: a traced task as a `Subject`, with the layouts that a search tries, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from math import inf

from shardwise.cluster import Cluster
from shardwise.costs.layout import RECOMPUTES, Layout
from shardwise.costs.memory import CONTEXT_BYTES
from shardwise.costs.software import Software
from shardwise.costs.units import bytes_text, seconds_text
from shardwise.engine.find_positions import tiled_sizes
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.layout.offload import placements
from shardwise.layout.plan import ALONG
from shardwise.layout.zero_stages import SHARDED, UNSHARDED, default_stage
from shardwise.planner.alike_layers import AlikeLayers
from shardwise.planner.bound import Slower, least_seconds
from shardwise.planner.candidates import (
    Constraints,
    cut_layouts,
    data_layouts,
    divisors,
    expert_layouts,
    plan_of,
    sequence_layouts,
    spread_layouts,
    tile_layouts,
)
from shardwise.planner.subject import Subject
from shardwise.planner.traced_task import Traced, degrees_text
from shardwise.progress import Say, silent
from shardwise.random import Randomness
from shardwise.simulator.cut import HALOS
from shardwise.step.batching import samples_in
from shardwise.task import Task

MOST_OPS = 30_000  # operations in all rehearsals of a search: some twenty seconds
CHUNKS = 8  # position_chunks that is tried
CUTS = ("tp", "pp", "ep", "domain", *ALONG)  # keys that shard the module
MOST_DIMS = 3  # dims of space that tiles may cut
DEPTHS = (2, 4)  # domain_depth that is tried: convolutions served by one exchange of halos
WORTH = 0.05  # sharding that cannot make a step shorter by this fraction is not rehearsed


class TracedLayouts:
    """The layouts of a traced task for one global batch, in the order in which a search tries them.

    batch       samples of a step
    recomputes  recompute policies to try, "none" first
    """

    def __init__(self, traced: Traced, batch: int, recomputes: list[str]):
        self.traced, self.batch, self.recomputes = traced, batch, recomputes

    def candidates(self, world: int, constraints: Constraints) -> Iterable[Layout]:
        """Yields layouts on `world` devices: data ranks alone, then cut positions, then tp, pp, ep if worth it.

        The search must take the layouts one by one, since later ones depend on the times of those that fit.
        """
        # cuts: whether anything but data ranks is tried
        traced, batch, cuts = self.traced, self.batch, self.traced.cuts
        moves = constraints.moves_weights
        own = [*filter(traced.can_run, data_layouts(world, batch, traced.node, self.recomputes, moves=moves))]
        first = traced.samples[0]  # a stable sort: of equal layouts the one without recompute stays first
        own.sort(key=lambda layout: (self._takes_long(layout), layout.micro_batch != first))
        fastest, best = inf, None

        def noted(layouts: Iterable[Layout]) -> Iterator[Layout]:
            """Yields the layouts; keeps the `fastest` seconds that fit, and the fastest layout with cut positions."""
            nonlocal fastest, best
            for layout in layouts:
                yield layout
                if traced.fits(layout, batch, constraints):
                    seconds = traced.simulate(layout, batch).step_s
                    if layout.cut_positions > 1 and (best is None or seconds < traced.simulate(best, batch).step_s):
                        best = layout
                    fastest = min(fastest, seconds)

        yield from noted(self._lean(own, constraints, self._can_hold))
        if fastest == inf and cuts:  # nothing fits, so chunks of a sample's positions are tried
            yield from noted(self._cut_within(self._chunked(own, world, constraints), constraints))
        yield from noted(self._cut_within(self._positions(world, constraints) if cuts else [], constraints))
        yield from noted(self._cut_within(self._waiting_less(best, constraints), constraints))
        if cuts and self._are_worth_cutting(fastest, world, constraints):
            cut = [*filter(traced.can_run, cut_layouts(world, batch, traced.node, self.recomputes, constraints))]
            # ep with data ranks alone comes before ep with tp and pp; a module without a router has no experts
            few, many = (expert_layouts(some if traced.routed else (), traced.node, constraints) for some in (own, cut))
            yield from self._while_faster(chain(few, cut, many), Slower(fastest, self._least(world)), constraints)

    def _takes_long(self, layout: Layout) -> bool:
        """Whether a layout needs a trace or rehearsal of its own, besides the two traces of every task."""
        return layout.sharded.weights or layout.recompute != "none" or layout.micro_batch < self.traced.samples[0]

    def _can_hold(self, layout: Layout, _: set[Layout]) -> bool:
        """Whether the layout can be traced; announces a slow trace first (`Subject.when_long`)."""
        if self._takes_long(layout):
            # lets a search show its first table (test_a_first_table_is_there_before_anything_is_rehearsed)
            self.traced.before_long(inf)
        elif layout.micro_batch != self.traced.samples[0]:
            self.traced.before_long(self.traced.second_trace_s)
        return self.traced.can_hold(layout, self.batch)

    def _lean(
        self, layouts: Iterable[Layout], constraints: Constraints, can: Callable[[Layout, set[Layout]], bool]
    ) -> Iterator[Layout]:
        """Yields the layouts that meet the constraints, leaving out recompute if the layout fits without it.

        Of equal layouts the one without recompute has to come first; if it fits, recompute only adds time.

        can   (layout, layouts that fit so far) -> whether to trace and take it; called last, since a trace takes long
        """
        asked = constraints.value("remat") is not None
        fitted: set[Layout] = set()
        refused: set[Layout] = set()  # not traceable without recompute, so not with it either
        for layout in map(constraints.applied, layouts):
            plain = layout.with_(recompute="none")
            # layout/rules refuses selective recompute with offloaded activations
            if layout.recompute == "selective" and placements(layout.offload, "activations"):
                continue
            if constraints.fixed and not constraints.allows(plan_of(layout, self.traced.precision)):
                continue
            if plain in refused or (plain in fitted and not asked):
                continue
            if not can(layout, fitted):
                refused.add(layout)
                continue
            if layout == plain and self.traced.fits(layout, self.batch, constraints):
                fitted.add(plain)
            yield layout

    def _cut_within(self, layouts: Iterable[Layout], constraints: Constraints) -> Iterator[Layout]:
        """Yields the layouts that can be rehearsed, until rehearsals have run `MOST_OPS` operations; adds a remark.

        zero=3 is left out if the same layout fits with less, since it adds time, and if the layout without zero cannot
        be rehearsed, since zero=3 cannot change that.
        """
        asked = any(constraints.value(name) is not None for name in CUTS)
        refused: set[Layout] = set()
        left: dict[str, None] = {}

        def can(layout: Layout, fitted: set[Layout]) -> bool:
            """Whether to rehearse and take a layout, given the layouts that fit so far."""
            plain = layout.with_(recompute="none")
            # if it fails without zero it fails with it; layouts with ep have no counterpart without zero
            if layout.ep == 1 and plain.with_(zero=0, shard=1, replicas=layout.dp) in refused:
                return False
            # if sharding optimizer state is enough to fit, sharding gradients only adds messages
            least = plain.with_(zero=SHARDED[0].number)
            if layout.sharded.gradients and constraints.value("zero") is None and least in fitted:
                return False
            if any(fit.cut_positions < layout.cut_positions and fit.world_size == layout.world_size for fit in fitted):
                return False  # cutting positions further than needed to fit only adds halos
            if self.traced.spent > MOST_OPS and not asked and not self.traced.is_rehearsed(layout, self.batch):
                left[degrees_text(plain.with_(sp=False))] = None
                return False
            if not self.traced.can_cut(layout, self.batch):
                refused.add(layout)
                return False
            return True

        yield from self._lean(layouts, constraints, can)
        if left:
            named = "; ".join(left)
            self.traced.remark(f"not looked at, since rehearsing all takes minutes: {named} (ask for one with --fix)")

    def _while_faster(
        self, layouts: Iterable[Layout], slower: Slower, constraints: Constraints
    ) -> Iterator[Layout]:  # fmt: skip
        """Yields the layouts that can be rehearsed, skipping degrees of tp and pp beyond one that was slower."""
        traced, asked = self.traced, any(constraints.value(name) is not None for name in CUTS)
        for layout in self._cut_within((lay for lay in layouts if asked or not slower.beyond(lay)), constraints):
            yield layout
            fits = traced.fits(layout, self.batch, constraints)
            slower.note(layout, traced.simulate(layout, self.batch) if fits else None)
        for text in slower.remarks.values():
            traced.remark(text)

    def _are_worth_cutting(self, fastest: float, world: int, constraints: Constraints) -> bool:
        """Whether tp, pp or ep are fixed or could beat `fastest` seconds by `WORTH`; adds a remark if not."""
        if fastest == inf or self.traced.routed or any(constraints.value(name) is not None for name in CUTS):
            return True
        least = self._least(world)
        if (gain := 1 - least / fastest) >= WORTH:
            return True
        if world > 1:
            self.traced.remark(
                f"tp, pp and ep are not looked at: the fastest step without them computes for {seconds_text(least)} at "
                f"least, so they could make it shorter by {max(0.0, gain):.1%} at most (--fix tp=2 looks all the same)"
            )
        return False

    def _least(self, world: int) -> float:
        """Returns the lower bound of a step's compute in seconds on `world` devices."""
        traced = self.traced
        return least_seconds(traced.model("none"), self.batch, world, traced.cluster, traced.software, traced.precision)

    def _chunked(self, own: Sequence[Layout], world: int, constraints: Constraints) -> list[Layout]:
        """Returns the layouts of `own` with least memory, plus position_chunks, if one sample does not fit; else []."""
        # layout/rules refuses position_chunks with compile
        asked = constraints.value("position_chunks") is not None or bool(constraints.value("compile"))
        wall = "" if asked else self._memory_wall(world, constraints)
        if not wall:
            return []
        self.traced.remark(
            f"position_chunks={CHUNKS}, which computes wide tensors a part at a time, answers a wall: {wall}"
        )
        leanest = max((layout.zero for layout in own if layout.sharded.weights), default=UNSHARDED.number)
        few = [layout for layout in own if layout.micro_batch == 1 and layout.zero == leanest and layout.replicas == 1]
        return [layout.with_(position_chunks=CHUNKS) for layout in few]

    def _positions(self, world: int, constraints: Constraints) -> Iterable[Layout]:
        """Returns layouts that cut a sample's positions, if memory or the batch size needs it or the user fixed it.

        Fields are cut into tiles. Other samples, or fields for which the user fixed it, are cut along a sequence.
        """
        tiles, along = (
            any(constraints.value(name) not in (None, 1, (1,)) for name in names) for names in (("domain",), ALONG)
        )
        wall = self._wall(world, constraints) if world > 1 else ""
        if world == 1 or not (wall or tiles or along):
            return []
        # fields are cut into tiles, unless the user fixed a cut along a sequence
        if self.space and not along:
            bases = tile_layouts(world, self.space, constraints)
            answer = "tiles (domain) answer"
        elif along or self.has_sequence:
            bases = sequence_layouts(world, self.traced.node, constraints)
            answer = "cp and cp_ulysses, which cut a sequence, answer"
        else:
            return []
        if wall:
            self.traced.remark(f"{answer} a wall: {wall}")
        return filter(self.traced.can_run, spread_layouts(bases, world, self.batch, self.recomputes, constraints))

    def _waiting_less(self, best: Layout | None, constraints: Constraints) -> list[Layout]:
        """Returns the fastest tiled layout with other halo exchanges, if halos take `WORTH` of its step; else [].

        Halos may all overlap with convolutions (domain_overlap), or one exchange may serve several (domain_depth),
        which computes borders twice. Rehearsals show whether that is faster.
        """
        if best is None or best.tiles == 1:
            return []
        forecast = self.traced.simulate(best, self.batch)
        if forecast.parts.get(HALOS, 0.0) < WORTH * forecast.step_s:
            return []
        # if the user fixed one of the two keys, no other value is tried
        asked = [constraints.value(name) is not None for name in ("domain_overlap", "domain_depth")]
        beside = [] if any(asked) else [best.with_(domain_overlap="always")]
        # layout/rules refuses domain_depth with compile
        deep = [] if any(asked) or best.compile else [best.with_(domain_depth=depth) for depth in DEPTHS]
        return beside + deep

    @cached_property
    def has_sequence(self) -> bool:
        """Whether a sequence of the task's samples can be cut over two ranks; adds a remark if not."""
        try:
            return self.traced.analysis.positions(Plan(cp=2, precision=self.traced.precision)) is not None
        except (RefusedPlan, InputError) as refused:
            self.traced.remark(f"a sequence is not cut: {refused}")
            return False

    @cached_property
    def space(self) -> tuple[int, ...]:
        """Returns the size of the task's fields along each dim that tiles may cut; () for a task without fields."""
        space: tuple[int, ...] = ()
        for dims in range(1, MOST_DIMS + 1):
            try:
                sizes = tiled_sizes(self.traced.task, Plan(domain=(2,) * dims), self.traced.analysis.few)
            except RefusedPlan:  # more dims than the task names
                break
            space = sizes or space
        return space

    def _wall(self, world: int, constraints: Constraints) -> str:
        """Returns why samples should be cut (one does not fit on a device, or fewer samples than devices), or ""."""
        if wall := self._memory_wall(world, constraints):
            return wall
        return f"{self.batch} samples are fewer than {world} devices" if self.batch < world else ""

    def _memory_wall(self, world: int, constraints: Constraints) -> str:
        """Returns a sentence if one sample does not fit on a device and takes most of the memory, else ""."""
        room = self.traced.cluster.device.memory_bytes * (1 - constraints.headroom) - CONTEXT_BYTES
        data = max(d for d in divisors(world) if self.batch % d == 0)
        # weights, gradients and optimizer state are sharded as far as possible, so the rest is the sample's
        solo = Layout(shard=data, zero=default_stage(data), micro_batch=1, n_micro=self.batch // data, seq=1)
        if self.traced.can_hold(solo, self.batch) and (ledger := self.traced.memory(solo, self.batch)).reserved > room:
            sample_bytes = sum(ledger.terms.get(name, 0.0) for name in ("micro-batch", "inputs", "global batch"))
            if sample_bytes > ledger.allocated / 2:
                needed = f"{bytes_text(ledger.reserved)} on a device (zero={solo.zero} over {data}, remat=none)"
                share = f"{sample_bytes / ledger.allocated:.0%} of it for that sample"
                return f"one sample at a time needs {needed}, {share}, and there are {bytes_text(room)}"
        return ""


DEFAULT_SAMPLES = 32  # samples of a step, for a task with a data source and no batch of its own
# samples of the two traces between which others are interpolated; a single sample runs other operations (a dim of 1 is
# broadcast, not copied), so it is traced by itself
TRACED = (2, 4)


def default_samples(task: Task) -> int:
    """Returns the samples of a step if the user gives none: those of the task's batch, or `DEFAULT_SAMPLES`."""
    return samples_in(task.batch(0)) if task.batch is not None else DEFAULT_SAMPLES


def traced_subject(
    task: Task, cluster: Cluster, software: Software, global_batch: int | None, precision: str,
    wanted: tuple[str, ...] = RECOMPUTES, samples: tuple[int, int] = TRACED, cuts: bool = True, say: Say = silent,
    remarks: tuple[str, ...] = (), randomness: Randomness = "global", layers: AlikeLayers | None = None,
) -> Subject:  # fmt: skip
    """Returns the `Subject` of a task, by tracing its module.

    global_batch  samples of a step; None: `default_samples`
    wanted   recompute policies to try besides "none"
    samples  the two micro-batch sizes that are traced, or twice the only one; others are interpolated if both traces
             ran the same operations
    cuts     whether a search tries anything but data ranks
    say      called with lines of progress
    remarks  lines for people, added to its own
    randomness  as in `parallelize`
    layers   equal layers of a configured model, of which few are traced; None: the whole module is traced

    Raises `RefusedPlan` for loss_scope="model", `InputError` if the module cannot be traced.
    """
    batch = default_samples(task) if global_batch is None else global_batch
    traced = Traced(task, cluster, software, precision, samples, cuts, say, remarks, randomness, layers)
    return subject_of(traced, batch, wanted)


def subject_of(traced: Traced, batch: int, wanted: tuple[str, ...]) -> Subject:
    """Returns the `Subject` of a traced task for one global batch (samples).

    wanted  recompute policies to try besides "none"
    """
    units = len(traced.first.units)
    _remark_on(traced)
    # only repeated blocks can be recomputed
    recomputes = [*dict.fromkeys(("none", *wanted))] if units else ["none"]

    layouts = TracedLayouts(traced, batch, recomputes)

    def estimate(layout: Layout) -> float:
        return traced.simulate(layout, batch).step_s

    return Subject(
        traced.task.name, units, batch, 1, layouts.candidates, estimate, lambda layout: traced.memory(layout, batch),
        lambda layout: traced.simulate(layout, batch), lambda layout: traced.simulate(layout, batch).room,
        traced.remarks, own=True,
        with_batch=lambda count: subject_of(traced, count, wanted), reading=lambda: traced.reading,
        exact=lambda layout: traced.of_micro_batch(layout.micro_batch).simulate(layout, batch),
        when_long=lambda call: setattr(traced, "before_long", call), draws=lambda layout: traced.draws(layout, batch),
    )  # fmt: skip


def _remark_on(traced: Traced) -> None:
    """Adds remarks on parameters without a gradient, and on assumed random numbers."""
    first = traced.first
    if first.idle:
        traced.remark(f"no gradient reaches {first.idle:,} of {first.parameters:,} parameters on such samples")
    if first.drawn:
        traced.remark("a single random number is taken as 0.5: what it decides (layerdrop) goes the likelier way")
