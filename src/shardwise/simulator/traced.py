"""One step of a traced module under replicas or ZeRO, from what its trace counted.

Two traces, of one and two samples (or one, of the very micro-batch), give what a micro-batch costs: time and bytes
follow from shapes on the line through both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from shardwise.cluster import Cluster
from shardwise.costs.block import EAGER
from shardwise.costs.kernels import Kernels
from shardwise.costs.layout import Layout
from shardwise.costs.memory import Ledger
from shardwise.costs.overhead import Overhead, events, overhead_of
from shardwise.costs.software import STATES, Software, States
from shardwise.costs.wire import Group, Wire
from shardwise.simulator.events import Op, run
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.step import GAPS

CONV_SHARE = 0.5  # of the rate of large products that convolutions reach (assumed)
FORWARD_SHARE = 1 / 3
IN_FLIGHT_BYTES = 2 * 25 * 2**20  # of gradients: two buckets, as comm/buckets.py cuts them
BALANCED = "every choice of a router equally often: a balanced load (assumed)"
OPTIMIZER_OPS = 14  # of Adam, for one tensor


class Counted(Protocol):
    """What a trace says; see planner/counting.py. Each is itself alone: two with the same counts differ."""

    def __hash__(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def parameters(self) -> int: ...

    @property
    def buffers_bytes(self) -> int: ...

    @property
    def units(self) -> list[int]: ...

    @property
    def rest(self) -> int: ...

    @property
    def tensors(self) -> int: ...

    @property
    def sizes(self) -> Mapping[int, int]: ...

    @property
    def products(self) -> Mapping[tuple[int, int, int], int]: ...

    @property
    def attention(self) -> Mapping[tuple[int, int, int, int, bool], int]: ...

    @property
    def order(self) -> Sequence[tuple[str, tuple[float, ...], int]]: ...

    @property
    def conv_flops(self) -> float: ...

    @property
    def moved(self) -> float: ...

    @property
    def kernels(self) -> int: ...

    @property
    def calls(self) -> int: ...

    @property
    def peak(self) -> int: ...

    @property
    def flops(self) -> float: ...

    @property
    def balanced(self) -> bool: ...


@dataclass(frozen=True)
class Update:
    """An optimizer's step for one tensor: elements of state it keeps and ops it runs, for each element of the tensor.

    work       (op, bytes it moves for each element)
    calls      ops, views among them
    temporary  elements that live only while it runs
    """

    state_elements: float = 2.0
    work: tuple[tuple[str, float], ...] = ()
    calls: int = OPTIMIZER_OPS
    temporary: float = 0.0


@dataclass(frozen=True)
class Model:
    """Traces of two numbers of samples under one recompute policy, the optimizer's step, the batch."""

    one: Counted
    two: Counted
    update: Update
    name: str = ""
    batch_bytes: float = 0.0  # of one sample, where every rank makes the global batch
    batch_on_device: bool = True  # all of it; else a micro-batch at a time is copied there

    def linear(self, first: float, second: float, samples: float) -> float:
        """The line through what was seen at one number of samples and at another; flat where both are the same."""
        low, high = self.one.samples, self.two.samples
        if low == high:
            return first * samples / low
        return max(0.0, first + (second - first) * (samples - low) / (high - low))

    def peak(self, samples: int) -> float:
        """Live bytes of a micro-batch beyond what rests."""
        return self.linear(self.one.peak, self.two.peak, samples)

    def flops(self, samples: float) -> float:
        return self.linear(self.one.flops, self.two.flops, samples)

    def seconds(self, samples: float, kernels: Kernels, software: Software) -> float:
        """Forward and backward of a micro-batch."""
        return between(self.one, self.two, samples, kernels, software)


def between(one: Counted, two: Counted, samples: float, kernels: Kernels, software: Software) -> float:
    """Seconds at a number of samples, from what was counted at two.

    Shapes are on the line through the two, not times: a large product runs at a better rate than small ones promise.
    """
    low, high = one.samples, two.samples
    if low == high:
        return compute_seconds(one, kernels, software) * samples / low
    share = (samples - low) / (high - low)
    if [kind for kind, _, _ in one.order] != [kind for kind, _, _ in two.order]:  # the two ran other ops
        ends = [compute_seconds(trace, kernels, software) for trace in (one, two)]
        return max(0.0, ends[0] + (ends[1] - ends[0]) * share)
    seconds = (one.calls + (two.calls - one.calls) * share) * kernels.call_s
    for (kind, shape, times, other, often), count in _pairs(one, two).items():
        at = tuple(max(0.0, a + (b - a) * share) for a, b in zip(shape, other, strict=True))
        seconds += count * op_seconds(kind, at, times + (often - times) * share, kernels, software)
    return seconds


