"""`simulate_traced`: the forecast of a traced module's step under replicas or ZeRO; `between`: seconds of its ops.

A micro-batch's time and bytes follow from two traces with fewer and more samples, by shapes on the line through both,
or from one trace of exactly that micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

from shardwise.cluster import Cluster
from shardwise.costs.block import EAGER, host_seconds
from shardwise.costs.coded_state import coding_bytes, resting
from shardwise.costs.kernels import Kernels, peak_tflops
from shardwise.costs.layout import Layout
from shardwise.costs.memory import MemoryLedger
from shardwise.costs.offload import (
    Moves,
    Offloaded,
    crossings,
    crossings_told,
    moves,
    moves_told,
    offloaded,
    reads,
    reads_told,
    told,
)
from shardwise.costs.ops import op_seconds
from shardwise.costs.overhead import Overhead, events, overhead_of
from shardwise.costs.software import Software, States
from shardwise.costs.wire import RankGroup, Wire
from shardwise.layout.offload import placements, weights_on_host
from shardwise.layout.precisions import PRECISIONS
from shardwise.simulator.counted import Model, StepTrace
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.held import memory, policy
from shardwise.simulator.parts import GAPS, host_basis
from shardwise.simulator.sharded import data_seconds

BALANCED = "every choice of a router equally often: a balanced load (assumed)"
BY_BATCH = "integers of the batch decide how much there is to do: those of its first sample, repeated (assumed)"

SCORES = (
    "its scores are written: on a GPU, no fused kernel draws dropout whose numbers are one process's (randomness=fast "
    "has one, but not beside cut heads)"
)


def taken(ranks: Sequence[Model]) -> dict[str, str]:
    """Returns {name: assumption} for the assumptions that traces of `ranks` made about values."""
    seen = {
        "routing": (BALANCED, any(rank.small.balanced for rank in ranks)),
        "batch": (BY_BATCH, any(rank.small.by_batch for rank in ranks)),
        "attention": (SCORES, any(rank.small.wrote_scores for rank in ranks)),
    }
    return {name: assumption for name, (assumption, made) in seen.items() if made}


def attention_seconds(
    small: StepTrace, large: StepTrace, samples: float, kernels: Kernels, software: Software
) -> float:
    """Returns the seconds of fused attention alone for `samples` samples, interpolated as in `between`."""
    share = (samples - small.samples) / max(1, large.samples - small.samples)
    ops = ((shape, times, other, often, count) for (kind, shape, times, other, often), count
             in _pairs(small, large).items() if kind == "attention")  # fmt: skip
    return sum(
        count * op_seconds("attention", [a + (b - a) * share for a, b in zip(shape, other, strict=True)],
                           times + (often - times) * share, kernels, software)
        for shape, times, other, often, count in ops
    )  # fmt: skip


def span_seconds(
    small: StepTrace, large: StepTrace, samples: float, span: slice, kernels: Kernels, software: Software
) -> float:  # fmt: skip
    """Returns the seconds of the operations `order[span]` for `samples` samples, interpolated as in `between`."""
    share = (samples - small.samples) / max(1, large.samples - small.samples)
    return sum(
        op_seconds(kind, [a + (b - a) * share for a, b in zip(shape, other, strict=True)],
                   times + (often - times) * share, kernels, software)
        for (kind, shape, times), (_, other, often) in zip(small.order[span], large.order[span], strict=True)
    )  # fmt: skip


def between(small: StepTrace, large: StepTrace, samples: float, kernels: Kernels, software: Software) -> float:
    """Returns the seconds of all operations for `samples` samples, from two traces of the same operations.

    Shapes are interpolated, not times, because a large product runs at a better rate than small ones. The result is at
    least the host's time to start the operations. Raises `ValueError` if the traces ran different operations.
    """
    low, high = small.samples, large.samples
    if low == high:
        assert samples == low, "one trace tells of its own number of samples alone"
        return compute_seconds(small, kernels, software)
    share = (samples - low) / (high - low)
    if not same_ops(small, large):
        raise ValueError(f"traces of {low} and {high} samples ran different operations: no line goes through them")
    # with a CPU as the device, the host's time to start ops is not hidden, so it adds up
    first, second = host_calls(small, kernels), host_calls(large, kernels)
    seconds = first + (second - first) * share
    for (kind, shape, times, other, often), count in _pairs(small, large).items():
        at = tuple(max(0.0, a + (b - a) * share) for a, b in zip(shape, other, strict=True))
        seconds += count * op_seconds(kind, at, times + (often - times) * share, kernels, software)
    return max(seconds, kernels.host_s * (small.kernels + (large.kernels - small.kernels) * share))


@lru_cache(maxsize=1024)
def same_ops(small: StepTrace, large: StepTrace) -> bool:
    """Whether two traces ran the same operations in order, so that shapes can be interpolated over samples."""
    return [kind for kind, _, _ in small.order] == [kind for kind, _, _ in large.order]


@lru_cache(maxsize=256)
def _pairs(small: StepTrace, large: StepTrace) -> Counter[tuple[str, tuple[float, ...], int, tuple[float, ...], int]]:
    """Returns a count of each (kind, small shape, small times, large shape, large times) of two traces' ops."""
    return Counter((a[0], a[1], a[2], b[1], b[2]) for a, b in zip(small.order, large.order, strict=True))


