"""`Subject`: what a search needs of a model. Made here for decoders given by sizes, by traced_layouts for tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from time import perf_counter

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.costs.memory import MemoryLedger
from shardwise.costs.offload import refuse
from shardwise.costs.room import Room
from shardwise.costs.shapes import Shape
from shardwise.costs.software import STATES, Software, as_planned
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.precisions import BYTES, PRECISIONS
from shardwise.planner.candidates import UNSEARCHED, Constraints, decoder_layouts
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.host_room import decoder_room
from shardwise.simulator.parts import StepContext
from shardwise.simulator.quick import Estimator
from shardwise.simulator.step import simulate
from shardwise.step.batching import samples_in
from shardwise.task import Task

SIXTEEN_BITS = tuple(name for name, row in PRECISIONS.items() if BYTES[row.compute] == 2)


@dataclass(frozen=True)
class Subject:
    """A model with its global batch, as a search sees it: which layouts there are, and functions that forecast them.

    layers        number of repeated blocks
    global_batch  samples of a step
    seq       tokens of a sample; 1 for a traced task
    layouts   (number of devices, constraints) -> the layouts to try
    estimate  layout -> quick estimate of a step's seconds
    memory    layout -> memory of the rank that allocates most
    simulate  layout -> forecast; raises `RefusedPlan`
    """

    name: str
    layers: int
    global_batch: int
    seq: int
    layouts: Callable[[int, Constraints], Iterable[Layout]]
    estimate: Callable[[Layout], float]
    memory: Callable[[Layout], MemoryLedger]
    simulate: Callable[[Layout], Forecast]
    room: Callable[[Layout], Room]  # bytes that offloading takes on one host
    remarks: Sequence[str] = ()  # lines for people; tracing a layout may add some
    own: bool = False  # whether it is a task that can be trained, not a shape by name
    # samples of another global batch -> the subject with it; None: not supported
    with_batch: Callable[[int], Subject] | None = None
    reading: Callable[[], Reading] | None = None  # times the task's input; None: it has no data
    # as `simulate`, from a trace of exactly the layout's micro-batch; None: `simulate` is exact already
    exact: Callable[[Layout], Forecast] | None = None
    # registers a function that is called with the seconds which a slow trace will take, before it begins
    when_long: Callable[[Callable[[float], None]], None] | None = None
    # layout -> seconds of a step of data ranks with (randomness="global", "fast"); None: no random numbers
    draws: Callable[[Layout], tuple[float, float] | None] | None = None
    sample: str = ""  # description of the made-up sample of a model without data
    head: str = ""  # name of the transformers head, for a model built from a configuration
    unsearched: str = ""  # which plans a search does not try, for people


def decoder(shape: Shape, cluster: Cluster, soft: Software, global_batch: int, seq: int, precision: str) -> Subject:
    """Returns the `Subject` of a decoder given by its sizes; raises `InputError` if `precision` is not of 16 bits.

    global_batch  samples of a step; `seq`: tokens of a sample
    """
    if precision not in SIXTEEN_BITS:
        raise InputError(
            f"a decoder by its numbers is forecast in 16-bit arithmetic: use precision={' or '.join(SIXTEEN_BITS)}, "
            f"not {precision}; a task of your own is traced in any precision"
        )
    # other software has one dtype policy of its own, which only `bf16-full` (no float32 masters) replaces
    if soft.name == "shardwise" or precision == "bf16-full":
        soft = replace(soft, states=precision if precision in STATES else "bf16")
    estimators = cache(partial(Estimator, shape, cluster))
    node = cluster.sizes[0] if len(cluster.tiers) > 1 else cluster.world_size

    def layouts(world: int, constraints: Constraints) -> Iterable[Layout]:
        return decoder_layouts(shape, world, global_batch, seq, node, constraints)

    return Subject(
        shape.name or "decoder", shape.layers, global_batch, seq, layouts,
        lambda layout: estimators(as_planned(soft, layout)).seconds(_forecast(shape, layout)),
        lambda layout: estimators(as_planned(soft, layout)).memory(layout),
        lambda layout: simulate(shape, _forecast(shape, layout), cluster, as_planned(soft, layout)),
        lambda layout: decoder_room(StepContext(shape, layout, cluster, as_planned(soft, layout))),
        with_batch=lambda count: decoder(shape, cluster, soft, count, seq, precision), unsearched=UNSEARCHED,
    )  # fmt: skip


def _forecast(shape: Shape, layout: Layout) -> Layout:
    """Returns the layout unchanged, or raises `RefusedPlan` if it is not forecast for a decoder of this shape."""
    refuse(layout)
    if layout.ep > max(shape.experts, 1):
        have = f"{shape.experts} experts" if shape.experts else "no experts"
        raise RefusedPlan(f"ep={layout.ep} deals experts over ranks, and {shape.name or 'this decoder'} has {have}")
    stages, parts = layout.pp * layout.chunks, shape.layers + 2
    # every stage holds a layer, the embedding or the head
    if stages > parts:
        raise RefusedPlan(
            f"{stages} stages of {parts} parts: {shape.name or 'this decoder'} has {shape.layers} layers, an embedding "
            "and a head, and every stage holds one of them at least: lower pp or stages_per_rank"
        )
    if layout.tiles > 1:
        raise RefusedPlan("domain cuts fields of space, and a decoder's samples are sequences: use cp or cp_ulysses")
    if layout.others:
        named = ", ".join(f"{name}={degree}" for name, degree in layout.others)
        raise RefusedPlan(f"{named} is forecast by tracing a module, and a decoder's numbers are none: name its task")
    if layout.position_chunks > 1:
        raise RefusedPlan(
            "position_chunks is forecast by tracing a module, and a decoder's numbers are none: name its task"
        )
    if layout.wrap:
        raise RefusedPlan(
            "wrap names modules, and a decoder by its numbers has none: its layers are the units; name its task"
        )
    return layout


MOST_COUNTS = 2  # numbers of devices that `counts_that_do` returns, besides the largest power of two


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """Returns a cluster of the first `count` devices, rounded up to complete units of each tier."""
    tiers, left = [], count
    for tier in cluster.tiers:
        size = min(tier.count, left)
        tiers.append(replace(tier, count=size))
        # the number of units of the next tier that these devices fill
        left = -(-left // size)
    return replace(cluster, tiers=tuple(tiers), name=f"{count} of {cluster}")


def counts_that_do(subject: Subject, cluster: Cluster, constraints: Constraints) -> list[int]:
    """Returns smaller numbers of devices for which there are plans: the largest of complete nodes, and a power of two.

    Returns [] for a traced task, which would take too long, and if the user fixed a field of the plan.
    """
    world, node = cluster.world_size, cluster.sizes[0] if len(cluster.tiers) > 1 else 1
    if subject.own or constraints.fixed:
        return []

    def has_any(count: int) -> bool:
        if first_devices(cluster, count).world_size != count:  # these devices are no complete units
            return False
        return next(iter(subject.layouts(count, constraints)), None) is not None

    power = 1 << (world - 1).bit_length() - 1
    # the power of two itself is added below, unless complete nodes do not add up to it
    least = power if first_devices(cluster, power).world_size == power else power // 2
    whole = range((world - 1) // node * node, least, -node)
    counts: list[int] = []
    for count in whole:
        if len(counts) < MOST_COUNTS and has_any(count):
            counts.append(count)
    return [*counts, *([power] if power < world and has_any(power) else [])]


READS = 3  # reads of the task's input that are timed, of which the quickest counts
LONG_S = 0.5  # seconds of a read after which no further one is timed


@dataclass(frozen=True)
class Reading:
    """The time that reading a task's input takes, measured on the machine that plans.

    seconds   of one sample
    whole     whether every rank makes the global batch; if not, each reads its own samples
    """

    seconds: float
    whole: bool

    def wait(self, layout: Layout, batch: int) -> float:
        """Returns the seconds that one reader of a rank takes for a step of `batch` samples."""
        return self.seconds * (batch if self.whole else -(-batch // layout.dp))


def timed_reading(task: Task, first_s: float) -> Reading:
    """Times a few reads of the task's input and returns the quickest; `first_s`: seconds of the first read."""
    # one slow read is enough, unless the task makes whole batches, since `first_s` is then not of one sample
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
