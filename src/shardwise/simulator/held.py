"""`memory`: bytes on one rank of a traced module, at rest and at the peak. Of a decoder: costs/memory.

    at rest   weights, gradients, optimizer state by dtype policy, each divided by the ranks that shard it; buffers;
              the batch
    peak      the largest transient, of which no two are alive at once: a micro-batch, the optimizer's temporaries, a
              reduction in flight

Under zero=3, and zero=2 with a pipeline, the rehearsed micro-batch includes the technique's own tensors
(rehearsal/fully_sharded.py), so its peak contains gathered weights, buffers, and gradients made by then.
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

IN_FLIGHT_BYTES = 2 * BUCKET_BYTES  # most bytes of gradients in reductions at a time: two buckets (comm/buckets.py)


def policy(precision: str, state_elements: float, layout: Layout) -> States:
    """Returns the bytes per parameter under a precision.

    precision       a plan's; `state_elements`: elements of optimizer state per parameter

    Replicas and ZeRO 1 and 2 sum gradients in buckets of the dtype in which they are sent, and copy them for the
    optimizer if the masters have another dtype. FSDP2's gradient shards have the masters' dtype.
    """
    chosen = Precision.of(Plan(precision=precision, reduce_dtype=layout.reduce_dtype))
    master, sent = chosen.master.itemsize, chosen.reduce.itemsize
    # FSDP2 (zero=3) has no buckets of its own dtype
    in_buckets = not layout.sharded.weights
    return States(
        precision, chosen.compute.itemsize, sent if in_buckets else master, master if chosen.mixed else 0,
        state_elements * master, master if in_buckets and sent != master else 0, sent,
    )  # fmt: skip


def memory(
    model: Model, layout: Layout, precision: str, samples: int | None = None, shard_rank: int | None = None
) -> MemoryLedger:  # fmt: skip
    """Returns the memory of one rank by term: what rests between steps, and the peak within a step.

    samples     samples of the global batch, which CPU ranks hold; None: the layout's
    shard_rank  index among the ranks over which zero shards, if these do not divide a weight; None: the fullest rank
    """
    trace, states = model.small, policy(precision, model.update.state_elements, layout)
    stage, share = layout.sharded, 1.0 / layout.shard_ranks
    of_experts = 1.0 / max(1, layout.shard_ranks // layout.ep)  # sharded over ranks with the same experts
    rest = sum(size * count for size, count in trace.sizes.items()) - trace.experts
    # zero=3 pads weights to equal shards; padding takes memory but is not updated
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
    reduced = rest + (trace.experts if of_experts < 1 else 0)  # experts that only one rank holds are not
    peaks = _peaks(model, layout, states, updated + experts, reduced, owned)
    top = max(peaks, key=lambda name: peaks[name])
    terms[top] = peaks[top]
    # CPU ranks hold the global batch, an accelerator one micro-batch; if positions are cut, the trace has counted it
    if model.batch_bytes and (model.batch_on_device or layout.cut_positions == 1):
        samples_here = (samples or layout.global_batch) if model.batch_on_device else layout.micro_batch
        terms["global batch" if model.batch_on_device else "inputs"] = model.batch_bytes * samples_here
    if stage.flat and stage.gradients and not trace.shard_gradient_bytes and layout.gradients == "together":
        # unsharded gradients of the buckets in flight; of a single micro-batch this rank's part is the shard itself
        new = 1.0 if layout.n_micro > 1 else 1.0 - share
        terms["gradients in flight"] = min(rest * states.gradient, IN_FLIGHT_BYTES) * new
    return MemoryLedger({k: v for k, v in terms.items() if v}, top)


def _offloaded(model: Model, layout: Layout, states: States, terms: dict[str, float]) -> dict[str, float]:
    """Returns {term: bytes} for the terms that offloaded optimizer state changes or adds; {} without.

    states  bytes per parameter at rest; `terms`: the ledger so far
    """
    # with weights on the host all state lies there too, which `_weights_elsewhere` handles
    if layout.offload == "none" or weights_on_host(layout.offload):
        return {}
    on_host = model.batch_on_device
    fractions = {tier: in_tier(layout.offload, "optimizer", tier) for tier in TIERS}
    gone = sum(fractions.values())
    spread = layout.sharded.state or layout.tp > 1
    # as in `costs/offload.moved`: masters move only on a CPU, unless they are shards of zero=3 or have one owner
    masters = on_host and not layout.sharded.weights and not (model.update.whole and spread)
    lies = terms["optimizer"] + (terms["master"] if masters else 0.0)
    each = states.optimizer + (states.master if masters else 0)
    share = layout.shard_ranks if layout.sharded.state else 1
    largest = max(model.small.in_order.values(), default=0) * each / share
    # if weights are offloaded too, or used as gradients are made, a sub-group in the buffers has its weights with it
    beside = placements(layout.offload, "parameters") or layout.gradients == "as_made"
    weights = states.held if beside else 0.0
    return {
        "optimizer": terms["optimizer"] * (1 - gone),
        "master": terms["master"] * (1 - gone if masters else 1),
        "state on its way to the disk": (
            # on an accelerator these buffers are in the host's memory, which costs/offload counts
            staged(layout, lies * fractions["disk"], largest, each / (each + weights)) if on_host and each else 0.0
        ),
    }


def _weights_elsewhere(trace: StepTrace, layout: Layout, states: States, terms: dict[str, float]) -> dict[str, float]:
    """Returns {term: bytes} for the terms that weights on a disk or the host change or add; {} without."""
    largest = max([*trace.units, trace.rest], default=0) / layout.shard_ranks * states.held
    if weights_on_host(layout.offload):
        waits = layout.replicas > 1 and layout.n_micro * layout.rounds > 1  # gradients wait for the sum over replicas
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
    """Elements of the weights that a rank owns, if the optimizer needs unsharded tensors.

    updated   elements of all weights that it owns and updates
    copied    of these, elements held unsharded in addition to the rank's own shards
    over_dp   elements collected over dp_shard (shards of tp counted as they are)
    over_tp   (elements sent, elements collected) over tp
    """

    updated: int
    copied: int
    over_dp: int
    over_tp: tuple[int, int]

    @property
    def exchanged(self) -> int:
        """Returns the elements alive in the last exchange: from dp_shard, sent over tp, received, concatenated."""
        sent, collected = self.over_tp
        return self.over_dp + sent + 2 * collected


def _owned(model: Model, layout: Layout, shard_rank: int | None) -> _Owned | None:
    """Returns the `_Owned` of the fullest rank, or of rank `shard_rank`; None if the optimizer updates shards.

    None, too, if nothing is sharded, since every rank then has and updates unsharded tensors.
    """
    if not model.update.whole or not (layout.sharded.state or layout.tp > 1):
        return None
    over = layout.shard_ranks if layout.sharded.state else 1
    held, wholes = [*model.small.in_order.items()], model.small.wholes
    sizes = [wholes.get(place, size) for place, size in held]
    owner_of = choose_owners(sizes, over)
    cut = {index: sizes[index] for index, (place, _) in enumerate(held) if place in wholes}
    share_owner_of = share_owners(cut, owner_of, layout.tp)
    ranks = []
    # owners are chosen by size, so ranks differ, and the fullest one decides whether the plan fits
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
    """Returns the bytes of gradients kept between micro-batches, as a rehearsal counted them, else of full buckets.

    rest        elements of gradients without experts'; `of_experts`: 1 / ranks that hold the same experts
    """
    if layout.gradients == "as_made":
        return 0.0
    shared = layout.sharded.gradients and of_experts < 1
    if trace.shard_gradient_bytes:
        return trace.shard_gradient_bytes + (0 if shared else trace.experts * states.gradient)
    return (rest + trace.experts * (of_experts if shared else 1.0)) * states.gradient


def _cut(trace: StepTrace, ranks: int, rank: int) -> int:
    """Returns the elements that rank `rank` of `ranks` updates under zero=3, without padding."""
    updated = 0
    for (rows, elements), times in trace.rows.items():
        shard_rows = -(-rows // ranks)
        updated += times * elements * max(0, min(shard_rows, rows - rank * shard_rows))
    return updated


def _peaks(
    model: Model, layout: Layout, states: States, updated: float, reduced: float, owned: _Owned | None
) -> dict[str, float]:
    """Returns {transient of a step: bytes}, of which no two are alive at once.

    updated   elements that the optimizer updates on this rank
    reduced   elements whose gradients are summed over dp_shard
    owned     the unsharded weights that this rank owns; None if the optimizer updates shards
    """
    here = model.batch_on_device  # on a CPU gloo reduces a copy
    temporaries = _temporaries(model, layout, states, updated if owned is None else owned.updated)
    over = layout.shard_ranks if layout.sharded.state and owned is None else 1
    largest = max(model.small.in_order.values(), default=0) / over
    # the largest of: unsharded copies during the update, gradients on their way over dp_shard, the last exchange
    if owned is not None:
        temporaries = max(owned.copied + temporaries, 2 * owned.over_dp + updated, owned.exchanged)
    out = {"micro-batch": model.peak(layout.micro_batch)}
    # the host runs the update, so its temporaries are in the host's memory
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
        out["reduction in flight"] = reduced * states.gradient  # gloo keeps every copy until the last wait
    return out


def _updated_within(model: Model, layout: Layout, states: States) -> float:
    """Returns the peak live bytes of a micro-batch with gradients="as_made", buckets and updates included."""
    # gradients arrive in the order of the trace; a bucket lives from its first gradient until its update
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
            if ranks > 1 and model.batch_on_device:  # on a CPU gloo reduces copies, of two buckets at a time
                copies = sum(bucket.size for bucket in buckets[max(0, sent - 2) : sent]) * width
                top = max(top, live - sizes[place] * states.weight + sum(held.values()) + copies)
            done = sent - 1 if summing == 1 else sent - 2  # the last one is still being reduced
            if done >= 0:
                largest = max(sizes[entry.index] for entry in buckets[done].entries) / ranks
                update = model.update.temporary * largest * (states.master or states.weight)
                top = max(top, live - sizes[place] * states.weight + sum(held.values()) + update)
                del held[done]
    return top


def _temporaries(model: Model, layout: Layout, states: States, updated: float) -> float:
    """Returns the peak elements of the optimizer's temporaries; `updated`: elements that this rank updates.

    An accelerator updates all tensors at once. A CPU updates one at a time, while some temporaries of the tensor before
    are still alive.
    """
    update = model.update
    if not model.batch_on_device:  # an accelerator, where an optimizer updates all tensors in one call
        return update.temporary * updated
    # sizes may be upper bounds, so two tensors together are limited to all that is updated
    elements = (
        update.temporary * size + update.left * min(before, updated - size)
        for sizes in _updated_sizes(model.small, layout, states, updated)
        for before, size in zip([0.0, *sizes], sizes, strict=False)
    )
    return max(elements, default=0.0)


def _updated_sizes(trace: StepTrace, layout: Layout, states: States, updated: float) -> list[list[float]]:
    """Returns for each rank that differs the elements of each tensor that its optimizer updates, in its order.

    Under ZeRO 1 and 2 a rank updates pieces of parameters, as its shards of the buckets cut them.
    """
    ranks = layout.shard_ranks
    if not layout.sharded.flat or trace.experts:  # experts have buckets of their own: an upper bound
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
