"""From a shape, a layout and a cluster to the time and memory of one step.

layer        kernels of costs/block.py, plus communication that its own compute does not hide
pipeline     the schedule's table, played stage by stage (schedules.py)
data ranks   reductions and gathers on a stream of their own (events.py): what sticks out is exposed
optimizer    the bytes that it reads and writes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.cluster import Cluster
from shardwise.costs.block import Block, Message, Times
from shardwise.costs.kernels import Kernels
from shardwise.costs.layout import Layout
from shardwise.costs.memory import Ledger, rank_memory, stage_parameters
from shardwise.costs.shapes import Shape
from shardwise.costs.software import STATES, Software
from shardwise.costs.wire import Group, Wire
from shardwise.layout.schedule_kinds import KINDS
from shardwise.simulator.events import CONTENTION, Op, run
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.pipeline import outline, play_all

# Megatron's batched send and receive ends in a device synchronise: the queue of kernels runs empty and is filled again
BLOCKED_US = 400.0  # (assumed)
# A step takes longer than its kernels: the slowest of the devices, clocks, gaps. One constant for all; the benchmark
# of forecasts prints what it is without the file that it scores
GAPS = 1.065
# torch's own AdamW goes over all tensors op by op, ten times: 84 bytes for each parameter where one kernel moves 32
FOREACH = 84 / 32
PLAYED = 4  # micro-batches of a ZeRO step that are played; more repeat the last


@dataclass
class Stage:
    """Seconds of one model stage for one micro-batch, exposed communication inside."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    exposed: float = 0.0
    recompute: float = 0.0
    layers: float = 0.0


@dataclass(frozen=True)
class Step:
    """Everything that the parts of a simulation share."""

    shape: Shape
    layout: Layout
    cluster: Cluster
    software: Software
    precision: str = "bf16"

    @property
    def kernels(self) -> Kernels:
        return Kernels(self.cluster.device, self.software.launch_us, self.precision)

    @property
    def wire(self) -> Wire:
        return Wire(self.cluster)

    def group(self, axis: str) -> Group:
        """Size and stride of an axis: tp innermost, then ulysses, cp, shard, pp, replicas."""
        lay = self.layout
        inner = lay.tp * lay.split_sequence
        return {
            "tp": Group(lay.tp, 1),
            "ulysses": Group(lay.ulysses, lay.tp),
            "cp": Group(lay.cp, lay.tp * lay.ulysses),
            "ep": Group(lay.ep, lay.tp if lay.sp or lay.tp == 1 else 1),
            "data": Group(lay.shard * lay.split_sequence, lay.tp),
            "pp": Group(lay.pp, inner * lay.shard),
            "replicas": Group(lay.replicas, inner * lay.shard * lay.pp),
        }[axis]

    def seconds(self, message: Message) -> float:
        """One message of a layer."""
        group = self.group(message.axis)
        if message.op == "ring":
            share = (group.size - 1) / group.size * message.size_bytes
            far = (group.size - 1) * group.stride  # the slowest link of the ring is the one that closes it
            return self.wire.send(share, 0, far) + (group.size - 2) * self.wire.send(0, 0, far)
        return self.wire.collective(message.op, group, message.size_bytes) + self.wire.skew(group.size)

    def exposed(self, messages: Sequence[Message], beside: float) -> tuple[float, float]:
        """(seconds that compute waits, seconds that compute is slowed) where `beside` can hide the hidden ones."""
        open_s = sum(self.seconds(m) for m in messages if not m.hidden)
        hidden = sum(self.seconds(m) for m in messages if m.hidden)
        return open_s + max(0.0, hidden - beside), CONTENTION * min(hidden, beside)

    def timed(self, times: Times) -> Stage:
        """A part with its communication."""
        waits, slowed = self.exposed(times.forward_messages, times.attention_forward or times.forward)
        hide = times.backward_weight if self.layout.cp == 1 else times.backward_weight + times.attention_backward
        back_waits, back_slowed = self.exposed(times.backward_messages, hide)
        again, again_slowed = self.exposed(times.recompute_messages, times.attention_forward)
        return Stage(
            times.forward + waits + slowed,
            times.backward_input + times.recompute + back_waits + back_slowed + again + again_slowed,
            times.backward_weight,
            waits + back_waits + again,
            times.recompute + again,
        )