def host_calls(trace: StepTrace, kernels: Kernels) -> float:
    """Returns the host's seconds to start a trace's operations, if the host computes them itself; else 0."""
    return trace.calls * kernels.call_s + trace.cut_calls * kernels.cut_s


def compute_seconds(trace: StepTrace, kernels: Kernels, software: Software) -> float:
    """Returns the seconds of all ops of one trace, one after another."""
    seconds = host_calls(trace, kernels)
    for (kind, shape, times, _, _), count in _pairs(trace, trace).items():
        seconds += count * op_seconds(kind, shape, times, kernels, software)
    return max(seconds, kernels.host_s * trace.kernels)


def simulate_traced(
    model: Model, layout: Layout, cluster: Cluster, software: Software, precision: str,
    ledgers: Sequence[MemoryLedger] = (),
) -> Forecast:  # fmt: skip
    """Returns the forecast of a step with data ranks alone.

    precision  a key of PRECISIONS; `ledgers`: the memory of each rank that differs; (): it is computed
    """
    dtype = PRECISIONS[precision].products
    kernels, added = kernels_of(cluster, layout, software, dtype, follows=model.small.follows)
    wire = Wire(cluster, layout.world_size)
    micro = between(model.small, model.large, layout.micro_batch, kernels, software)
    states = policy(precision, model.update.state_elements, layout)
    data, timeline = data_seconds(model, layout, micro, wire, states, software)
    optimizer = with_tiers(model, layout, cluster, states, optimizer_seconds(model, layout, kernels, states))
    parts = {"compute": layout.n_micro * micro, "data-parallel communication": data, "optimizer": optimizer}
    if model.small.joined:
        group = RankGroup(layout.dp, 1)
        once = sum(times * wire.collective(op, group, size) for (op, size), times in model.small.joined.items())
        parts["batch norm communication"] = layout.n_micro * once  # one value a channel, for any samples
    parts |= moved_seconds([model], layout, cluster, states, micro, layout.n_micro)
    parts |= engine_seconds(model, layout, added, parts["compute"])
    # GAPS is of published runs, which are of accelerators
    if cluster.device.kind != "cpu":
        parts["slowest device, clocks and gaps"] = (GAPS - 1) * sum(parts.values())
    correction = cluster.device.correction.value if cluster.device.correction is not None else 1.0
    parts = {name: seconds * correction for name, seconds in parts.items()}
    samples = layout.global_batch
    forecast = Forecast(
        step_s=sum(parts.values()), parts=parts, memory=list(ledgers) or [memory(model, layout, precision)],
        flops=model.flops(samples), world_size=layout.world_size, samples=samples,
        # a correction below 1 means that runs were faster than tables, so the bound in `impossible` rises with it
        peak_tflops=peak_tflops(cluster.device, dtype), best_tflops=kernels.best_tflops / min(1.0, correction),
        convention="counted", exposed={"data": data}, timeline=timeline,
    )  # fmt: skip
    forecast.basis = {
        "products": kernels.basis,
        "data ranks": wire.basis("all_reduce", RankGroup(layout.dp, 1)),
        "work": f"{len(model.small.products)} shapes of products and {model.small.kernels} ops counted on fake tensors",
    }
    ops = model.linear(model.small.kernels, model.large.kernels, layout.micro_batch)
    forecast.basis |= tiers_basis(model, layout, cluster, states)
    forecast.basis |= moved_basis([model], layout, cluster, states, micro)
    forecast.basis |= taken([model]) | host_basis(kernels, ops, micro)
    if cluster.device.correction is not None:
        forecast.basis["correction"] = f"x {correction:.3g}, {cluster.device.correction.source}"
    return forecast


