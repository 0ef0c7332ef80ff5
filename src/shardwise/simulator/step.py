"""`simulate`: the forecast of a decoder's step from its shape, layout and cluster. Of a traced module: traced, cut."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.cluster import Cluster
from shardwise.costs.block import BlockCosts
from shardwise.costs.host_seconds import HOST_BASIS
from shardwise.costs.layout import Layout
from shardwise.costs.memory import rank_memory, stage_parameters
from shardwise.costs.rings import RINGS
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software
from shardwise.costs.wire import RankGroup
from shardwise.simulator.events import CONTENTION, StreamOp, run
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.host_room import decoder_room
from shardwise.simulator.parts import (
    GAPS,
    LayerTimes,
    StageTimes,
    StepContext,
    beside,
    crossing,
    finished,
    host_basis,
    layer_times,
    offload_basis,
    optimizer_seconds,
    reduction_seconds,
    sent_beside,
    sharing,
)
from shardwise.simulator.stages import pipelined

PLAYED = 4  # micro-batches of a ZeRO-3 step that are simulated; further ones take as long as the last


def simulate(
    shape: Shape, layout: Layout, cluster: Cluster, software: Software, *, precision: str = "bf16"
) -> Forecast:
    """Returns the forecast of one optimizer step of a decoder, computed from its shape; nothing runs.

    precision  "bf16", or "fp32" for products in float32
    """
    step = StepContext(shape, layout, cluster, software, precision)
    block = BlockCosts(shape, layout, software, step.kernels)
    times = layer_times(step)
    forecast = pipelined(step, times) if layout.pp > 1 else _one_stage(step, times)
    forecast.basis |= {
        "implementation": f"{software.name}: {software.source}",
        "products": step.kernels.basis,
        "tensor parallel": step.wire.basis("all_reduce", step.group("tp")),
        "data ranks": step.wire.basis("reduce_scatter", step.group("data")),
        "attention": step.kernels.attention_basis(software.attention),
        "contention": f"compute is {CONTENTION:.0%} slower beside communication (assumed)",
    }
    most = stage_parameters(shape, layout, shape.layers / layout.pp, first=layout.pp == 1, last=True)
    forecast.basis |= offload_basis(step, most)
    forecast.room = decoder_room(step)
    layer, layers = block.layer(), shape.layers / layout.pp
    computes = layer.forward + layer.backward_input + layer.backward_weight
    forecast.basis |= host_basis(step.kernels, layers * sum(block.started), layers * computes)
    # then the host, which starts a layer's ops, is the limit and not the device
    if sum(layer.host) > times.layer.seconds * 0.999 * GAPS:
        forecast.basis["host"] = HOST_BASIS.format(1e3 * sum(layer.host))
    if layout.cp > 1:
        forecast.basis["ring"] = RINGS[software.ring if block.merges else "even"]
    return forecast


# --- one stage: replicas, ZeRO


def _one_stage(step: StepContext, times: LayerTimes) -> Forecast:
    """Returns the forecast of a step without a pipeline: micro-batches one by one, then reductions and update."""
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
    if lay.sharded.weights:
        total, timeline = _gathered(step, times)
        data = max(0.0, total - n * compute)
    # replicas and ZeRO 1 and 2: gradients overlap with backward, gathered weights with the next forward
    else:
        reduce_s, gather_s = reduction_seconds(step, parameters, shape.layers)
        overlap, pieces = step.software.overlap_dp, sent_beside(step, parameters, shape.layers)
        backward, forward = layers.backward + layers.weight, layers.forward
        data = lay.sharded.reductions(n) * beside(backward, reduce_s, pieces, overlap)
        data += beside(forward, gather_s, pieces, step.software.overlap_gathers)
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
    """Returns (seconds, timeline) of all micro-batches under ZeRO-3; timeline: (stream, name, start s, end s)."""
    lay = step.layout
    played = min(lay.n_micro, PLAYED)
    ops = _zero3_ops(step, times, played)
    seconds = run(ops)
    if lay.n_micro > played:
        # the difference is one micro-batch in the middle, without the start of the first and the end of the last
        shorter = run(_zero3_ops(step, times, played - 1))
        seconds += (lay.n_micro - played) * (seconds - shorter)
    return seconds, [(op.stream, op.name, op.start, op.end) for op in ops]


def _zero3_ops(step: StepContext, times: LayerTimes, n_micro: int) -> list[StreamOp]:
    """Returns the ops of `n_micro` micro-batches under zero=3 without a pipeline."""
    played = _Zero3(step, times)
    for micro in range(n_micro):
        played.forward(micro)
        played.backward(micro, last_micro=micro == n_micro - 1)
    return played.ops


class _Unit(NamedTuple):
    """Seconds of a ZeRO-3 unit's messages.

    gather   all-gather of its weights
    scatter  (reduction of its gradients in any micro-batch but the last, in the last one)
    crosses  copy of its shards from the host before a gather, or of gradients to the host; 0 if they are on the device
    """

    gather: float
    scatter: tuple[float, float]
    crosses: float


class _UnitLinks:
    """Computes the `_Unit` of any unit from its parameters."""

    def __init__(self, step: StepContext):
        self.step, self.whole = step, 4.0 if step.precision == "fp32" else 2.0
        self.pieces = step.software.gathers_per_unit
        self.copies = self.pieces * step.group("data").size * step.software.copies_us * 1e-6

    def gather(self, counts: dict[str, float]) -> float:
        """Returns the seconds to all-gather a unit's weights; `counts`: {kind: parameters on a rank of tp}."""
        sizes = ((group, count * self.whole / self.pieces) for group, count in self._by_group(counts).items())
        return self.copies + self.pieces * sum(
            self.step.wire.collective("all_gather", group, size) for group, size in sizes
        )

    def scatter(self, counts: dict[str, float], last_micro: bool) -> float:
        """Returns the seconds to reduce a unit's gradients, after the last micro-batch over replicas too."""
        wire, replicas, seconds = self.step.wire, self.step.group("replicas"), self.copies
        for group, count in self._by_group(counts).items():
            grads = count * self.step.software.grad_reduce_bytes
            seconds += self.pieces * wire.collective("reduce_scatter", group, grads / self.pieces)
            seconds += wire.collective("all_reduce", replicas, grads / group.size) if last_micro else 0.0
        return seconds

    def of(self, counts: dict[str, float]) -> _Unit:
        """Returns the `_Unit` of {kind: parameters on a rank of tp}."""
        early = 0.0 if self.step.software.sums_once else self.scatter(counts, False)
        return _Unit(self.gather(counts), (early, self.scatter(counts, True)),
                     crossing(self.step, sum(counts.values())))  # fmt: skip

    def _by_group(self, counts: dict[str, float]) -> dict[RankGroup, float]:
        by_group: dict[RankGroup, float] = {}
        for kind, count in counts.items():
            by_group[sharing(self.step, kind)] = by_group.get(sharing(self.step, kind), 0.0) + count
        return by_group