def simulate(
    shape: Shape, layout: Layout, cluster: Cluster, software: Software, *, precision: str = "bf16"
) -> Forecast:
    """One optimizer step. Only the decoder's numbers are needed; nothing runs."""
    step = Step(shape, layout, cluster, software, precision)
    block = Block(shape, layout, software, step.kernels)
    layer, ends = step.timed(block.layer()), (step.timed(block.embedding()), step.timed(block.head()))
    if layout.pp > 1:
        forecast = _pipelined(step, layer, ends)
    else:
        forecast = _one_stage(step, layer, ends)
    forecast.basis |= {
        "products": step.kernels.basis,
        "tensor parallel": step.wire.basis("all_reduce", step.group("tp")),
        "data ranks": step.wire.basis("reduce_scatter", step.group("data")),
        "attention": f"{software.attention} kernel; see attention.csv",
        "contention": f"compute is {CONTENTION:.0%} slower beside communication (assumed)",
    }
    if layout.cp > 1:
        forecast.basis["ring"] = (
            "a fused kernel for each block and causal work dealt evenly; today's ring writes a block's scores on a "
            "GPU and deals positions in contiguous blocks, so a run takes more of both"
        )
    return forecast


def _finish(
    step: Step, parts: dict[str, float], memory: list[Ledger], exposed: dict[str, float], bubble: float = 0.0
) -> Forecast:
    lay = step.layout
    tokens = lay.global_batch * lay.seq
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


def optimizer_seconds(step: Step, parameters: dict[str, float]) -> float:
    """Seconds of the update: each byte of state read and written, gradients read twice (norm and update)."""
    policy = STATES[step.software.states]
    total = 0.0
    for kind, count in parameters.items():
        ranks = float(step.layout.shard * step.layout.split_sequence) if step.layout.zero else 1.0
        if kind == "experts" and step.layout.ep > 1:
            ranks = max(1.0, ranks * step.layout.tp / step.layout.ep)
        total += count / ranks
    moved = 2 * policy.gradient + 2 * (policy.master or policy.weight) + 2 * policy.optimizer
    moved += policy.weight if policy.master else 0
    return step.kernels.stream(total * moved * (1.0 if step.software.fused_adam else FOREACH), 10)