@lru_cache(maxsize=256)
def _pairs(one: Counted, two: Counted) -> Counter[tuple[str, tuple[float, ...], int, tuple[float, ...], int]]:
    """Each op of both traces with its two shapes, and how often: layers repeat."""
    return Counter((a[0], a[1], a[2], b[1], b[2]) for a, b in zip(one.order, two.order, strict=True))


def compute_seconds(trace: Counted, kernels: Kernels, software: Software) -> float:
    """All ops of a trace, one after another."""
    seconds = trace.calls * kernels.call_s
    for (kind, shape, times, _, _), count in _pairs(trace, trace).items():
        seconds += count * op_seconds(kind, shape, times, kernels, software)
    return seconds


def op_seconds(kind: str, shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    """One op of a trace (see planner/counting); `times`: the batch of a batched product."""
    if kind == "product":
        m, n, k = shape
        return _product(m, n, k, times, kernels)
    if kind == "attention":
        return _attention(shape, kernels, software)
    if kind in ("conv", "conv_backward"):
        return _convolution(kind, shape, kernels, software)
    if kernels.ops is not None:
        return kernels.ops.seconds(kind, shape[0])
    return kernels.stream(shape[0] / (EAGER if software.fused else 1.0), 1)


def _product(m: float, n: float, k: float, times: float, kernels: Kernels) -> float:
    if times <= 1:
        return times * kernels.product(m, n, k)
    if kernels.device.kind == "cpu":  # from matrix to matrix, in one call
        return kernels.product(times * m, n, k)
    return min(times * kernels.product(m, n, k), kernels.batched(times, m, n, k))


def _attention(shape: Sequence[float], kernels: Kernels, software: Software) -> float:
    rows, queries, keys, width, back = shape
    flops = 4.0 * rows * queries * keys * width * (2.5 if back else 1.0)
    if kernels.ops is not None:
        return kernels.ops.seconds("attention_backward" if back else "attention", flops)
    if kernels.device.kind == "cpu":
        return flops / (kernels.peak_tflops * 1e12)
    # the kernel's figures count the causal half
    return 2 * kernels.attention(software.attention, rows, 1, queries, keys, int(width), backward=bool(back))


def _convolution(kind: str, shape: Sequence[float], kernels: Kernels, software: Software) -> float:
    cells, out, deep, moved = shape
    seconds = kernels.convolution(kind, cells, out, deep)
    if seconds is not None:
        return seconds
    flops = 2.0 * cells * out * deep * (2 if kind == "conv_backward" else 1)
    return flops / (kernels.peak_tflops * 1e12 * CONV_SHARE) + kernels.stream(moved, 1)


def policy(precision: str, state_elements: float) -> States:
    """Bytes for one parameter under a precision of this package, for the optimizer that the task has."""
    base = STATES[{"fp32": "fp32", "bf16-full": "bf16-full", "fp64": "fp32"}.get(precision, "bf16")]
    width = {"fp64": 8.0, "bf16-full": 2.0}.get(precision, 4.0)
    base = replace(base, optimizer=state_elements * width)
    return replace(base, weight=8.0, gradient=8.0) if precision == "fp64" else base


def memory(model: Model, layout: Layout, precision: str) -> Ledger:
    """Bytes on one rank: what rests, and the peak of a micro-batch."""
    count, states = model.one.parameters, policy(precision, model.update.state_elements)
    share, zero = 1.0 / layout.shard, layout.zero
    terms = {
        "weights": count * states.weight * (share if zero >= 3 else 1.0),
        "gradients": count * states.gradient * (share if zero >= 2 else 1.0),
        "master": count * states.master * (share if zero >= 1 else 1.0),
        "optimizer": count * states.optimizer * (share if zero >= 1 else 1.0),
        "module's buffers": float(model.one.buffers_bytes),
    }
    peaks = _peaks(model, layout, states)
    top = max(peaks, key=lambda name: peaks[name])
    terms[top] = peaks[top]
    if model.batch_bytes:
        held = layout.global_batch if model.batch_on_device else layout.micro_batch
        terms["global batch" if model.batch_on_device else "inputs"] = model.batch_bytes * held
    if zero == 2:  # whole gradients of the buckets on their way; beside them the part that is added to the sum
        new = 1.0 if layout.n_micro > 1 else 1.0 - share
        terms["gradients in flight"] = min(count * states.gradient, IN_FLIGHT_BYTES) * new
    if zero >= 3 and states.master:
        terms["weights"] = 0.0
    if zero >= 3:
        largest = max([*model.one.units, model.one.rest])
        terms["gathered units"] = (model.one.rest + 2 * largest) * states.weight
    return Ledger({k: v for k, v in terms.items() if v}, top)


def _peaks(model: Model, layout: Layout, states: States) -> dict[str, float]:
    """What comes and goes in a step beside what rests, each at its own time: the largest makes the peak."""
    here = model.batch_on_device  # a CPU, where an optimizer goes from tensor to tensor and gloo reduces a copy
    held = model.one.parameters / (layout.shard if layout.zero else 1)
    at_once = min(max(model.one.sizes, default=0), held) if here else held
    out = {
        "micro-batch": model.peak(layout.micro_batch),
        "optimizer's temporaries": model.update.temporary * at_once * (states.master or states.weight),
    }
    if here and layout.zero == 1 and layout.shard > 1:
        out["reduction in flight"] = min(model.one.parameters * states.gradient, IN_FLIGHT_BYTES)
    return out


def simulate_traced(
    model: Model,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    precision: str,
) -> Forecast:
    """One optimizer step over replicas and ZeRO shards."""
    dtype = {"fp32": "fp32", "fp64": "fp32"}.get(precision, "bf16")
    kernels, added = kernels_of(cluster, layout, software, dtype)
    wire = Wire(cluster)
    micro = model.seconds(layout.micro_batch, kernels, software)
    states = policy(precision, model.update.state_elements)
    data, timeline = data_seconds(model, layout, micro, wire, states, software)
    optimizer = optimizer_seconds(model, layout, kernels, states)
    parts = {"compute": layout.n_micro * micro, "data-parallel communication": data, "optimizer": optimizer}
    parts |= engine_seconds(model, layout, added)
    if cluster.device.kind != "cpu":
        parts["slowest device, clocks and gaps"] = (GAPS - 1) * sum(parts.values())
    correction = cluster.device.correction.value if cluster.device.correction is not None else 1.0
    parts = {name: seconds * correction for name, seconds in parts.items()}
    samples = layout.global_batch
    forecast = Forecast(
        step_s=sum(parts.values()), parts=parts, memory=[memory(model, layout, precision)], flops=model.flops(samples),
        world_size=layout.world_size, tokens=samples, peak_tflops=peak_of(cluster, dtype), convention="counted",
        exposed={"data": data}, timeline=timeline,
    )  # fmt: skip
    forecast.basis = {
        "products": kernels.basis,
        "data ranks": wire.basis("all_reduce", Group(layout.dp, 1)),
        "work": f"{len(model.one.products)} shapes of products and {model.one.kernels} ops counted on fake tensors",
    }
    if model.one.balanced:
        forecast.basis["routing"] = BALANCED
    if cluster.device.correction is not None:
        forecast.basis["correction"] = f"x {correction:.3g}, {cluster.device.correction.source}"
    return forecast


def kernels_of(cluster: Cluster, layout: Layout, software: Software, dtype: str) -> tuple[Kernels, Overhead]:
    """Kernels on the cluster's device, and what the host adds under the layout's techniques."""
    device, added = cluster.device, overhead_of(cluster.device, layout)
    if device.ops:  # measured as they are called, one by one
        return Kernels(device, 0.0, dtype, added.call), added
    return Kernels(device, device.op_us.value if device.op_us is not None else software.launch_us, dtype), added


def engine_seconds(model: Model, layout: Layout, added: Overhead) -> dict[str, float]:
    """What a step costs beyond its ops, by name; nothing where it was not measured."""
    seconds = added.step + added.event * events(layout, len(model.one.units))
    return {"engine": seconds} if seconds else {}


def data_seconds(
    model: Model, layout: Layout, micro: float, wire: Wire, states: States, software: Software
) -> tuple[float, list[tuple[str, str, float, float]]]:
    """What data ranks add to a step in which a micro-batch takes `micro` seconds; under ZeRO-3 a timeline too."""
    count, inside = model.one.parameters, layout.tp  # ranks of tp lie inside
    shard, replicas = Group(layout.shard, inside), Group(layout.replicas, layout.shard * layout.pp * inside)
    if layout.dp == 1:
        return 0.0, []
    if layout.zero >= 3 and layout.shard > 1:
        total, timeline = _gathered(model, layout, micro, wire, states, shard, replicas)
        return max(0.0, total - layout.n_micro * micro), timeline
    if layout.zero:
        reduce_s = wire.collective("reduce_scatter", shard, count * states.gradient)
        reduce_s += wire.collective("all_reduce", replicas, count * states.gradient / layout.shard)
        gather_s = wire.collective("all_gather", shard, count * states.weight)
    else:
        reduce_s, gather_s = wire.collective("all_reduce", Group(layout.dp, inside), count * states.gradient), 0.0
    hidden = 1 - FORWARD_SHARE if software.overlap_dp and not on_cores(wire) else 0.0
    pieces = max(1, len(model.one.units))
    times = layout.n_micro if layout.zero == 2 else 1  # ZeRO-2 reduces after every micro-batch
    return times * max(reduce_s / pieces, reduce_s - hidden * micro) + gather_s, []


def on_cores(wire: Wire) -> bool:
    """Whether collectives run on the very cores that compute, so that nothing hides behind them."""
    return wire.cluster.device.kind == "cpu"


def optimizer_seconds(model: Model, layout: Layout, kernels: Kernels, states: States) -> float:
    """The update of what this rank holds."""
    over = layout.shard if layout.zero else 1
    if kernels.ops is not None:
        ops, work = kernels.ops, model.update.work
        each = {size: sum(ops.seconds(name, size / over * wide) for name, wide in work) for size in model.one.sizes}
        calls = model.update.calls * kernels.call_s
        updates = sum(times * (each[size] + calls) for size, times in model.one.sizes.items())
        moved = 2 * states.gradient * sum(size * times for size, times in model.one.sizes.items())
        into = ops.seconds("copy_", moved) if layout.zero < 3 else 0.0  # gradients into their buckets
        return updates + into + ops.seconds("mul_", moved / over)  # and divided by the weight
    moved = 2 * states.gradient + 2 * (states.master or states.weight) + 2 * states.optimizer
    held = model.one.parameters / over
    seconds = kernels.stream(held * moved * EAGER, OPTIMIZER_OPS)
    if kernels.device.kind == "cpu":  # there, an optimizer goes from tensor to tensor
        seconds += model.one.tensors * OPTIMIZER_OPS * kernels.launch_us * 1e-6
    return seconds


def peak_of(cluster: Cluster, dtype: str) -> float:
    device = cluster.device
    if dtype == "fp32" and device.fp32_tflops is not None:
        return device.fp32_tflops.value
    return device.bf16_tflops.value / (2 if dtype == "fp32" else 1)


def _gathered(
    model: Model, layout: Layout, micro: float, wire: Wire, states: States, shard: Group, replicas: Group
) -> tuple[float, list[tuple[str, str, float, float]]]:
    """ZeRO-3: units gathered one ahead, gradients scattered behind; time is dealt to units by their parameters.

    What lies in no unit is gathered before the first of them, kept, and scattered after the last.
    """
    units = model.one.units or [model.one.parameters]
    total = max(1, sum(units))
    rest = max(0, model.one.parameters - sum(units))
    data = "compute" if on_cores(wire) else "data"
    ops: list[Op] = []
    last = -1

    def gather(count: float) -> float:  # and from one buffer into the parameters
        copied = 2 * count * states.weight / wire.bandwidth
        return wire.collective("all_gather", shard, count * states.weight) + copied

    def scatter(count: float) -> float:
        copied = 2 * count * states.gradient / wire.bandwidth
        return wire.collective("reduce_scatter", shard, count * states.gradient) + copied

    for _ in range(min(2, layout.n_micro)):
        for order, part in ((units, FORWARD_SHARE), (units[::-1], 1 - FORWARD_SHARE)):
            computed: list[int] = []
            gathers = [gather(count) for count in order]
            ops.append(Op("gather 0", data, gathers[0], [last] if last >= 0 else []))
            here = len(ops) - 1
            for index, count in enumerate(order):
                ops.append(Op(f"unit {index}", "compute", part * micro * count / total, [here]))
                last = len(ops) - 1
                if index + 1 < len(order):  # the next unit is asked for before this one's gradients leave
                    ops.append(Op(f"gather {index + 1}", data, gathers[index + 1], computed[-1:]))
                    here = len(ops) - 1
                computed.append(last)
                if part > FORWARD_SHARE:
                    ops.append(Op(f"scatter {index}", data, scatter(count), [last]))
    seconds = run(ops)
    once = wire.collective("all_reduce", replicas, model.one.parameters * states.gradient / shard.size)
    once += layout.n_micro * (gather(rest) + scatter(rest)) if rest else 0.0
    return once + seconds * layout.n_micro / min(2, layout.n_micro), [
        (op.stream, op.name, op.start, op.end) for op in ops
    ]
