"""Bytes on one rank of a traced module, what rests and what comes and goes. Of a decoder: costs/memory.

    rests     weights, gradients, optimizer state by dtype policy, each divided by what shards it; buffers; the batch
    peak      the largest of what has its own time: a micro-batch, the optimizer's temporaries, a reduction in flight

Under zero=3, and zero=2 beside a pipeline, a micro-batch was played with what the technique makes and frees around it
(rehearsal/fully_sharded.py): its peak has gathered weights, buffers, and gradients as far as they are there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardwise.costs.coded_state import decoded, resting
from shardwise.costs.layout import Layout
from shardwise.costs.memory import MemoryLedger
from shardwise.costs.offload import brought, staged
from shardwise.costs.software import States
from shardwise.layout import Plan
from shardwise.layout.flat_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, lay_out, most_elements
from shardwise.layout.offload import TIERS, in_tier, placements, weights_on_host
from shardwise.precision import Precision
from shardwise.simulator.counted import Model, StepTrace
from shardwise.step.owners import choose_owners, share_owners

IN_FLIGHT_BYTES = 2 * BUCKET_BYTES  # of gradients: two buckets, as comm/buckets.py cuts them


def policy(precision: str, state_elements: float, layout: Layout) -> States:
    """Returns the bytes per parameter (weight, gradient, master, optimizer state) under a precision.

    Replicas and ZeRO 1 and 2 sum gradients in buckets of the dtype that they are sent in, and give the optimizer
    copies where it wants another; FSDP2's shards have the masters' dtype.
    """
    chosen = Precision.of(Plan(precision=precision, reduce_dtype=layout.reduce_dtype))
    master, sent = chosen.master.itemsize, chosen.reduce.itemsize
    in_buckets = not layout.sharded.weights
    return States(
        precision, chosen.compute.itemsize, sent if in_buckets else master, master if chosen.mixed else 0,
        state_elements * master, master if in_buckets and sent != master else 0, sent,
    )  # fmt: skip


def memory(
    model: Model, layout: Layout, precision: str, samples: int | None = None, shard_rank: int | None = None
) -> MemoryLedger:  # fmt: skip
    """Returns the memory of one rank by term: what rests between steps, and the peak within one.

    samples     of the global batch, where a rank holds all of it
    shard_rank  whose shard of those that zero has, where the ranks do not divide a weight; the fullest's by default
    """
    trace, states = model.small, policy(precision, model.update.state_elements, layout)
    stage, share = layout.sharded, 1.0 / layout.shard_ranks
    of_experts = 1.0 / max(1, layout.shard_ranks // layout.ep)  # of the ranks that hold the same ones
    rest = sum(size * count for size, count in trace.sizes.items()) - trace.experts
    # zero=3 pads rows to equal shards; padding takes memory but is not updated
    updated = rest * (share if stage.state else 1.0)
    if stage.weights:
        updated = _cut(trace, layout.shard_ranks, shard_rank or 0)
    owned = _owned(model, layout, shard_rank)
    rests = resting(states, layout, model.update.coded)
    experts = trace.experts * (of_experts if stage.state else 1.0)
    terms = {
        "weights": (trace.shard_elements + trace.experts if stage.weights else trace.parameters) * states.weight,
        "gradients": _gradients(trace, layout, states, rest * (share if stage.gradients else 1.0), of_experts),
        "master": ((trace.shard_elements if stage.weights else updated) + experts) * rests.master,
        "optimizer": (updated + experts if owned is None else owned.updated) * rests.optimizer,
        "whole weights of the optimizer": (owned.copied if owned else 0) * (states.master or states.weight),
        "module's buffers": float(trace.buffers_bytes),
    }
    terms |= _offloaded(model, layout, rests, terms)
    if stage.weights and states.master:  # the masters are the shards
        terms["weights"] = trace.experts * states.weight
    terms |= _weights_elsewhere(trace, layout, states, terms)
    reduced = rest + (trace.experts if of_experts < 1 else 0)  # over dp_shard: experts of one rank's own are not
    peaks = _peaks(model, layout, states, updated + experts, reduced, owned)
    top = max(peaks, key=lambda name: peaks[name])
    terms[top] = peaks[top]
    # batch_on_device: a CPU, where every rank holds the whole batch; an accelerator has a micro-batch of it
    if model.batch_bytes and (model.batch_on_device or layout.cut_positions == 1):  # shares of it are in the trace
        samples_here = (samples or layout.global_batch) if model.batch_on_device else layout.micro_batch
        terms["global batch" if model.batch_on_device else "inputs"] = model.batch_bytes * samples_here
    if stage.flat and stage.gradients and not trace.shard_gradient_bytes and layout.gradients == "together":
        # whole gradients of the buckets on their way; beside them the part that is added to the sum
        new = 1.0 if layout.n_micro > 1 else 1.0 - share
        terms["gradients in flight"] = min(rest * states.gradient, IN_FLIGHT_BYTES) * new
    return MemoryLedger({k: v for k, v in terms.items() if v}, top)


def _offloaded(model: Model, layout: Layout, states: States, terms: dict[str, float]) -> dict[str, float]:
    """Returns the terms, in bytes, that change where state is offloaded between steps, staging buffers included."""
    # with weights on the host all state lies there too, which `_weights_elsewhere` counts
    if layout.offload == "none" or weights_on_host(layout.offload):
        return {}
    on_host = model.batch_on_device
    fractions = {tier: in_tier(layout.offload, "optimizer", tier) for tier in TIERS}
    gone = sum(fractions.values())
    spread = layout.sharded.state or layout.tp > 1
    # as `moved` in costs/offload: masters move on a CPU alone, unless they are shards (zero=3) or their owner's
    masters = on_host and not layout.sharded.weights and not (model.update.whole and spread)
    lies = terms["optimizer"] + (terms["master"] if masters else 0.0)
    each = states.optimizer + (states.master if masters else 0)
    share = layout.shard_ranks if layout.sharded.state else 1
    largest = max(model.small.in_order.values(), default=0) * each / share
    # beside weights or with gradients as made, several sub-groups' weights are on their way at once
    beside = placements(layout.offload, "parameters") or layout.gradients == "as_made"
    weights = states.held if beside else 0.0
    return {
        "optimizer": terms["optimizer"] * (1 - gone),
        "master": terms["master"] * (1 - gone if masters else 1),
        "state on its way to the disk": (
            # on an accelerator these buffers lie in the host's memory, which costs/offload counts
            staged(layout, lies * fractions["disk"], largest, each / (each + weights)) if on_host and each else 0.0
        ),
    }


def _weights_elsewhere(trace: StepTrace, layout: Layout, states: States, terms: dict[str, float]) -> dict[str, float]:
    """Returns the terms, in bytes, that change where shards of weights lie on a disk or the host between gathers."""
    largest = max([*trace.units, trace.rest], default=0) / layout.shard_ranks * states.held
    if weights_on_host(layout.offload):
        waits = layout.replicas > 1 and layout.n_micro * layout.rounds > 1  # for the sum over replicas
        lies = dict.fromkeys(("weights", "master", "optimizer", "whole weights of the optimizer"), 0.0)
        on_way = {"weights on their way from the host": brought(layout, terms["master"] or terms["weights"], largest)}
        return lies | on_way | {"gradients": terms["gradients"] if waits else 0.0}
    fraction = in_tier(layout.offload, "parameters", "disk")
    if not fraction:
        return {}
    name = "master" if states.master else "weights"
    return {
        name: terms[name] * (1 - fraction),
        "weights on their way from the disk": brought(layout, terms[name], largest),
    }


@dataclass(frozen=True)
class _Owned:
    """Counts of elements on a rank whose optimizer needs whole tensors, of the weights that it owns and updates.

    updated   of all of these; copied: of those held whole beside the rank's own pieces
    over_dp   collected over dp_shard, a share of tp counted as a whole; over_tp: (sent, collected) over tp
    """

    updated: int
    copied: int
    over_dp: int
    over_tp: tuple[int, int]

    @property
    def exchanged(self) -> int:
        """Returns the elements alive in the last exchange: gathered over dp_shard, sent over tp, received, joined."""
        sent, collected = self.over_tp
        return self.over_dp + sent + 2 * collected


def _owned(model: Model, layout: Layout, shard_rank: int | None) -> _Owned | None:
    """Returns the `_Owned` of the fullest rank, or of the one with this shard; None where ranks update their pieces."""
    # without shards and cuts every rank has whole tensors anyway, and updates all of them
    if not model.update.whole or not (layout.sharded.state or layout.tp > 1):
        return None
    over = layout.shard_ranks if layout.sharded.state else 1
    held, wholes = [*model.small.in_order.items()], model.small.wholes
    sizes = [wholes.get(place, size) for place, size in held]
    owner_of = choose_owners(sizes, over)
    cut = {index: sizes[index] for index, (place, _) in enumerate(held) if place in wholes}
    share_owner_of = share_owners(cut, owner_of, layout.tp)
    ranks = []
    # owners are chosen by size, so ranks differ: the fullest one decides whether the plan fits
    for shard in range(over) if shard_rank is None or over == 1 else [shard_rank]:
        mine = [index for index, owner in enumerate(owner_of) if owner == shard]
        uncut = sum(sizes[index] for index in mine if index not in cut)
        shares = sum(held[index][1] for index in mine if index in cut)
        for place in range(layout.tp):
            own = sum(size for index, size in cut.items() if index in mine and share_owner_of[index] == place)
            beside = uncut if over > 1 else 0
            of_dp = beside + shares if over > 1 else 0
            ranks.append(_Owned(uncut + own, own + beside, of_dp, (shares, own)))
    return max(ranks, key=lambda owned: owned.updated)


def _gradients(trace: StepTrace, layout: Layout, states: States, rest: float, of_experts: float) -> float:
    """Returns the bytes of gradients kept between micro-batches: as a rehearsal counted them, else whole buckets."""
    if layout.gradients == "as_made":
        return 0.0
    shared = layout.sharded.gradients and of_experts < 1
    if trace.shard_gradient_bytes:
        return trace.shard_gradient_bytes + (0 if shared else trace.experts * states.gradient)
    return (rest + trace.experts * (of_experts if shared else 1.0)) * states.gradient


def _cut(trace: StepTrace, ranks: int, rank: int) -> int:
    """Returns the elements that a rank of zero=3 updates: its rows of each weight, padding left out."""
    updated = 0
    for (rows, elements), times in trace.rows.items():
        shard_rows = -(-rows // ranks)
        updated += times * elements * max(0, min(shard_rows, rows - rank * shard_rows))
    return updated


def _peaks(
    model: Model, layout: Layout, states: States, updated: float, reduced: float, owned: _Owned | None
) -> dict[str, float]:
    """Returns {transient of a step: bytes}; no two are alive at once, so the largest makes the peak.

    updated, reduced   elements that the optimizer updates here, and whose gradients are summed over dp_shard
    owned              what it updates whole, if it does
    """
    here = model.batch_on_device  # a CPU, where an optimizer goes from tensor to tensor and gloo reduces a copy
    temporaries = _temporaries(model, layout, states, updated if owned is None else owned.updated)
    over = layout.shard_ranks if layout.sharded.state and owned is None else 1
    largest = max(model.small.in_order.values(), default=0) / over
    if owned is not None:  # whole gradients, beside what is sent and received, and beside the update
        temporaries = max(owned.copied + temporaries, 2 * owned.over_dp + updated, owned.exchanged)
    out = {"micro-batch": model.peak(layout.micro_batch)}
    # the update runs on the host, in whose memory its temporaries lie
    if weights_on_host(layout.offload):
        return out
    if model.small.arrived:
        out["micro-batch, and weights updated in it"] = _updated_within(model, layout, states)
    out |= {
        "optimizer's temporaries": (
            temporaries * (states.master or states.weight)
            + updated * states.copies
            + decoded(states, layout, updated, largest, model.update.coded)
        ),
    }
    if here and layout.sharded.state and not layout.sharded.gradients:
        out["reduction in flight"] = reduced * states.gradient  # gloo keeps every copy until all are waited for
    return out


def _updated_within(model: Model, layout: Layout, states: States) -> float:
    """Returns the most live bytes of a micro-batch, with buckets of gradients and the updates that free them."""
    trace, sizes = model.small, [model.small.in_order[place] for place in sorted(model.small.in_order)]
    width, ranks = int(states.gradient), layout.shard_ranks if layout.sharded.state else 1
    summing = ranks * layout.replicas
    buckets = lay_out(sizes, most_elements(width, summing), ranks, FIRST_BUCKET_BYTES // width)
    bucket_of = {entry.index: number for number, bucket in enumerate(buckets) for entry in bucket.entries}
    lives = [model.linear(few, many, layout.micro_batch)
             for (_, few), (_, many) in zip(trace.arrived, model.large.arrived, strict=True)]  # fmt: skip
    waits = [len(bucket.entries) for bucket in buckets]
    held: dict[int, int] = {}
    sent, top = 0, 0.0
    for (place, _), live in zip(trace.arrived, lives, strict=True):
        number = bucket_of[place]
        held[number] = buckets[number].size * width
        waits[number] -= 1
        top = max(top, live + sum(held.values()))
        while sent < len(buckets) and not waits[sent]:
            sent += 1
            if ranks > 1 and model.batch_on_device:  # a CPU, where gloo reduces copies of the two on their way
                copies = sum(bucket.size for bucket in buckets[max(0, sent - 2) : sent]) * width
                top = max(top, live - sizes[place] * states.weight + sum(held.values()) + copies)
            done = sent - 1 if summing == 1 else sent - 2  # the last one is still on its way
            if done >= 0:
                largest = max(sizes[entry.index] for entry in buckets[done].entries) / ranks
                update = model.update.temporary * largest * (states.master or states.weight)
                top = max(top, live - sizes[place] * states.weight + sum(held.values()) + update)
                del held[done]
    return top


def _temporaries(model: Model, layout: Layout, states: States, updated: float) -> float:
    """Returns the most elements that live only while the optimizer runs: of all tensors, on a CPU of one at a time.

    There the one before leaves some behind.
    """
    update = model.update
    if not model.batch_on_device:  # an accelerator, where an optimizer updates all tensors in one call
        return update.temporary * updated
    # sizes may be bounds from above: two tensors together are no more than all that is updated
    elements = (
        update.temporary * size + update.left * min(before, updated - size)
        for sizes in _updated_sizes(model.small, layout, states, updated)
        for before, size in zip([0.0, *sizes], sizes, strict=False)
    )
    return max(elements, default=0.0)


def _updated_sizes(trace: StepTrace, layout: Layout, states: States, updated: float) -> list[list[float]]:
    """Returns, for each rank that differs, the elements of each tensor that its optimizer updates, in its order.

    Under ZeRO 1 and 2 a rank has pieces, by the borders of its shards of the buckets.
    """
    ranks = layout.shard_ranks
    if not layout.sharded.flat or trace.experts:  # experts lie in buckets of their own: whole tensors are a bound
        share = ranks if layout.sharded.weights else 1
        return [[min(size / share, updated) for size in trace.in_order.values()]]
    width, sizes = int(states.gradient), [trace.in_order[place] for place in sorted(trace.in_order)]
    buckets = lay_out(sizes, most_elements(width, ranks * layout.replicas), ranks, FIRST_BUCKET_BYTES // width)
    by_rank = []
    for rank in range(ranks):
        pieces = Counter[int]()
        for bucket in buckets:
            pieces.update({entry.index: last - first for entry, first, last in bucket.pieces(ranks, rank)})
        by_rank.append([float(pieces[index]) for index in trace.in_order if index in pieces])
    return by_rank
