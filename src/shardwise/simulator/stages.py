"""The forecast of a decoder's step under a pipeline, by its schedule's table of ops (`pipelined`).

For each micro-batch ZeRO-2 reduces a stage's gradients after its backward, and ZeRO-3 also gathers its weights for
forward and for backward, as in `parallel/flat.py` and `parallel/full.py`.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.costs.layout import Layout
from shardwise.costs.memory import rank_memory, stage_parameters
from shardwise.costs.shapes import Shape
from shardwise.costs.software import whole_in_pipeline
from shardwise.costs.wire import RankGroup
from shardwise.layout.schedule_kinds import KINDS
from shardwise.simulator.events import StreamOp, run
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.parts import (
    LayerTimes,
    StepContext,
    beside,
    finished,
    optimizer_seconds,
    reduction_seconds,
    sent_beside,
)
from shardwise.simulator.pipeline import live_layers, play_all, stages_of
from shardwise.simulator.sharded import play_units

# Microseconds of each blocking send: Megatron's batched send and receive ends in a device synchronise, after which the
# empty queue of kernels has to be filled again (assumed)
BLOCKED_US = 400.0


def stage_layers(shape: Shape, layout: Layout) -> list[float]:
    """Returns the number of layers of each stage: `layout.stage_layers`, or even with the remainder in the middle.

    Layers that predict further tokens (`shape.ahead`) are on the last stage. They count when layers are dealt evenly,
    but are not included in the numbers returned.
    """
    stages = layout.pp * layout.chunks
    if layout.stage_layers:
        return [float(n) for n in layout.stage_layers]
    even, rest = divmod(shape.layers + shape.ahead, stages)
    start = (stages - rest) // 2
    dealt = [float(even + (1 if start <= index < start + rest else 0)) for index in range(stages)]
    return [*dealt[:-1], max(0.0, dealt[-1] - shape.ahead)]


def dense_of(shape: Shape, layers: list[float]) -> list[float]:
    """Returns for each stage the number of its layers that are among the model's first dense layers.

    layers  as `stage_layers` returns them
    """
    before = [sum(layers[:index]) for index in range(len(layers))]
    return [max(0.0, min(n, shape.dense_layers - b)) for n, b in zip(layers, before, strict=True)]


def pipelined(step: StepContext, times: LayerTimes) -> Forecast:
    """Returns the forecast of a step under a pipeline; `times`: seconds of the model's kinds of layers."""
    lay, shape = step.layout, step.shape
    # some schedules (a V) have several stages on each rank by definition
    if lay.chunks == 1:
        step = replace(step, layout=lay.with_(chunks=KINDS[lay.schedule].stages_per_rank))
        lay = step.layout
    name = lay.schedule
    owner, mine_of = KINDS[name].owners(lay.pp, lay.chunks), stages_of(name, lay.pp, lay.chunks)
    layers = stage_layers(shape, lay)
    stages = len(layers)
    dense = dense_of(shape, layers)
    by_stage = [times.of(n, front) for n, front in zip(layers, dense, strict=True)]
    by_stage[0], by_stage[-1] = by_stage[0].plus(times.first), by_stage[-1].plus(times.last)
    forward, backward, weight, exposed = (
        [getattr(stage, name) for stage in by_stage] for name in ("forward", "backward", "weight", "exposed")
    )
    waits = _data_waits(step, layers, dense, forward, backward, weight)
    # a rank of tp sends its own positions (sp), its shard of the message (split_sends), or all of it
    message = lay.tokens * shape.hidden * 2 / (lay.tp if lay.sp or step.software.split_sends else 1)
    distance = step.group("pp").stride
    home = [owner * distance for owner in owner]
    blocking = not step.software.overlap_p2p
    blocked = BLOCKED_US * 1e-6 if blocking else 0.0
    send = [step.wire.send(message, home[s], home[s + 1]) + blocked for s in range(stages - 1)]
    played = play_all(name, lay.pp, lay.n_micro, lay.chunks, forward, backward, weight, send, blocking=blocking)
    memory, tails = [], []
    # if a rank's stages are unequal, live layers have to be counted, not micro-batches
    unlike = [len({layers[stage] for stage in mine}) > 1 for mine in mine_of]
    live = live_layers(played, layers, lay.pp) if any(unlike) else []
    for rank in range(lay.pp):
        mine = mine_of[rank]
        layers_here, front = (sum(of[stage] for stage in mine) for of in (layers, dense))
        first, last = 0 in mine, stages - 1 in mine
        memory.append(
            rank_memory(
                shape, lay, step.software, layers=layers_here, dense=front, first=first, last=last,
                in_flight=live[rank] / layers_here if unlike[rank] else played.in_flight[rank] / lay.chunks,
            )
        )  # fmt: skip
        parameters = stage_parameters(shape, lay, layers_here, first=first, last=last, dense=front)
        data = _once(step, parameters, layers_here, backward[mine[0]] + weight[mine[0]], forward[mine[0]])
        # a tied matrix is on the first and the last stage, which all-reduce its gradients
        if shape.tied and lay.pp > 1 and (first or last):
            data += step.wire.collective(
                "all_reduce", RankGroup(2, distance * (lay.pp - 1)), shape.vocab * shape.hidden * 4 / lay.tp
            )
        tails.append((data, optimizer_seconds(step, parameters)))
    data = max(tail[0] for tail in tails)
    optimizer = max(tail[1] for tail in tails)
    busiest = max(range(lay.pp), key=lambda r: played.busy[r])
    inside = lay.n_micro * sum(exposed[stage] for stage in mine_of[busiest])
    waiting = lay.n_micro * sum(waits[stage] for stage in mine_of[busiest])
    data += lay.rounds * waiting
    parts = {
        "compute": lay.rounds * (played.busy[busiest] - inside - waiting),
        "tensor, context and expert communication": lay.rounds * inside,
        "pipeline bubble and sends": lay.rounds * (played.seconds - played.busy[busiest]),
        "data-parallel communication": data,
        "optimizer": optimizer,
    }
    sends = {"tp": lay.rounds * inside, "pp": lay.rounds * (played.seconds - played.busy[busiest]), "data": data}
    forecast = finished(step, parts, memory, sends, played.bubble)
    forecast.timeline = [(f"rank {rank}", str(op), start, end) for rank, op, start, end in played.ops]
    return forecast


