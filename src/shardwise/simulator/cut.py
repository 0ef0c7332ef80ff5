"""`simulate_cut`: the forecast of a step of a traced module that is sharded, from rehearsals of its ranks.

memory   of each rank: states of the parameters that it holds, and the peak of its row
time     tp: a micro-batch's compute and its collectives, one after another; tiles: the same, with halos, of which those
             of large convolutions overlap with the part of these that needs no halo
         cp: the same, but blocks of keys travel while attention computes the block that has arrived
         pp: the schedule's table of ops, with the seconds of each stage's ops and messages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from shardwise.cluster import Cluster
from shardwise.costs.kernels import Kernels, peak_tflops
from shardwise.costs.layout import Layout
from shardwise.costs.memory import MemoryLedger
from shardwise.costs.software import Software, States
from shardwise.costs.wire import RankGroup, Wire
from shardwise.layout.grid import INNER, SPACE
from shardwise.layout.precisions import PRECISIONS
from shardwise.layout.timing import Played
from shardwise.simulator.counted import Model, RankTrace, StepTrace
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.held import policy
from shardwise.simulator.parts import GAPS, host_basis
from shardwise.simulator.pipeline import play_all
from shardwise.simulator.sharded import Sharded, data_seconds, on_cores
from shardwise.simulator.traced import (
    attention_seconds,
    between,
    engine_seconds,
    kernels_of,
    moved_basis,
    moved_seconds,
    optimizer_seconds,
    same_ops,
    span_seconds,
    taken,
    tiers_basis,
    with_tiers,
)

OpKey = tuple[str, int]  # (kind, stage)
Seconds = dict[OpKey, float]
TALK, HALOS = "tensor, context and expert communication", "communication between tiles"  # names of parts
APART = ("all_to_all", "point_to_point")  # operations in which ranks may receive different numbers of bytes
RING = ("cp", "point_to_point")  # (axis, op) of keys and values, and sums of their gradients, around a ring


def same_row(small: StepTrace, large: StepTrace) -> bool:
    """Whether two rehearsals of a rank ran the same operations and collectives in each op of its row."""
    first, second = cast(RankTrace, small), cast(RankTrace, large)
    if first.ops.keys() != second.ops.keys():
        return False
    return all(
        same_ops(first.ops[key], second.ops[key]) and _calls(first, key) == _calls(second, key) for key in first.ops
    )


def _calls(trace: RankTrace, key: OpKey) -> list[tuple[str, str, int]]:
    """Returns (axis, op, number of calls) of the collectives of the row's op `key`, one entry for each size."""
    return [(axis, op, times) for (axis, op, _), times in trace.wire[key].items()]


@dataclass
class _Rounds:
    """Seconds of a step's micro-batches by part, and figures from which the other parts are computed."""

    parts: dict[str, float]  # name of a part -> seconds in a step
    micro_s: float  # one micro-batch, with which other things may overlap
    busy_s: float  # one micro-batch's operations on the slowest rank
    gathered_s: float = 0.0  # waiting for zero=3's gathers and reductions in a step, with a pipeline
    bubble: float = 0.0  # share of the pipeline's time
    timeline: list[tuple[str, str, float, float]] = field(default_factory=list)


