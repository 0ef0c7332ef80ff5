"""Seconds of the parts of a decoder's step: layers with their messages, reductions, the update. A new part: also quick.

layer        kernels of costs/block.py, plus exposed communication (the time that its own compute does not hide)
data ranks   exposed time of reductions and gathers on a stream of their own (events.py)
optimizer    the bytes that it reads and writes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from shardwise.cluster import Cluster
from shardwise.costs.block import BlockCosts, BlockTimes, Message, host_seconds
from shardwise.costs.coded_state import coding_bytes, resting
from shardwise.costs.kernels import Kernels
from shardwise.costs.layout import Layout
from shardwise.costs.memory import MemoryLedger
from shardwise.costs.offload import Offloaded, crossing_seconds, offloaded, told, update_bytes
from shardwise.costs.shapes import Shape
from shardwise.costs.software import STATES, Software
from shardwise.costs.wire import DEEPEP_RATE, RankGroup, Wire
from shardwise.layout.offload import weights_on_host
from shardwise.simulator.events import CONTENTION, StreamOp, run
from shardwise.simulator.forecast import Forecast

# Factor on the seconds of all parts, for the slowest device, clocks and gaps between kernels: the median of published
# files' medians (1.082); the benchmark of forecasts prints its value without the file that is scored
GAPS = 1.08
# torch's own AdamW runs ten ops over all tensors, which move 84 bytes per parameter; a fused kernel moves 32
FOREACH = 84 / 32


@dataclass
class StageTimes:
    """Seconds of one model stage, or a part of one, on one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0  # gradients of inputs, with recompute
    weight: float = 0.0  # gradients of weights
    exposed: float = 0.0  # waiting for messages, included in the above
    recompute: float = 0.0  # included in `backward`

    def times(self, count: float) -> StageTimes:
        """Returns the times of `count` such stages one after another: each field times `count`."""
        return StageTimes(*(count * getattr(self, field.name) for field in fields(self)))

    def plus(self, other: StageTimes) -> StageTimes:
        """Returns the times of this stage and another, one after the other."""
        return StageTimes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def seconds(self) -> float:
        """Returns the seconds of forward plus both parts of backward."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class LayerTimes:
    """Times of one layer, of one dense layer before those with experts, of the embedding (first) and head (last)."""

    layer: StageTimes
    dense: StageTimes
    first: StageTimes
    last: StageTimes

    def of(self, layers: float, dense: float = 0.0) -> StageTimes:
        """Returns the times of `layers` layers, of which `dense` are dense layers before those with experts."""
        return self.layer.times(layers - dense).plus(self.dense.times(dense))


def layer_times(step: StepContext) -> LayerTimes:
    """Returns the times of each kind of layer of the step's model and layout."""
    block = BlockCosts(step.shape, step.layout, step.software, step.kernels)
    layer = step.timed(block.layer())
    front = replace(block, shape=step.shape.in_front) if step.shape.dense_layers else None
    dense = step.timed(front.layer()) if front else layer
    last = head = step.timed(block.head())
    # each further token that is predicted has a layer and a head of its own
    if step.shape.ahead:
        last = head.plus(layer.plus(step.timed(block.joined())).plus(head).times(step.shape.ahead))
    return LayerTimes(layer, dense, step.timed(block.embedding()), last)