def _data_waits(
    step: StepContext, layers: list[float], dense: list[float],
    forward: list[float], backward: list[float], weight: list[float],
) -> list[float]:  # fmt: skip
    """Adds each stage's seconds of waiting for data ranks in a micro-batch to `forward` and `weight`, in place.

    Returns these waits by stage. The lists have one entry for each stage.
    """
    lay, shape, soft = step.layout, step.shape, step.software
    waits = [0.0] * len(layers)
    # gradients are reduced once in a step (`_once`), so no micro-batch waits
    if not lay.sharded.gradients or whole_in_pipeline(soft, lay):
        return waits
    inner = replace(step, layout=lay.with_(replicas=1))  # replicas reduce once in a step
    for stage, (count, front) in enumerate(zip(layers, dense, strict=True)):
        own = stage_parameters(shape, lay, 1.0, first=False, last=False, dense=front / count if count else 0.0)
        scatter, gather = reduction_seconds(inner, own, 1.0)
        ends = stage_parameters(shape, lay, 0.0, first=stage == 0, last=stage == len(layers) - 1)
        end_scatter, end_gather = reduction_seconds(inner, ends, 1.0)
        units = max(1, round(count))
        # zero=2 gathers no weights, and reduces gradients after the backward that makes them
        if lay.sharded.flat:
            window = weight[stage] if KINDS[lay.schedule].split else backward[stage] + weight[stage]
            waits[stage] = beside(window, count * scatter + end_scatter, units, soft.overlap_dp)
            weight[stage] += waits[stage]
            continue
        back = backward[stage] + weight[stage]
        ahead = soft.prefetch != "none"
        more = end_gather + _gathered(forward[stage], units, gather, 0.0, ahead=ahead)
        more_gathers = lay.sharded.gathers - 1
        again = more_gathers * end_gather + end_scatter
        again += _gathered(back, units, more_gathers * gather, scatter, ahead=ahead)
        forward[stage] += more
        weight[stage] += again
        waits[stage] = more + again
    return waits


def _gathered(seconds: float, units: int, gather: float, scatter: float, *, ahead: bool) -> float:
    """Returns the seconds that gathers and scatters add to a forward or backward of `seconds`.

    units, gather, scatter  number of units, seconds for each; `ahead`: whether the next unit's gather overlaps
    """
    if not ahead:
        return units * (gather + scatter)
    ops: list[StreamOp] = []
    play_units(ops, [seconds / units] * units, [gather] * units, [scatter] * units if scatter else [])
    return run(ops) - seconds


def _once(step: StepContext, parameters: dict[str, float], layers: float, backward: float, forward: float) -> float:
    """Returns the exposed seconds of a stage's once-a-step messages of data ranks.

    parameters, layers  of the stage on one rank; `backward`, `forward`: seconds of a micro-batch that can hide messages
    """
    lay, overlap = step.layout, step.software.overlap_dp
    reduce_s, gather_s = reduction_seconds(step, parameters, layers)
    buckets = sent_beside(step, parameters, layers)
    whole = whole_in_pipeline(step.software, lay)
    if not lay.sharded.gradients or whole:
        reduced = beside(backward, reduce_s, buckets, overlap and not whole)
    else:  # the sum over dp_shard is part of each micro-batch (`_data_waits`)
        reduced = reduce_s - reduction_seconds(replace(step, layout=lay.with_(replicas=1)), parameters, layers)[0]
    ahead = step.software.overlap_gathers or whole  # fully_shard gathers one unit ahead
    return reduced + (beside(forward, gather_s, buckets, ahead) if not lay.sharded.weights or whole else 0.0)