def simulate_cut(
    ranks: Sequence[Model], layout: Layout, cluster: Cluster, software: Software, precision: str,
    ledgers: Sequence[MemoryLedger],
) -> Forecast:  # fmt: skip
    """Returns the forecast of one step of a sharded module.

    ranks    one `Model` of `RankTrace`s for each rank that differs, each standing for equally many ranks
    ledgers  the memory of each of these
    """
    dtype = PRECISIONS[precision].products
    follows = any(rank.small.follows for rank in ranks)
    kernels, added = kernels_of(cluster, layout, software, dtype, follows=follows)
    wire, states = Wire(cluster, layout.world_size), policy(precision, ranks[0].update.state_elements, layout)
    rounds = _rounds(ranks, layout, _ops(ranks, layout, kernels, software, wire), wire, states)
    parts = rounds.parts
    parts["data-parallel communication"] = rounds.gathered_s + max(
        data_seconds(rank, layout, rounds.micro_s, wire, states, software)[0] for rank in ranks
    )
    parts["optimizer"] = max(
        with_tiers(rank, layout, cluster, states, optimizer_seconds(rank, layout, kernels, states)) for rank in ranks
    )
    parts |= moved_seconds(ranks, layout, cluster, states, rounds.micro_s, layout.n_micro * layout.rounds)
    parts |= engine_seconds(ranks[0], layout, added, parts["compute"])
    # GAPS was found on published runs, all of them on accelerators
    if cluster.device.kind != "cpu":
        parts["slowest device, clocks and gaps"] = (GAPS - 1) * sum(parts.values())
    correction = cluster.device.correction.value if cluster.device.correction is not None else 1.0
    # other parts are listed even at 0, but halos only if there are tiles
    parts = {name: value * correction for name, value in parts.items() if value or name != HALOS}
    # each rehearsed rank stands for those that do not differ from it
    ranks_alike = layout.tp * layout.pp * layout.cut_positions / len(ranks)
    forecast = Forecast(
        step_s=sum(parts.values()), parts=parts, memory=list(ledgers),
        flops=ranks_alike * sum(rank.flops(layout.global_batch) for rank in ranks),
        world_size=layout.world_size, samples=layout.global_batch, peak_tflops=peak_tflops(cluster.device, dtype),
        best_tflops=kernels.best_tflops / min(1.0, correction),
        convention="counted", exposed={"tensor": parts[TALK], **({"tiles": parts[HALOS]} if HALOS in parts else {}),
        "data": parts["data-parallel communication"]}, bubble=rounds.bubble, timeline=rounds.timeline,
    )  # fmt: skip
    if layout.tiles > 1:
        forecast.halos = halo_bytes(ranks, layout, wire)
    forecast.basis = _basis(ranks, layout, kernels, wire)
    ops = max(rank.linear(rank.small.kernels, rank.large.kernels, layout.micro_batch) for rank in ranks)
    forecast.basis |= tiers_basis(ranks[0], layout, cluster, states)
    forecast.basis |= moved_basis(ranks, layout, cluster, states, rounds.micro_s)
    forecast.basis |= taken(ranks) | host_basis(kernels, ops, rounds.busy_s)
    return forecast


def _rounds(
    ranks: Sequence[Model], layout: Layout, seconds: tuple[Seconds, Seconds, Seconds], wire: Wire, states: States
) -> _Rounds:
    """Returns the times of a step's micro-batches; `seconds`: as `_ops` returns them."""
    work, sent, of_tiles = seconds
    busy, talk, tiled = (max(_of_rank(rank, by_op) for rank in ranks) for by_op in (work, sent, of_tiles))
    # with a pipeline micro-batches overlap, so its schedule is played in time; without one their seconds add up
    if layout.pp > 1:
        share = sum(rank.trained for rank in ranks) / max(1, sum(rank.small.parameters for rank in ranks))
        link = Sharded(wire, states, RankGroup(layout.shard_ranks, layout.tp), layout.sharded.gathers, share)
        waits = _gathers(ranks, {key: work[key] + sent[key] for key in work}, link)
        gathered = max(_of_rank(rank, waits) for rank in ranks)
        played = _played(ranks, layout, (work, sent, waits), wire)
        times = layout.n_micro * layout.rounds
        step = layout.rounds * played.seconds
    else:
        played, gathered, times = None, 0.0, layout.n_micro
        step = times * (busy + talk)
    # halos are a part of their own, since reports show them
    parts = {"compute": times * busy, TALK: times * (talk - tiled), HALOS: times * tiled}
    rounds = _Rounds(parts, step / times, busy, times * gathered)
    if played is not None:
        # the rest of the step is waiting in the pipeline
        parts["pipeline bubble and sends"] = max(0.0, step - times * (busy + talk + gathered))
        rounds.bubble = played.bubble
        rounds.timeline = [(f"rank {r}", f"{op.kind}{op.microbatch} of {op.stage}", a, b) for r, op, a, b in played.ops]
    return rounds


def _played(ranks: Sequence[Model], layout: Layout, seconds: Sequence[Seconds], wire: Wire) -> Played:
    """Returns the pipeline's schedule played in time; an op takes the sum of `seconds`, each {(kind, stage): s}."""
    last = max(stage for by_op in seconds for _, stage in by_op)

    def of_stages(kind: str) -> list[float]:
        return [sum(by_op.get((kind, stage), 0.0) for by_op in seconds) for stage in range(last + 1)]

    whole, first, second = of_stages("B"), of_stages("I"), of_stages("W")
    # a schedule has full backwards (B), or splits each into gradients of inputs (I) and of weights (W)
    inputs = [b or i for b, i in zip(whole, first, strict=True)]
    return play_all(
        layout.schedule, layout.pp, layout.n_micro, layout.chunks, of_stages("F"), inputs, second,
        _messages(ranks, layout, wire, last),
    )  # fmt: skip


