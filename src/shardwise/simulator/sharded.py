"""Seconds that replicas and ZeRO add to a traced module's step; `play_units` (ZeRO-3) serves decoders' stages too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.costs.layout import Layout
from shardwise.costs.software import Software, States
from shardwise.costs.wire import RankGroup, Wire
from shardwise.simulator.counted import Model
from shardwise.simulator.events import StreamOp, run

FORWARD_SHARE = 1 / 3  # of a micro-batch's seconds


def data_seconds(
    model: Model, layout: Layout, micro: float, wire: Wire, states: States, software: Software
) -> tuple[float, list[tuple[str, str, float, float]]]:
    """Returns (exposed seconds of data ranks' collectives in a step, timeline of ZeRO-3 or []).

    micro  seconds of a micro-batch's compute; the timeline has (stream, name, start s, end s)
    """
    count, inside = model.trained - model.small.experts, layout.tp  # ranks of tp are neighbours
    shard, replicas = (
        RankGroup(layout.shard_ranks, inside),
        RankGroup(layout.replicas, layout.shard_ranks * layout.pp * inside),
    )
    alike = RankGroup(layout.shard_ranks // layout.ep, inside * layout.ep)  # ranks that hold the same experts
    experts_s = wire.all_reduce(alike, replicas, model.small.experts * states.on_wire)
    if layout.gradient_ranks == 1:
        return 0.0, []
    if layout.sharded.weights:
        if layout.pp > 1:  # gathers are counted with each stage's ops (simulator/cut)
            return experts_s + wire.collective("all_reduce", replicas, count * states.on_wire / shard.size), []
        total, timeline = _gathered(model, layout, micro, wire, states, shard, replicas)
        return experts_s + max(0.0, total - layout.n_micro * micro), timeline
    n, pieces = 1, max(1, len(model.units))
    # a probe's overheads include the cost of sending in several buckets
    if not wire.cluster.device.overheads:
        n = software.pieces(count, layout.gradient_ranks, pieces, layout.sharded)
        pieces = min(n, pieces)
    if layout.sharded.state:
        reduce_s = wire.pieces("reduce_scatter", shard, count * states.on_wire, n)
        reduce_s += wire.pieces("all_reduce", replicas, count * states.on_wire / shard.size, n)
        gather_s = wire.pieces("all_gather", shard, count * states.weight, n)
    else:
        reduce_s, gather_s = wire.all_reduce(shard, replicas, count * states.on_wire, n), 0.0
    hidden = 1 - FORWARD_SHARE if software.overlap_dp and not on_cores(wire) else 0.0
    times = layout.sharded.reductions(layout.n_micro * layout.rounds)
    # the last bucket is complete only when backward ends, so it is never hidden
    return times * max(reduce_s / pieces, reduce_s - hidden * micro) + gather_s + experts_s, []


def on_cores(wire: Wire) -> bool:
    """Whether collectives run on the cores that compute (a CPU), so that they cannot overlap with compute."""
    return wire.cluster.device.kind == "cpu"


def _gathered(
    model: Model, layout: Layout, micro: float, wire: Wire, states: States, shard: RankGroup, replicas: RankGroup
) -> tuple[float, list[tuple[str, str, float, float]]]:
    """Returns (seconds, timeline) of a step's micro-batches under ZeRO-3, compute and collectives together.

    Each unit computes in proportion to its parameters. Weights in no unit are gathered before the first unit in forward
    and in backward, and their gradients reduced after the last.
    """
    units = model.units or [model.small.parameters]
    rest = max(0, model.small.parameters - sum(units))
    link = Sharded(wire, states, shard, layout.sharded.gathers, model.trained / max(1, model.small.parameters))
    # two micro-batches are simulated, and their seconds scaled to all
    times = min(2, layout.n_micro)
    ops: list[StreamOp] = []
    for _ in range(times):
        link.play(ops, units, FORWARD_SHARE * micro, back=False)
        link.play(ops, units[::-1], (1 - FORWARD_SHARE) * micro, back=True)
    seconds = run(ops)
    once = wire.collective("all_reduce", replicas, model.trained * states.on_wire / shard.size)
    once += layout.n_micro * (link.gathers * link.gather(rest) + link.scatter(rest)) if rest else 0.0
    return once + seconds * layout.n_micro / times, [(op.stream, op.name, op.start, op.end) for op in ops]


def play_units(
    ops: list[StreamOp], compute: Sequence[float], gathers: Sequence[float], scatters: Sequence[float],
    *, stream: str = "data",
) -> None:  # fmt: skip
    """Appends a forward or backward through units to `ops`: gathers run one unit ahead, gradients are reduced after.

    compute, gathers, scatters  seconds of each unit, in the order of the pass; `scatters`: [] in a forward
    stream  name of the stream on which gathers and scatters run
    """
    before = max((place for place, op in enumerate(ops) if op.name.startswith("unit")), default=-1)
    computed: list[int] = []
    ops.append(StreamOp("gather 0", stream, gathers[0], [before] if before >= 0 else []))
    here = len(ops) - 1
    for index, seconds in enumerate(compute):
        ops.append(StreamOp(f"unit {index}", "compute", seconds, [here]))
        last = len(ops) - 1
        if index + 1 < len(compute):  # FSDP2 gathers the next unit before it reduces this one's gradients
            ops.append(StreamOp(f"gather {index + 1}", stream, gathers[index + 1], computed[-1:]))
            here = len(ops) - 1
        computed.append(last)
        if scatters:
            ops.append(StreamOp(f"scatter {index}", stream, scatters[index], [last]))


@dataclass(frozen=True)
class Sharded:
    """Computes seconds of ZeRO-3's collectives over the group `shard`.

    gathers  number of gathers of each weight in a micro-batch: 1 before forward, 2 if also before backward
    trained  share of the weights that have gradients, assumed to be the same in each unit
    """

    wire: Wire
    states: States
    shard: RankGroup  # the ranks over which weights are sharded
    gathers: int
    trained: float = 1.0

    def gather(self, count: float) -> float:
        """Returns seconds to all-gather `count` weights and copy them from the buffer into the parameters."""
        copied = 2 * count * self.states.weight / self.wire.bandwidth
        return self.wire.collective("all_gather", self.shard, count * self.states.weight) + copied

    def scatter(self, count: float) -> float:
        """Returns seconds to reduce-scatter the gradients of `count` weights and copy them into the buffer."""
        size = count * self.trained * self.states.on_wire
        return self.wire.collective("reduce_scatter", self.shard, size) + 2 * size / self.wire.bandwidth

    def play(self, ops: list[StreamOp], units: Sequence[float], seconds: float, *, back: bool) -> None:
        """Appends to `ops` one forward, or backward (`back`), through `units` (parameters of each), of `seconds`."""
        total, times = max(1, sum(units)), self.gathers - 1 if back else 1
        play_units(
            ops, [seconds * count / total for count in units], [times * self.gather(count) for count in units],
            [self.scatter(count) for count in units] if back else [],
            stream="compute" if on_cores(self.wire) else "data",
        )  # fmt: skip

    def op_seconds(self, units: Sequence[float], seconds: float, *, back: bool) -> float:
        """Returns seconds of a stage's forward, or backward (`back`), with its gathers and reductions.

        units  parameters of each unit; `seconds`: of its compute
        """
        if not units:
            return seconds
        ops: list[StreamOp] = []
        self.play(ops, units, seconds, back=back)
        return run(ops)