@dataclass(frozen=True)
class StepContext:
    """The inputs of a simulation; `precision`: "bf16", or "fp32" for products in float32."""

    shape: Shape
    layout: Layout
    cluster: Cluster
    software: Software
    precision: str = "bf16"

    @property
    def kernels(self) -> Kernels:
        device, soft = self.cluster.device, self.software
        host_s = host_seconds(device, soft)
        return Kernels(device, soft.launch_us, self.precision, host_s=host_s, bits=soft.bits)

    @property
    def wire(self) -> Wire:
        return Wire(self.cluster, self.layout.world_size)

    def group(self, axis: str) -> RankGroup:
        """Returns the group of "tp", "ulysses", "cp", "ep", "data" (ranks over which ZeRO shards), "pp", "replicas".

        tp is innermost, then ulysses, cp, shard, pp, replicas. Megatron's ranks of ep are neighbours whatever tp is
        (parallel folding, arXiv:2504.14960).
        """
        lay = self.layout
        inner = lay.tp * lay.split_sequence
        return {
            "tp": RankGroup(lay.tp, 1),
            "ulysses": RankGroup(lay.ulysses, lay.tp),
            "cp": RankGroup(lay.cp, lay.tp * lay.ulysses),
            "ep": RankGroup(lay.ep, lay.tp if lay.sp and not self.software.megatron else 1),
            "data": RankGroup(lay.shard_ranks, lay.tp),
            "pp": RankGroup(lay.pp, inner * lay.shard),
            "replicas": RankGroup(lay.replicas, inner * lay.shard * lay.pp),
        }[axis]

    def seconds(self, message: Message) -> float:
        """Returns the seconds of one message of a layer."""
        group = self.group(message.axis)
        if message.op == "ring":
            share = (group.size - 1) / group.size * message.size_bytes
            far = (group.size - 1) * group.stride  # the slowest link is the one from the last rank to the first
            return self.wire.send(share, 0, far) + (group.size - 2) * self.wire.send(0, 0, far)
        # one hop over the slowest link, as in a ring
        if message.op == "pass":
            return self.wire.send(message.size_bytes, 0, (group.size - 1) * group.stride)
        if message.axis == "ep" and self.software.dispatch != "each":
            most = DEEPEP_RATE if self.software.dispatch == "deepep" else math.inf
            return self.wire.rows(group, message.size_bytes, self.shape.top_k, most) + self.wire.skew(group.size)
        return self.wire.collective(message.op, group, message.size_bytes) + self.wire.skew(group.size)

    def exposed(self, messages: Sequence[Message], beside: float) -> tuple[float, float]:
        """Returns (seconds that compute waits for `messages`, seconds by which they slow compute down).

        beside  seconds of compute that can hide messages
        """
        open_s = sum(self.seconds(m) for m in messages if not m.hidden)
        hidden = sum(self.seconds(m) for m in messages if m.hidden and m.share == 1)
        # messages that have to be complete after a share of the compute
        parts = [(self.seconds(m), m.share * beside) for m in messages if m.hidden and m.share < 1]
        late = max(0.0, hidden - beside) + sum(max(0.0, seconds - window) for seconds, window in parts)
        slowed = min(hidden, beside) + sum(min(part) for part in parts)
        return open_s + late, CONTENTION * min(slowed, beside)

    def timed(self, times: BlockTimes) -> StageTimes:
        """Returns the `StageTimes` of a block's times and messages, with exposed communication and the host's limit."""
        if self.software.overlap_ep:
            times = self._beside_experts(times)
        waits, slowed = self.exposed(times.forward_messages, times.attention_forward or times.forward)
        # the next layer waits for the gradient of the input, so only the weights' products hide messages;
        # messages of a ring also hide behind attention's backward
        hide = times.backward_weight if self.layout.cp == 1 else times.backward_weight + times.attention_backward
        back_waits, back_slowed = self.exposed(times.backward_messages, hide)
        again, again_slowed = self.exposed(times.recompute_messages, times.attention_forward)
        backward = times.backward_input + times.recompute + back_waits + back_slowed + again + again_slowed
        return StageTimes(
            max(times.forward + waits + slowed, times.host.forward / GAPS),  # host times were measured with gaps
            max(backward, times.host.backward / GAPS - times.backward_weight),
            times.backward_weight,
            waits + back_waits + again,
            times.recompute + again,
        )

    def _beside_experts(self, times: BlockTimes) -> BlockTimes:
        """Returns a block's times if tokens travel to experts during compute of another micro-batch (`overlap_ep`).

        Multiprocessors that send do not compute meanwhile, so compute is slower. Messages of ep keep only the bytes for
        which compute is too short. Source: DeepSeek-AI 2024, section 3.2.
        """
        share = self.software.overlap_ep
        sent = [m for m in times.forward_messages + times.backward_messages if m.axis == "ep"]
        seconds, computes = sum(self.seconds(m) for m in sent), times.forward + times.backward
        if not sent:
            return times
        # sending takes `share` of the multiprocessors for as long as it lasts
        slower = 1 + min(1.0, seconds / computes) * share / (1 - share)
        open_part = max(0.0, 1 - slower * computes / seconds)

        def left(messages: list[Message]) -> list[Message]:
            rest = [replace(m, size_bytes=m.size_bytes * open_part) if m.axis == "ep" else m for m in messages]
            return [m for m in rest if m.size_bytes]

        return replace(
            times, forward=slower * times.forward, backward_input=slower * times.backward_input,
            backward_weight=slower * times.backward_weight, recompute=slower * times.recompute,
            forward_messages=left(times.forward_messages), backward_messages=left(times.backward_messages),
            recompute_messages=left(times.recompute_messages),
        )  # fmt: skip


