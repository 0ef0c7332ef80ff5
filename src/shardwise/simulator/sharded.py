"""Time that replicas and ZeRO add to a step: of traced modules, and `play_units` (ZeRO-3) for decoders' stages too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.costs.layout import Layout
from shardwise.costs.software import Software, States
from shardwise.costs.wire import RankGroup, Wire
from shardwise.simulator.counted import Model
from shardwise.simulator.events import StreamOp, run

FORWARD_SHARE = 1 / 3


def data_seconds(
    model: Model, layout: Layout, micro: float, wire: Wire, states: States, software: Software
) -> tuple[float, list[tuple[str, str, float, float]]]:
    """Returns (seconds that data ranks add to a step, timeline of ZeRO-3 or []). `micro`: seconds of a micro-batch.

    What sending in buckets adds is among what a probe measures of this package.
    """
    count, inside = model.trained - model.small.experts, layout.tp  # ranks of tp lie inside
    shard, replicas = (
        RankGroup(layout.shard_ranks, inside),
        RankGroup(layout.replicas, layout.shard_ranks * layout.pp * inside),
    )
    alike = RankGroup(layout.shard_ranks // layout.ep, inside * layout.ep)  # ranks that hold the same experts
    experts_s = wire.all_reduce(alike, replicas, model.small.experts * states.on_wire)
    if layout.gradient_ranks == 1:
        return 0.0, []
    if layout.sharded.weights:
        if layout.pp > 1:  # what is gathered is part of each stage's ops
            return experts_s + wire.collective("all_reduce", replicas, count * states.on_wire / shard.size), []
        total, timeline = _gathered(model, layout, micro, wire, states, shard, replicas)
        return experts_s + max(0.0, total - layout.n_micro * micro), timeline
    n, pieces = 1, max(1, len(model.units))
    # on a probed device the cost of single messages is among the overheads
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
    """Whether collectives run on the very cores that compute, so that nothing hides behind them."""
    return wire.cluster.device.kind == "cpu"


def _gathered(
    model: Model, layout: Layout, micro: float, wire: Wire, states: States, shard: RankGroup, replicas: RankGroup
) -> tuple[float, list[tuple[str, str, float, float]]]:
    """Returns (seconds, timeline) of all micro-batches under ZeRO-3; compute is dealt to units by their parameters.

    What lies in no unit is gathered before the first of them in forward and in backward, and scattered after the last.
    """
    units = model.units or [model.small.parameters]
    rest = max(0, model.small.parameters - sum(units))
    link = Sharded(wire, states, shard, layout.sharded.gathers, model.trained / max(1, model.small.parameters))
    # two micro-batches are played and scaled to all
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
    """Appends a pass through units to `ops`: weights are gathered one unit ahead, gradients scattered behind.

    compute, gathers, scatters  seconds of each unit; `scatters` is [] in a forward; `stream` takes the messages
    """
    before = max((place for place, op in enumerate(ops) if op.name.startswith("unit")), default=-1)
    computed: list[int] = []
    ops.append(StreamOp("gather 0", stream, gathers[0], [before] if before >= 0 else []))
    here = len(ops) - 1
    for index, seconds in enumerate(compute):
        ops.append(StreamOp(f"unit {index}", "compute", seconds, [here]))
        last = len(ops) - 1
        if index + 1 < len(compute):  # the next unit is asked for before this one's gradients leave
            ops.append(StreamOp(f"gather {index + 1}", stream, gathers[index + 1], computed[-1:]))
            here = len(ops) - 1
        computed.append(last)
        if scatters:
            ops.append(StreamOp(f"scatter {index}", stream, scatters[index], [last]))


@dataclass(frozen=True)
class Sharded:
    """Weights gathered over a group one unit ahead, gradients scattered behind.

    gathers  of each weight in a micro-batch: before its forward, and before its backward where it was freed
    trained  share of the weights that have gradients, taken to be the same in each unit
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
        """Returns seconds to reduce-scatter the gradients of `count` weights."""
        size = count * self.trained * self.states.on_wire
        return self.wire.collective("reduce_scatter", self.shard, size) + 2 * size / self.wire.bandwidth

    def play(self, ops: list[StreamOp], units: Sequence[float], seconds: float, *, back: bool) -> None:
        """Appends to `ops` one pass through units of these sizes (parameters), which computes for `seconds` in all."""
        total, times = max(1, sum(units)), self.gathers - 1 if back else 1
        play_units(
            ops, [seconds * count / total for count in units], [times * self.gather(count) for count in units],
            [self.scatter(count) for count in units] if back else [],
            stream="compute" if on_cores(self.wire) else "data",
        )  # fmt: skip

    def op_seconds(self, units: Sequence[float], seconds: float, *, back: bool) -> float:
        """Returns seconds of one forward (or `back`ward) of a stage that computes for `seconds`, with its gathers."""
        if not units:
            return seconds
        ops: list[StreamOp] = []
        self.play(ops, units, seconds, back=back)
        return run(ops)
