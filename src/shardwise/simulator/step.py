"""From a shape, a layout and a cluster to the time and memory of one step: a whole model on a rank, or a pipeline."""

from __future__ import annotations

from shardwise.cluster import Cluster
from shardwise.costs.block import BlockCosts
from shardwise.costs.layout import Layout
from shardwise.costs.memory import rank_memory, stage_parameters
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software
from shardwise.costs.wire import RankGroup
from shardwise.simulator.events import CONTENTION, StreamOp, run
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.parts import (
    LayerTimes,
    StepContext,
    beside,
    finished,
    layer_times,
    offload_basis,
    optimizer_seconds,
    reduction_seconds,
    sharing,
)
from shardwise.simulator.stages import pipelined

PLAYED = 4  # micro-batches of a ZeRO step that are played; more repeat the last


def simulate(
    shape: Shape, layout: Layout, cluster: Cluster, software: Software, *, precision: str = "bf16"
) -> Forecast:
    """One optimizer step. Only the decoder's numbers are needed; nothing runs."""
    step = StepContext(shape, layout, cluster, software, precision)
    block = BlockCosts(shape, layout, software, step.kernels)
    times = layer_times(step)
    forecast = pipelined(step, times) if layout.pp > 1 else _one_stage(step, times)
    forecast.basis |= {
        "implementation": f"{software.name}: {software.source}",
        "products": step.kernels.basis,
        "tensor parallel": step.wire.basis("all_reduce", step.group("tp")),
        "data ranks": step.wire.basis("reduce_scatter", step.group("data")),
        "attention": f"{software.attention} kernel; see attention.csv",
        "contention": f"compute is {CONTENTION:.0%} slower beside communication (assumed)",
    }
    most = stage_parameters(shape, layout, shape.layers / layout.pp, first=layout.pp == 1, last=True)
    forecast.basis |= offload_basis(step, most)
    if layout.cp > 1:
        forecast.basis["ring"] = (
            "a block's scores are written in float32, causal work dealt evenly (zigzag), as this version does"
            if block.is_written_ring
            else "a fused kernel for each block, causal work dealt evenly"
        )
    return forecast


# --- one stage: replicas, ZeRO


def _one_stage(step: StepContext, times: LayerTimes) -> Forecast:
    lay, shape = step.layout, step.shape
    dense = shape.dense_layers
    parameters = stage_parameters(shape, lay, shape.layers, first=True, last=True, dense=dense)
    memory = [
        rank_memory(shape, lay, step.software, layers=shape.layers, dense=dense, first=True, last=True, in_flight=1.0)
    ]
    layers = times.of(shape.layers, shape.dense_layers)
    whole = layers.plus(times.first).plus(times.last)
    compute, inside = whole.seconds, whole.exposed
    n = lay.n_micro
    optimizer = optimizer_seconds(step, parameters)
    timeline: list[tuple[str, str, float, float]] = []
    if lay.zero >= 3 and lay.shard > 1:
        total, timeline = _gathered(step, times)
        data = max(0.0, total - n * compute)
    else:
        reduce_s, gather_s = reduction_seconds(step, parameters)
        overlap = step.software.overlap_dp
        backward, forward = layers.backward + layers.weight, layers.forward
        # ZeRO-2 keeps sums of its own part alone, so it reduces after every micro-batch
        data = (n if lay.zero == 2 else 1) * beside(backward, reduce_s, shape.layers, overlap)
        data += beside(forward, gather_s, shape.layers, step.software.overlap_gathers)
    parts = {
        "compute": n * (compute - inside),
        "tensor, context and expert communication": n * inside,
        "data-parallel communication": data,
        "optimizer": optimizer,
    }
    forecast = finished(step, parts, memory, {"tp": n * inside, "data": data})
    forecast.timeline = timeline
    return forecast