def _basis(ranks: Sequence[Model], layout: Layout, kernels: Kernels, wire: Wire) -> dict[str, str]:
    """Returns {kind of figure: line for people on its source (measured, formula, assumed)}."""
    apart = layout.tp * (1 if layout.shard_ranks > 1 else layout.pp)  # replicas are farther apart than stages
    basis = {
        "products": kernels.basis,
        "tensor parallel": wire.basis("all_reduce", RankGroup(layout.tp, 1)),
        "data ranks": wire.basis("all_reduce", RankGroup(layout.gradient_ranks, apart)),
        "work": f"{len(ranks)} rank(s) that differ, each rehearsed on fake tensors",
    }
    if layout.split_sequence > 1:
        basis["sequence"] = "bytes as rehearsed, the rate of each link; a ring's hide behind fused attention"
    if layout.tiles > 1:
        hides = any(any(trace.overlaps.values()) for trace in (_seen(rank)[0] for rank in ranks))
        basis["halos"] = "bytes as rehearsed, the rate of each link; " + (
            "those of large convolutions hide behind them, others are waited for"
            if hides
            else "waited for (not hidden behind computing)"
        )
    return basis


def groups_of(layout: Layout) -> dict[str, RankGroup]:
    """Returns {axis: its group} of "tp", "ep", "data" and each axis of `layout.inner`; size 1 if the axis is unused."""
    inner = layout.tp * layout.cut_positions
    tp = layout.tp
    groups = {"tp": RankGroup(tp, 1), "ep": RankGroup(layout.ep, tp), "data": RankGroup(layout.dp, inner)}
    stride = layout.tp
    for name, size in reversed(layout.inner):
        groups[name] = RankGroup(size, stride)
        stride *= size
    return groups


def _ops(
    ranks: Sequence[Model], layout: Layout, kernels: Kernels, software: Software, wire: Wire
) -> tuple[Seconds, Seconds, Seconds]:
    """Returns ({(kind, stage): seconds of operations}, the same of all collectives, the same of halos).

    Each is of the slowest rank, for one micro-batch.
    """
    work: Seconds = {}
    sent: Seconds = {}
    of_tiles: Seconds = {}
    talk = _Talk(layout, kernels, software, wire, groups_of(layout))
    for rank in ranks:
        small, large = _seen(rank)
        for key in small.ops:
            seconds = between(small.ops[key], large.ops[key], layout.micro_batch, kernels, software)
            work[key] = max(work.get(key, 0.0), seconds)
            # halos are kept apart, since reports show them as a part of their own
            among = talk.between_positions(rank, key, SPACE.__contains__)
            of_tiles[key] = max(of_tiles.get(key, 0.0), among)
            others = talk.of_whole(rank, key, lambda axis: axis not in INNER)
            others += talk.between_positions(rank, key, lambda axis: axis in INNER and axis not in SPACE)
            sent[key] = max(sent.get(key, 0.0), others + among)
    return work, sent, of_tiles


@dataclass
class _Talk:
    """Computes the seconds that an op of a rank's row waits for other ranks over some axes."""

    layout: Layout
    kernels: Kernels
    software: Software
    wire: Wire
    groups: dict[str, RankGroup]  # axis -> its group

    def of_whole(self, rank: Model, key: OpKey, axes: Callable[[str], bool]) -> float:
        """Returns seconds of an op's collectives in which all ranks send as much; `axes`: axis -> whether it counts.

        Sizes, not times, are interpolated between the two numbers of samples.
        """
        # APART operations over positions are counted by bytes received (`between_positions`), since ranks differ
        ends = [trace.wire[key].items() for trace in _seen(rank)]
        return sum(
            calls * self.wire.collective(op, self.groups[axis], rank.linear(low, high, self.layout.micro_batch))
            for ((axis, op, low), calls), ((_, _, high), _) in zip(*ends, strict=True)
            if axes(axis) and not (axis in INNER and op in APART)
        )

    def between_positions(self, rank: Model, key: OpKey, axes: Callable[[str], bool]) -> float:
        """Returns the seconds that an op waits for ranks with other positions, overlap subtracted; `axes`: as above."""
        calls = Counter[tuple[str, str]]()
        for (axis, op, _), times in _seen(rank)[0].wire[key].items():
            calls[axis, op] += times
        seconds = self.of_whole(rank, key, axes)
        for (axis, op), came in _arrivals(rank, key, self.layout).items():
            if axes(axis):
                passing = self.wire.exchange(came, self.groups[axis], calls[axis, op])
                seconds += max(0.0, passing - self._hidden(rank, key, (axis, op)))
        return seconds

    def _hidden(self, rank: Model, key: OpKey, passing: tuple[str, str]) -> float:
        """Returns the seconds of an exchange, `passing` (axis, op), that overlap with operations."""
        small, large = _seen(rank)
        micro = self.layout.micro_batch
        if passing == RING:  # each block but the last is computed while the next one travels
            busy = attention_seconds(small.ops[key], large.ops[key], micro, self.kernels, self.software)
            return busy * (1 - 1 / self.layout.cp)
        group = self.groups[passing[0]]
        # the cores that copy a halo are those that compute, so they cannot do both
        if on_cores(self.wire) and self.wire.tier(group) == 0:
            return 0.0
        seconds = 0.0
        both = zip(small.overlaps[key], large.overlaps[key], strict=True)
        for (axis, op, came, start, stop), (_, _, more, *_) in both:
            if (axis, op) == passing:
                at = {far: rank.linear(low, more[far], micro) for far, low in came.items()}
                span = small.ops[key], large.ops[key], micro, slice(start, stop)
                busy = span_seconds(*span, self.kernels, self.software)
                seconds += min(busy, self.wire.exchange(at, group, 1))
        return seconds