def kernels_of(
    cluster: Cluster, layout: Layout, software: Software, dtype: str, *, follows: bool = False
) -> tuple[Kernels, Overhead]:
    """Returns (kernels of the cluster's device, overheads of the layout's techniques).

    dtype     "bf16" or "fp32", of matrix products
    follows   whether random operations are followed (randomness=global), so that every operation passes through Python
    """
    device, added = cluster.device, overhead_of(cluster.device, layout, follows)
    if device.ops:  # a probe measured each op with its launch
        return Kernels(device, 0.0, dtype, added.call, added.cut), added
    op_us = device.op_us.value if device.op_us is not None else None
    if device.kind == "cpu":
        return Kernels(device, software.launch_us if op_us is None else op_us, dtype), added
    return Kernels(device, software.launch_us, dtype, host_s=host_seconds(device, software)), added


def engine_seconds(model: Model, layout: Layout, added: Overhead, compute: float) -> dict[str, float]:
    """Returns {name of a part: seconds in a step} of the engine's overheads; {} if the device was not probed for them.

    compute  seconds of compute in a step
    """
    seconds = added.step + added.event * events(layout, len(model.units))
    by_name = {"engine": seconds, "waiting for the slower rank": added.wait * compute}
    return {name: value for name, value in by_name.items() if value}


def updated_elements(model: Model, layout: Layout) -> float:
    """Returns the elements of the parameters that a rank updates."""
    elements = sum(size * times for size, times in model.small.sizes.items())
    return elements / (layout.shard_ranks if layout.sharded.state else 1)


def _tiers(model: Model, layout: Layout, cluster: Cluster, states: States) -> Offloaded:
    update = sum(moved for _, moved in model.update.work) * states.held / 4  # bytes were counted in float32
    return offloaded(
        updated_elements(model, layout), resting(states, layout, model.update.coded), layout, cluster, update
    )


def with_tiers(model: Model, layout: Layout, cluster: Cluster, states: States, update_s: float) -> float:
    """Returns the seconds of an update with the moves of `layout.offload`; `update_s`: without them."""
    return update_s if layout.offload == "none" else _tiers(model, layout, cluster, states).beside(update_s)


def tiers_basis(model: Model, layout: Layout, cluster: Cluster, states: States) -> dict[str, str]:
    """Returns {"offload": remark on what the forecast of offloaded state assumes}; {} without offload."""
    if not placements(layout.offload, "optimizer") + placements(layout.offload, "parameters"):
        return {}
    return {"offload": told(_tiers(model, layout, cluster, states), cluster)}


def activation_bytes(ranks: Sequence[Model], layout: Layout) -> dict[str, float]:
    """Returns {tier: bytes of activations that move with a micro-batch}, of the rank that moves most."""
    tiers = {tier for rank in ranks for tier in rank.small.put}
    micro = layout.micro_batch
    return {
        tier: max(rank.linear(rank.small.put.get(tier, 0), rank.large.put.get(tier, 0), micro) for rank in ranks)
        for tier in sorted(tiers)
    }