class _Zero3:
    """Builds the `StreamOp`s of micro-batches under ZeRO-3, in the order in which their streams run them."""

    def __init__(self, step: StepContext, times: LayerTimes):
        self.ops: list[StreamOp] = []
        self._step, self._times = step, times
        shape, self._prefetch = step.shape, step.software.prefetch
        links = _UnitLinks(step)
        self._usual, self._front = (
            links.of(stage_parameters(shape, step.layout, 1.0, first=False, last=False, dense=dense))
            for dense in (0.0, 1.0)
        )
        parameters = shape.embedding_parameters + shape.head_parameters + shape.norm_parameters
        parameters += shape.ahead * (shape.layer_parameters + shape.joined_parameters)
        self._root = links.of({"dense": parameters / step.layout.tp})
        self._computed: list[int] = []  # indexes of this micro-batch's compute ops, by unit
        self._last = -1  # index of the last compute op

    def forward(self, micro: int) -> None:
        """Appends to `ops` the forward of micro-batch `micro`: embedding, layers with their gathers, head and loss."""
        # without prefetch a gather waits for everything before it
        before = len(self.ops) - 1 if self.ops and self._prefetch == "none" else None
        self._computed = []
        root = self._gather(f"root {micro}", self._root, before)
        last = self._add(f"embedding {micro}", "compute", self._times.first.forward, root)
        for index in range(self._step.shape.layers):
            # at most two units are gathered at a time, so a gather waits until the unit before last has computed
            ahead = self._computed[-2] if len(self._computed) >= 2 else None
            wait = ahead if self._prefetch != "none" else last
            got = self._gather(f"{index}", self._unit(index), wait)
            last = self._add(f"forward {index}.{micro}", "compute", self._time(index).forward, got, last)
            self._computed.append(last)
        self._last = self._add(f"head {micro}", "compute", self._times.last.seconds, last)
        self._computed.append(self._last)

    def backward(self, micro: int, *, last_micro: bool) -> None:
        """Appends to `ops` the backward of micro-batch `micro`: layers with gathers and reductions, embedding.

        last_micro  whether it is the step's last, after which gradients are reduced over replicas too
        """
        lay, last = self._step.layout, self._last
        # some software frees weights between the recomputed forward and backward, and gathers them twice
        again = 2 if lay.recompute == "full" and self._step.software.gathers_again else 1
        gathers = again * (lay.sharded.gathers - 1)
        here: int | None = None  # the last layer is still gathered
        for index in reversed(range(self._step.shape.layers)):
            own = self._time(index)
            last = self._add(f"backward {index}.{micro}", "compute", own.backward + own.weight, here, last)
            wait = self._computed[-1] if self._prefetch != "none" else last
            self._computed.append(last)
            if self._prefetch != "before":  # the next gather queues behind these gradients on one stream
                self._scatter(f"{index}", self._unit(index), last_micro, last)
            for _ in range(gathers if index else 0):
                here = self._gather(f"{index - 1}", self._unit(index - 1), wait)
            if self._prefetch == "before":
                self._scatter(f"{index}", self._unit(index), last_micro, last)
        last = self._add(f"embedding backward {micro}", "compute", self._times.first.weight, last)
        self._scatter(f"root {micro}", self._root, last_micro, last)

    def _gather(self, name: str, unit: _Unit, wait: int | None) -> int:
        if unit.crosses:
            wait = self._add(f"shards {name}", "from the host", unit.crosses, wait)
        return self._add(f"gather {name}", "data", unit.gather, wait)

    def _scatter(self, name: str, unit: _Unit, last_micro: bool, last: int) -> None:
        summed = self._add(f"scatter {name}", "data", unit.scatter[last_micro], last)
        if unit.crosses and (last_micro or self._step.layout.replicas == 1):  # else they wait for the sum over replicas
            self._add(f"gradients {name}", "to the host", unit.crosses, summed)

    def _add(self, name: str, stream: str, seconds: float, *after: int | None) -> int:
        self.ops.append(StreamOp(name, stream, seconds, [place for place in after if place is not None]))
        return len(self.ops) - 1

    def _unit(self, index: int) -> _Unit:
        return self._front if index < self._step.shape.dense_layers else self._usual

    def _time(self, index: int) -> StageTimes:
        return self._times.dense if index < self._step.shape.dense_layers else self._times.layer