def _gathered(step: StepContext, times: LayerTimes) -> tuple[float, list[tuple[str, str, float, float]]]:
    """ZeRO-3: weights gathered ahead of use, gradients scattered behind, one stream of collectives."""
    lay = step.layout
    played = min(lay.n_micro, PLAYED)
    ops = _zero3_ops(step, times, played)
    seconds = run(ops)
    if lay.n_micro > played:
        shorter = run(_zero3_ops(step, times, played - 1))
        seconds += (lay.n_micro - played) * (seconds - shorter)
    return seconds, [(op.stream, op.name, op.start, op.end) for op in ops]


def _zero3_ops(step: StepContext, times: LayerTimes, n_micro: int) -> list[StreamOp]:
    shape, lay, wire = step.shape, step.layout, step.wire
    replicas = step.group("replicas")
    whole = 4.0 if step.precision == "fp32" else 2.0

    pieces = step.software.gathers_per_unit
    copies = pieces * step.group("data").size * step.software.copies_us * 1e-6

    def by_group(counts: dict[str, float]) -> dict[RankGroup, float]:
        found: dict[RankGroup, float] = {}
        for kind, count in counts.items():
            found[sharing(step, kind)] = found.get(sharing(step, kind), 0.0) + count
        return found

    def gather(counts: dict[str, float]) -> float:
        each = ((group, count * whole / pieces) for group, count in by_group(counts).items())
        return copies + pieces * sum(wire.collective("all_gather", group, size) for group, size in each)

    def scatter(counts: dict[str, float], last_micro: bool) -> float:
        seconds = copies
        for group, count in by_group(counts).items():
            grads = count * step.software.grad_reduce_bytes
            seconds += pieces * wire.collective("reduce_scatter", group, grads / pieces)
            seconds += wire.collective("all_reduce", replicas, grads / group.size) if last_micro else 0.0
        return seconds

    def is_dense(index: int) -> bool:
        return index < shape.dense_layers

    usual, front = (stage_parameters(shape, lay, 1.0, first=False, last=False, dense=dense) for dense in (0.0, 1.0))
    root = {"dense": (shape.embedding_parameters + shape.head_parameters + shape.norm_parameters) / lay.tp}
    keep = lay.recompute != "full" and step.layout.zero == 2
    ops: list[StreamOp] = []

    def add(name: str, stream: str, seconds: float, *after: int | None) -> int:
        ops.append(StreamOp(name, stream, seconds, [a for a in after if a is not None]))
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
        last = add(f"embedding {micro}", "compute", times.first.forward, root_here)
        for index in range(shape.layers):
            # at most two units are whole at a time: a gather waits until the one before last has computed
            ahead = computed[-2] if len(computed) >= 2 else None
            wait = ahead if step.software.prefetch != "none" else last
            got = add(f"gather {index}", "data", gather(front if is_dense(index) else usual), wait)
            own = times.dense if is_dense(index) else times.layer
            last = add(f"forward {index}.{micro}", "compute", own.forward, got, last)
            computed.append(last)
        last = add(f"head {micro}", "compute", times.last.seconds, last)
        computed.append(last)
        here: int | None = None  # the last layer is still whole
        for index in reversed(range(shape.layers)):
            own, each = (times.dense, front) if is_dense(index) else (times.layer, usual)
            before = front if is_dense(index - 1) else usual
            last = add(f"backward {index}.{micro}", "compute", own.backward + own.weight, here, last)
            wait = computed[-1] if step.software.prefetch != "none" else last
            computed.append(last)
            if step.software.prefetch != "before":  # one stream: the next gather stands behind these gradients
                add(f"scatter {index}", "data", scatter(each, ends_here), last)
            if index and not keep:
                for _ in range(2 if lay.recompute == "full" and step.software.gathers_again else 1):
                    here = add(f"gather {index - 1}", "data", gather(before), wait)
            if step.software.prefetch == "before":
                add(f"scatter {index}", "data", scatter(each, ends_here), last)
        last = add(f"embedding backward {micro}", "compute", times.first.weight, last)
        add(f"scatter root {micro}", "data", scatter(root, ends_here), last)
    return ops
