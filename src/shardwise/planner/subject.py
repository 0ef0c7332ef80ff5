"""`Subject`: what a search needs of a model. Made here for decoders by numbers, by traced_layouts for any task."""

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
    """What a search needs to know about a model.

    layers, global_batch, seq  blocks; samples of a step; tokens of a sample, 1 for a task that is traced
    layouts   (devices, constraints) -> those to look at
    estimate  seconds of a step, quickly; `memory`: of the fullest rank; `simulate` raises `RefusedPlan`
    """

    name: str
    layers: int
    global_batch: int
    seq: int
    layouts: Callable[[int, Constraints], Iterable[Layout]]
    estimate: Callable[[Layout], float]
    memory: Callable[[Layout], MemoryLedger]
    simulate: Callable[[Layout], Forecast]
    room: Callable[[Layout], Room]  # what the tiers of one host's ranks take
    remarks: Sequence[str] = ()  # may grow while layouts are looked at
    own: bool = False  # a task that can be trained, not a shape by name
    # the same with another global batch, where that is cheap to ask for
    with_batch: Callable[[int], Subject] | None = None
    reading: Callable[[], Reading] | None = None  # times the task's input
    # the same as `simulate`, from traces of the very micro-batch, where others are on a line between two
    exact: Callable[[Layout], Forecast] | None = None
    # takes a function to call before what takes so many seconds: a search shows what it knows by then
    when_long: Callable[[Callable[[float], None]], None] | None = None
    # seconds of a step of data ranks with the plan's micro-batch, with draws of one process and with a GPU's own; None
    # where nothing is drawn so
    draws: Callable[[Layout], tuple[float, float] | None] | None = None
    sample: str = ""  # made up for a model without data, in words
    head: str = ""  # of transformers, for a model that was built of a configuration
    unsearched: str = ""  # which plans a search does not look at, in words


def decoder(shape: Shape, cluster: Cluster, soft: Software, global_batch: int, seq: int, precision: str) -> Subject:
    """Returns a decoder by its numbers, computed in 16 bits; other precisions raise `InputError`."""
    if precision not in SIXTEEN_BITS:
        raise InputError(
            f"a decoder by its numbers is forecast in 16-bit arithmetic: use precision={' or '.join(SIXTEEN_BITS)}, "
            f"not {precision}; a task of your own is traced in any precision"
        )
    # shardwise keeps what the precision says; other software has one policy of its own, but for masters in 16 bits
    if soft.name == "shardwise" or precision == "bf16-full":  # the others have one policy beside masters in float32
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
    """Returns the layout unchanged; raises `RefusedPlan` where a decoder of this shape cannot have it."""
    refuse(layout)
    if layout.ep > max(shape.experts, 1):
        have = f"{shape.experts} experts" if shape.experts else "no experts"
        raise RefusedPlan(f"ep={layout.ep} deals experts over ranks, and {shape.name or 'this decoder'} has {have}")
    stages, parts = layout.pp * layout.chunks, shape.layers + 2
    if stages > parts:
        # every stage has a layer, the embedding or the head at least
        raise RefusedPlan(
            f"{stages} stages of {parts} parts: {shape.name or 'this decoder'} has {shape.layers} layers, an embedding "
            "and a head, and every stage holds one of them at least: lower pp or stages_per_rank"
        )
    if layout.tiles > 1:
        raise RefusedPlan("domain cuts fields of space, and a decoder's samples are sequences: use cp or cp_ulysses")
    if layout.others:
        named = ", ".join(f"{name}={degree}" for name, degree in layout.others)
        # an axis that only a traced module has
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


MOST_COUNTS = 2  # of the largest that do, beside the largest power of two


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """Returns the cluster made of the first `count` devices (rounded up to whole units of a tier)."""
    tiers, left = [], count
    for tier in cluster.tiers:
        size = min(tier.count, left)
        tiers.append(replace(tier, count=size))
        # the number of units of the next tier that these devices fill
        left = -(-left // size)
    return replace(cluster, tiers=tuple(tiers), name=f"{count} of {cluster}")


def counts_that_do(subject: Subject, cluster: Cluster, constraints: Constraints) -> list[int]:
    """Returns smaller numbers of devices that have plans: the largest ones of whole nodes, and a power of two.

    For a model by its numbers, of which it is quick to ask, and where no field of the plan was fixed; else none.
    """
    world, node = cluster.world_size, cluster.sizes[0] if len(cluster.tiers) > 1 else 1
    if subject.own or constraints.fixed:
        return []

    def has_any(count: int) -> bool:
        if first_devices(cluster, count).world_size != count:  # no whole part of the nodes that there are
            return False
        return next(iter(subject.layouts(count, constraints)), None) is not None

    power = 1 << (world - 1).bit_length() - 1
    # down to the power of two, which is added below; to half of it where nodes do not make it up
    least = power if first_devices(cluster, power).world_size == power else power // 2
    whole = range((world - 1) // node * node, least, -node)
    counts: list[int] = []
    for count in whole:
        if len(counts) < MOST_COUNTS and has_any(count):
            counts.append(count)
    return [*counts, *([power] if power < world and has_any(power) else [])]


READS = 3  # of the task's input, of which the quickest is taken
LONG_S = 0.5  # one read that takes as long is enough


@dataclass(frozen=True)
class Reading:
    """The time that reading a task's input takes, as measured on the machine that plans.

    seconds   for one sample
    whole     every rank makes the global batch; else each reads its own samples
    """

    seconds: float
    whole: bool

    def wait(self, layout: Layout, batch: int) -> float:
        """Returns the seconds that one reader of a rank takes for a step's samples."""
        return self.seconds * (batch if self.whole else -(-batch // layout.dp))


def timed_reading(task: Task, first_s: float) -> Reading:
    """Times a few reads of the task's input and returns the quickest; `first_s`: seconds of the first read."""
    # one slow read is enough; of a task that makes its batches the first read was of a whole one, not of a sample
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