def finished(
    step: StepContext, parts: dict[str, float], memory: list[MemoryLedger], exposed: dict[str, float],
    bubble: float = 0.0,
) -> Forecast:  # fmt: skip
    """Returns the forecast of a step, with `GAPS` added on an accelerator.

    parts    {name: seconds of the busiest rank}; `memory`: a ledger for each stage
    exposed  {axis: seconds of exposed communication}; `bubble`: share of the pipeline's time
    """
    lay = step.layout
    tokens = lay.global_batch * lay.seq
    # GAPS was found on published runs, all of them on accelerators
    gaps = 1.0 if step.cluster.device.kind == "cpu" else GAPS
    parts = {**parts, "slowest device, clocks and gaps": (gaps - 1) * sum(parts.values())}
    return Forecast(
        step_s=sum(parts.values()),
        parts=parts,
        memory=memory,
        flops=step.shape.flops_per_token(lay.seq) * tokens,
        world_size=lay.world_size,
        samples=lay.global_batch,
        tokens=tokens,
        peak_tflops=step.cluster.device.bf16_tflops.value,
        best_tflops=step.kernels.best_tflops,
        exposed=exposed,
        bubble=bubble,
    )


def updated(step: StepContext, parameters: dict[str, float]) -> float:
    """Returns the number of parameters that a rank updates; `parameters`: {kind: count} as in `stage_parameters`."""
    total = 0.0
    for kind, count in parameters.items():
        ranks = float(step.layout.shard_ranks) if step.layout.sharded.state else 1.0
        # ep deals experts over data and tp ranks, so fewer ranks hold the same ones and shard them
        if kind == "experts" and step.layout.ep > 1:
            ranks = max(1.0, ranks * step.layout.tp / step.layout.ep)
        total += count / ranks
    return total


def host_basis(kernels: Kernels, ops: float, seconds: float) -> dict[str, str]:
    """Returns {"host": remark} if starting `ops` ops takes the host as long as their `seconds`; else {}."""
    if not kernels.host_s or seconds > 1.001 * kernels.host_s * ops:
        return {}
    how = "assumed" if kernels.device.op_us is None else "measured"
    return {
        "host": f"the limit: {ops:.0f} ops of a micro-batch take it {1e6 * kernels.host_s:.3g} us each ({how}); larger "
        "micro-batches cost no more, compile=true starts fewer"
    }


def offload_basis(step: StepContext, parameters: dict[str, float]) -> dict[str, str]:
    """Returns {"offload": remark on what the forecast of an offloaded optimizer assumes}; {} without offload."""
    if step.layout.offload == "none":
        return {}
    cost = _offloaded(step, updated(step, parameters))
    return {"offload": told(cost, step.cluster)}