def _arrivals(rank: Model, key: OpKey, layout: Layout) -> dict[tuple[str, str], dict[int, float]]:
    """Returns {(axis, op): {sender's index minus this rank's: bytes}} received in one op of a rank's row."""
    first, second = (trace.arrivals[key] for trace in _seen(rank))
    by_call: dict[tuple[str, str], dict[int, float]] = {}
    for (axis, op, distance), low in first.items():
        high = second.get((axis, op, distance), low)
        by_call.setdefault((axis, op), {})[distance] = rank.linear(low, high, layout.micro_batch)
    return by_call


def halo_bytes(ranks: Sequence[Model], layout: Layout, wire: Wire) -> dict[str, float]:
    """Returns {name of the tier: bytes that a rank receives over it in a step}, of the tile that receives most.

    Which neighbours are on another node depends on the tile; the one that waits longest is taken.
    """
    groups, tiers = groups_of(layout), wire.cluster.tiers
    totals: list[dict[str, float]] = []
    for rank in ranks:
        by_link: dict[str, float] = {}
        for key in _seen(rank)[0].ops:
            for (axis, _), came in _arrivals(rank, key, layout).items():
                for tier, size in wire.by_tier(came, groups[axis]).items():
                    times = layout.n_micro * layout.rounds
                    by_link[tiers[tier].name] = by_link.get(tiers[tier].name, 0.0) + times * size
        totals.append(by_link)
    return max(totals, key=lambda by_link: sum(by_link.values()))


def _seen(rank: Model) -> tuple[RankTrace, RankTrace]:
    """Returns a rank's traces with (the smaller micro-batch, the larger one), typed as `RankTrace`."""
    return cast(RankTrace, rank.small), cast(RankTrace, rank.large)


def _gathers(ranks: Sequence[Model], busy: Mapping[OpKey, float], link: Sharded) -> dict[OpKey, float]:
    """Returns {(kind, stage): seconds that the op waits for zero=3's gathers and reductions}.

    busy  seconds of each op with its other messages
    """
    waits: dict[OpKey, float] = {}
    for rank in ranks:
        for key, units in _seen(rank)[0].gathers.items():
            whole = link.op_seconds(units, busy[key], back=key[0] == "B")
            waits[key] = max(waits.get(key, 0.0), whole - busy[key])
    return {key: waits.get(key, 0.0) for key in busy}


def _of_rank(rank: Model, work: Mapping[OpKey, float]) -> float:
    return sum(work[key] for key in _seen(rank)[0].ops)


def _messages(ranks: Sequence[Model], layout: Layout, wire: Wire, last: int) -> list[float]:
    """Returns the seconds of the message from each stage to the next; `last`: index of the last stage."""
    apart = layout.tp * layout.shard_ranks  # ranks from one stage to the next
    out = [0.0] * max(1, last)
    for rank in ranks:
        small, large = _seen(rank)
        for stage, size in small.messages.items():
            sent_s = wire.send(rank.linear(size, large.messages[stage], layout.micro_batch), 0, apart)
            out[stage] = max(out[stage], sent_s)  # the slowest rank's: others wait for it
    return out