def _moved(
    ranks: Sequence[Model], layout: Layout, cluster: Cluster, states: States
) -> dict[str, tuple[Moves, Callable[[Moves, float], str]]]:
    """Returns {name of a part: (cost of its moves in a micro-batch, function (cost, seconds) -> remark)}.

    The cost is that of the rank that moves most.
    """
    costs: dict[str, tuple[Moves, Callable[[Moves, float], str]]] = {}
    if placements(layout.offload, "activations"):
        costs["activations that move"] = (moves(activation_bytes(ranks, layout), layout, cluster), moves_told)
    if placements(layout.offload, "parameters"):
        elements = max(rank.small.shard_elements or rank.small.parameters / layout.shard_ranks for rank in ranks)
        # a disk takes no gradients, so weights are only read from it
        if weights_on_host(layout.offload):
            # with replicas, gradients of several micro-batches stay on the device until their sum, and cross once
            gradients = 0 if layout.replicas > 1 and layout.n_micro * layout.rounds > 1 else elements
            over = crossings(elements * states.held, gradients * states.held, layout, cluster)
            costs["weights from the host"] = (over, crossings_told)
        else:
            costs["weights that are read"] = (reads(elements * states.held, layout, cluster), reads_told)
    return costs


def moved_seconds(
    ranks: Sequence[Model], layout: Layout, cluster: Cluster, states: States, micro_s: float, times: int
) -> dict[str, float]:
    """Returns {name of a part: seconds that `times` micro-batches wait for a tier}; {} without offload.

    micro_s  seconds of a micro-batch's forward and backward
    """
    seconds, spare = {}, micro_s
    for name, (cost, _) in _moved(ranks, layout, cluster, states).items():
        seconds[name] = times * cost.beyond(spare)
        spare = max(0.0, spare - cost.disk_s)
    return seconds


def moved_basis(
    ranks: Sequence[Model], layout: Layout, cluster: Cluster, states: States, micro_s: float
) -> dict[str, str]:
    """Returns {name of a part: remark on what its forecast assumes}; {} if nothing moves with a micro-batch."""
    return {name: remark(cost, micro_s) for name, (cost, remark) in _moved(ranks, layout, cluster, states).items()}


def optimizer_seconds(model: Model, layout: Layout, kernels: Kernels, states: States) -> float:
    """Returns seconds of the optimizer's update on one rank, copies and scaling of gradients included."""
    over, work = layout.shard_ranks if layout.sharded.state else 1, model.update.work
    elements = sum(size * times for size, times in model.small.sizes.items())
    into = 0.0 if layout.sharded.weights else 2 * states.gradient * elements  # gradients copied into their buckets
    divided = 2 * states.gradient * elements / over  # gradients divided by the global weight
    coding = coding_bytes(states, layout, model.update.coded) * elements / over
    # a probed device has measured times of ops; otherwise bytes over the memory's rate
    if kernels.ops is not None:
        ops = kernels.ops
        by_size = {
            size: sum(ops.seconds(name, size / over * wide) for name, wide in work) for size in model.small.sizes
        }
        calls = model.update.calls * kernels.call_s
        updates = sum(times * by_size[size] for size, times in model.small.sizes.items())
        moved = sum(ops.seconds("copy_", size) for size in (into, coding) if size) + ops.seconds("mul_", divided)
        return kernels.factor("rest") * (updates + moved) + calls * sum(model.small.sizes.values())
    wide = (states.master or states.weight) / 4  # bytes were counted in float32
    copies = 2 * elements / over * states.copies
    seconds = sum(kernels.stream(elements / over * moved * wide, 1) for _, moved in work)
    seconds += sum(kernels.stream(moved, 1) for moved in (into, divided, copies, coding) if moved)
    if kernels.device.kind == "cpu":  # on a CPU an optimizer runs its ops for each tensor
        seconds += model.small.tensors * model.update.calls * kernels.launch_us * 1e-6
    return seconds


def switches(layout: Layout, *, eager: bool) -> dict[str, str]:
    """Returns {key of the plan: remark on how a forecast treats it}; `eager`: whether a probe timed ops one by one."""
    remarks = {}
    if layout.compile:
        remarks["compile"] = (
            "not modelled here, where ops were timed one by one: as if blocks were not compiled" if eager else
            f"elementwise ops move 1/{EAGER:g} of the bytes (assumed); memory as of blocks that are not compiled"
        )  # fmt: skip
    if layout.tp_overlap:
        remarks["tp_overlap"] = "not modelled for a traced module: as if each sum were waited for"
    return remarks