def _offloaded(step: StepContext, count: float) -> Offloaded:
    policy = STATES[step.software.states]
    update = update_bytes(policy, fused=step.software.fused_adam)
    return offloaded(count, resting(policy, step.layout), step.layout, step.cluster, update)


def crossing(step: StepContext, count: float) -> float:
    """Returns the seconds in which a rank's shards of `count` weights cross from the host; 0 if none lie there.

    Their gradients take as long on the way back.
    """
    if not weights_on_host(step.layout.offload):
        return 0.0
    size = count * STATES[step.software.states].held / step.layout.shard_ranks
    return crossing_seconds(size, step.cluster)


def optimizer_seconds(step: StepContext, parameters: dict[str, float]) -> float:
    """Returns the seconds of the optimizer's update on one rank; `parameters`: {kind: count} of the rank.

    Each byte of state is read and written, gradients are read twice (norm and update), and buffers into which products
    add gradients are set to zero.
    """
    policy = STATES[step.software.states]
    total = updated(step, parameters)
    moved = 2 * policy.gradient + 2 * (policy.master or policy.weight) + 2 * policy.optimizer
    moved += policy.weight + policy.master if policy.master else 0  # masters are read again to make the weights
    moved += coding_bytes(policy, step.layout)
    zeroed = sum(parameters.values()) * policy.gradient if step.software.accumulates else 0.0
    seconds = step.kernels.stream(total * moved * (1.0 if step.software.fused_adam else FOREACH) + zeroed, 10)
    return _offloaded(step, total).beside(seconds) if step.layout.offload != "none" else seconds


def sharing(step: StepContext, kind: str) -> RankGroup:
    """Returns the group of data ranks that hold the same parameters of a kind ("dense" or "experts")."""
    data, lay = step.group("data"), step.layout
    if kind == "experts" and lay.ep > 1:
        return RankGroup(max(1, data.size * lay.tp // lay.ep), lay.ep)
    return data


def reduction_seconds(step: StepContext, parameters: dict[str, float], layers: float) -> tuple[float, float]:
    """Returns seconds of one (reduction of gradients, all-gather of weights) of `parameters` in `layers` layers."""
    lay, wire = step.layout, step.wire
    reduce_s = gather_s = 0.0
    replicas = step.group("replicas")
    for kind, count in parameters.items():
        group = sharing(step, kind)
        grads = count * step.software.grad_reduce_bytes
        n = step.software.pieces(count, group.size * lay.replicas, layers, lay.sharded)
        if lay.sharded.state:
            reduce_s += wire.pieces("reduce_scatter", group, grads, n)
            reduce_s += wire.pieces("all_reduce", replicas, grads / max(1, group.size), n)
            # weights travel in 16 bits, whatever the masters have
            gather_s += wire.pieces("all_gather", group, count * 2.0, n)
        else:
            reduce_s += wire.all_reduce(group, replicas, grads, n)
    return reduce_s, gather_s


def sent_beside(step: StepContext, parameters: dict[str, float], layers: float) -> int:
    """Returns the number of messages, at most one a layer, by which gradients' reduction overlaps with backward."""
    lay = step.layout
    counts = (
        step.software.pieces(count, sharing(step, kind).size * lay.replicas, layers, lay.sharded)
        for kind, count in parameters.items()
    )
    return max(1, min(int(layers), sum(counts)))


def beside(window: float, seconds: float, buckets: int, overlap: bool) -> float:
    """Returns the exposed seconds of communication of `seconds`, sent bucket by bucket during `window` s of compute.

    overlap  whether it may overlap at all
    """
    if seconds <= 0:
        return 0.0
    # a single bucket is full only when backward ends
    if not overlap or buckets < 2:
        return seconds
    ops: list[StreamOp] = []
    for index in range(buckets):
        ops.append(StreamOp(f"backward {index}", "compute", window / buckets, []))
        ops.append(StreamOp(f"reduce {index}", "data", seconds / buckets, [len(ops) - 1]))
    return run(ops) - window
