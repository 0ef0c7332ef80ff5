"""From a shape, a layout and a cluster to the time and memory of one step: a whole model on a rank, or a pipeline."""

from __future__ import annotations

from shardwise.cluster import Cluster
from shardwise.costs.block import BlockCosts
from shardwise.costs.layout import Layout
from shardwise.costs.memory import rank_memory, stage_parameters
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software
from shardwise.simulator.events import CONTENTION, StreamOp, run
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.parts import StageTimes, StepContext, beside, finished, optimizer_seconds, reduction_seconds
from shardwise.simulator.stages import pipelined

PLAYED = 4  # micro-batches of a ZeRO step that are played; more repeat the last


def simulate(
    shape: Shape, layout: Layout, cluster: Cluster, software: Software, *, precision: str = "bf16"
) -> Forecast:
    """One optimizer step. Only the decoder's numbers are needed; nothing runs."""
    step = StepContext(shape, layout, cluster, software, precision)
    block = BlockCosts(shape, layout, software, step.kernels)
    layer, ends = step.timed(block.layer()), (step.timed(block.embedding()), step.timed(block.head()))
    if layout.pp > 1:
        forecast = pipelined(step, layer, ends)
    else:
        forecast = _one_stage(step, layer, ends)
    forecast.basis |= {
        "implementation": f"{software.name}: {software.source}",
        "products": step.kernels.basis,
        "tensor parallel": step.wire.basis("all_reduce", step.group("tp")),
        "data ranks": step.wire.basis("reduce_scatter", step.group("data")),
        "attention": f"{software.attention} kernel; see attention.csv",
        "contention": f"compute is {CONTENTION:.0%} slower beside communication (assumed)",
    }
    if layout.cp > 1:
        forecast.basis["ring"] = (
            "a block's scores are written in float32, causal work dealt evenly (zigzag), as this version does"
            if block.is_written_ring
            else "a fused kernel for each block, causal work dealt evenly"
        )
    return forecast


# --- one stage: replicas, ZeRO


def _one_stage(step: StepContext, layer: StageTimes, ends: tuple[StageTimes, StageTimes]) -> Forecast:
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


def _gathered(
    step: StepContext, layer: StageTimes, ends: tuple[StageTimes, StageTimes]
) -> tuple[float, list[tuple[str, str, float, float]]]:
    """ZeRO-3: weights gathered ahead of use, gradients scattered behind, one stream of collectives."""
    lay = step.layout
    played = min(lay.n_micro, PLAYED)
    ops = _zero3_ops(step, layer, ends, played)
    seconds = run(ops)
    if lay.n_micro > played:
        shorter = run(_zero3_ops(step, layer, ends, played - 1))
        seconds += (lay.n_micro - played) * (seconds - shorter)
    return seconds, [(op.stream, op.name, op.start, op.end) for op in ops]


def _zero3_ops(
    step: StepContext, layer: StageTimes, ends: tuple[StageTimes, StageTimes], n_micro: int
) -> list[StreamOp]:
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