def reduction_seconds(step: Step, parameters: dict[str, float]) -> tuple[float, float]:
    """Seconds of (gradient reduction, weight gathering) of a step without ZeRO-3."""
    lay, wire = step.layout, step.wire
    reduce_s = gather_s = 0.0
    data, replicas = step.group("data"), step.group("replicas")
    for kind, count in parameters.items():
        group = data
        if kind == "experts" and lay.ep > 1:
            group = Group(max(1, data.size * lay.tp // lay.ep), lay.tp * lay.ep // (lay.tp or 1))
        grads = count * step.software.grad_reduce_bytes
        if lay.zero:
            reduce_s += wire.collective("reduce_scatter", group, grads)
            reduce_s += wire.collective("all_reduce", replicas, grads / max(1, group.size))
            gather_s += wire.collective("all_gather", group, count * 2.0)
        else:
            reduce_s += wire.collective("all_reduce", Group(group.size * lay.replicas, group.stride), grads)
    return reduce_s, gather_s


def _beside(window: float, seconds: float, buckets: int, overlap: bool) -> float:
    """What sticks out when `seconds` of communication in buckets follows `window` of compute, piece by piece."""
    if seconds <= 0:
        return 0.0
    if not overlap or buckets < 2:
        return seconds
    ops: list[Op] = []
    for index in range(buckets):
        ops.append(Op(f"backward {index}", "compute", window / buckets, []))
        ops.append(Op(f"reduce {index}", "data", seconds / buckets, [len(ops) - 1]))
    return run(ops) - window


# --- one stage: replicas, ZeRO


def _one_stage(step: Step, layer: Stage, ends: tuple[Stage, Stage]) -> Forecast:
    lay, shape = step.layout, step.shape
    parameters = stage_parameters(shape, lay, shape.layers, first=True, last=True)
    memory = [rank_memory(shape, lay, step.software, layers=shape.layers, first=True, last=True, in_flight=1.0)]
    compute = shape.layers * (layer.forward + layer.backward + layer.weight)
    compute += sum(end.forward + end.backward + end.weight for end in ends)
    inside = shape.layers * layer.exposed + sum(end.exposed for end in ends)
    n = lay.n_micro
    optimizer = optimizer_seconds(step, parameters)
    timeline: list[tuple[str, str, float, float]] = []
    if lay.zero >= 3 and lay.shard > 1:
        total, timeline = _gathered(step, layer, ends)
        data = max(0.0, total - n * compute)
    else:
        reduce_s, gather_s = reduction_seconds(step, parameters)
        overlap = step.software.overlap_dp
        backward = shape.layers * (layer.backward + layer.weight)
        forward = shape.layers * layer.forward
        # ZeRO-2 keeps sums of its own part alone, so it reduces after every micro-batch
        data = (n if lay.zero == 2 else 1) * _beside(backward, reduce_s, shape.layers, overlap)
        data += _beside(forward, gather_s, shape.layers, overlap)
    parts = {
        "compute": n * (compute - inside),
        "tensor, context and expert communication": n * inside,
        "data-parallel communication": data,
        "optimizer": optimizer,
    }
    forecast = _finish(step, parts, memory, {"tp": n * inside, "data": data})
    forecast.timeline = timeline
    return forecast


def _gathered(step: Step, layer: Stage, ends: tuple[Stage, Stage]) -> tuple[float, list[tuple[str, str, float, float]]]:
    """ZeRO-3: weights gathered ahead of use, gradients scattered behind, one stream of collectives."""
    lay = step.layout
    played = min(lay.n_micro, PLAYED)
    ops = _zero3_ops(step, layer, ends, played)
    seconds = run(ops)
    if lay.n_micro > played:
        shorter = run(_zero3_ops(step, layer, ends, played - 1))
        seconds += (lay.n_micro - played) * (seconds - shorter)
    return seconds, [(op.stream, op.name, op.start, op.end) for op in ops]


def _zero3_ops(step: Step, layer: Stage, ends: tuple[Stage, Stage], n_micro: int) -> list[Op]:
    shape, lay, wire = step.shape, step.layout, step.wire
    group, replicas = step.group("data"), step.group("replicas")
    whole = 4.0 if step.precision == "fp32" else 2.0

    pieces = step.software.gathers_per_unit
    copies = pieces * group.size * step.software.copies_us * 1e-6

    def gather(count: float) -> float:
        return copies + pieces * wire.collective("all_gather", group, count * whole / pieces)

    def scatter(count: float, last_micro: bool) -> float:
        grads = count * step.software.grad_reduce_bytes
        seconds = copies + pieces * wire.collective("reduce_scatter", group, grads / pieces)
        return seconds + (wire.collective("all_reduce", replicas, grads / group.size) if last_micro else 0.0)

    each = shape.layer_parameters / lay.tp
    root = (shape.embedding_parameters + shape.head_parameters + shape.norm_parameters) / lay.tp
    keep = lay.recompute != "full" and step.layout.zero == 2
    ops: list[Op] = []

    def add(name: str, stream: str, seconds: float, *after: int | None) -> int:
        ops.append(Op(name, stream, seconds, [a for a in after if a is not None]))
        return len(ops) - 1

    for micro in range(n_micro):
        ends_here = micro == n_micro - 1  # replicas are summed once
        computed: list[int] = []
        root_here = add(
            f"gather root {micro}",
            "data",
            gather(root),
            len(ops) - 1 if ops and step.software.prefetch == "none" else None,
        )
        last = add(f"embedding {micro}", "compute", ends[0].forward, root_here)
        for index in range(shape.layers):
            # at most two units are whole at a time: a gather waits until the one before last has computed
            ahead = computed[-2] if len(computed) >= 2 else None
            wait = ahead if step.software.prefetch != "none" else last
            got = add(f"gather {index}", "data", gather(each), wait)
            last = add(f"forward {index}.{micro}", "compute", layer.forward, got, last)
            computed.append(last)
        last = add(f"head {micro}", "compute", sum((ends[1].forward, ends[1].backward, ends[1].weight)), last)
        computed.append(last)
        here: int | None = None  # the last layer is still whole
        for index in reversed(range(shape.layers)):
            last = add(f"backward {index}.{micro}", "compute", layer.backward + layer.weight, here, last)
            wait = computed[-1] if step.software.prefetch != "none" else last
            computed.append(last)
            if step.software.prefetch != "before":  # one stream: the next gather stands behind these gradients
                add(f"scatter {index}", "data", scatter(each, ends_here), last)
            if index and not keep:
                for _ in range(2 if lay.recompute == "full" and step.software.gathers_again else 1):
                    here = add(f"gather {index - 1}", "data", gather(each), wait)
            if step.software.prefetch == "before":
                add(f"scatter {index}", "data", scatter(each, ends_here), last)
        last = add(f"embedding backward {micro}", "compute", ends[0].weight, last)
        add(f"scatter root {micro}", "data", scatter(root, ends_here), last)
    return ops


# --- a pipeline


def stage_layers(shape: Shape, layout: Layout) -> list[float]:
    """Layers of each model stage: as given, or even; what does not divide goes to the stages in the middle."""
    stages = layout.pp * layout.chunks
    if layout.stage_layers:
        return [float(n) for n in layout.stage_layers]
    each, rest = divmod(shape.layers, stages)
    start = (stages - rest) // 2
    return [float(each + (1 if start <= index < start + rest else 0)) for index in range(stages)]


def _pipelined(step: Step, layer: Stage, ends: tuple[Stage, Stage]) -> Forecast:
    lay, shape = step.layout, step.shape
    if lay.chunks == 1:
        step = replace(step, layout=lay.with_(chunks=KINDS[lay.schedule].stages_per_rank))
        lay = step.layout
    name = lay.schedule
    drawn = outline(name, lay.pp, lay.n_micro, lay.chunks)
    layers = stage_layers(shape, lay)
    stages = len(layers)
    forward = [n * layer.forward for n in layers]
    backward = [n * layer.backward for n in layers]
    weight = [n * layer.weight for n in layers]
    exposed = [n * layer.exposed for n in layers]
    for index, end in ((0, ends[0]), (stages - 1, ends[1])):
        forward[index] += end.forward
        backward[index] += end.backward
        weight[index] += end.weight
        exposed[index] += end.exposed
    message = lay.tokens * shape.hidden * 2 / (lay.tp if lay.sp or step.software.split_sends else 1)
    distance = step.group("pp").stride
    home = [owner * distance for owner in drawn.owner]
    blocking = not step.software.overlap_p2p
    blocked = BLOCKED_US * 1e-6 if blocking else 0.0
    send = [step.wire.send(message, home[s], home[s + 1]) + blocked for s in range(stages - 1)]
    played = play_all(name, lay.pp, lay.n_micro, lay.chunks, forward, backward, weight, send, blocking=blocking)
    memory, tails = [], []
    for rank in range(lay.pp):
        mine = drawn.stages_of(rank)
        held = sum(layers[stage] for stage in mine)
        first, last = 0 in mine, stages - 1 in mine
        memory.append(
            rank_memory(
                shape, lay, step.software, layers=held, first=first, last=last,
                in_flight=played.in_flight[rank] / lay.chunks,
            )
        )  # fmt: skip
        parameters = stage_parameters(shape, lay, held, first=first, last=last)
        reduce_s, gather_s = reduction_seconds(step, parameters)
        buckets = max(1, int(held))
        window = backward[mine[0]] + weight[mine[0]]
        overlap = step.software.overlap_dp
        data = _beside(window, reduce_s, buckets, overlap) + _beside(forward[mine[0]], gather_s, buckets, overlap)
        if shape.tied and lay.pp > 1 and (first or last):
            data += step.wire.collective(
                "all_reduce", Group(2, distance * (lay.pp - 1)), shape.vocab * shape.hidden * 4 / lay.tp
            )
        tails.append((data, optimizer_seconds(step, parameters)))
    data = max(tail[0] for tail in tails)
    optimizer = max(tail[1] for tail in tails)
    busiest = max(range(lay.pp), key=lambda r: played.busy[r])
    inside = lay.n_micro * sum(exposed[stage] for stage in drawn.stages_of(busiest))
    parts = {
        "compute": lay.rounds * (played.busy[busiest] - inside),
        "tensor, context and expert communication": lay.rounds * inside,
        "pipeline bubble and sends": lay.rounds * (played.seconds - played.busy[busiest]),
        "data-parallel communication": data,
        "optimizer": optimizer,
    }
    sends = {"tp": lay.rounds * inside, "pp": lay.rounds * (played.seconds - played.busy[busiest]), "data": data}
    forecast = _finish(step, parts, memory, sends, played.bubble)
    forecast.timeline = [(f"rank {rank}", str(op), start, end) for rank, op, start, end in played.ops]
    return forecast
