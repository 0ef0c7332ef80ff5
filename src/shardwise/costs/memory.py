"""Bytes on one rank of a decoder given by its sizes, term by term. Of a traced module: simulator/held.

    states        weights, gradients, master weights, optimizer state, each divided by the ranks that shard it
    activations   of a layer, for the T tokens of a micro-batch, tp degree t, and s = t with sp, else s = 1:
                  norm inputs and outputs 2h each /s, q k v and attention's output /t, feed-forward /t
                  times layers of the stage x micro-batches in flight, by the schedule
    peak          bytes alive when the loss is made, or in one layer's backward, whichever is larger

Sources: Rajbhandari et al. 2020 (section 3 and 5), Korthikanti et al. 2022 (section 4). Bytes are allocated ones;
`reserved` adds what the caching allocator holds besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.costs.coded_state import decoded, resting
from shardwise.costs.layout import Layout
from shardwise.costs.rings import ACT_BYTES, merged_block
from shardwise.costs.shapes import Shape
from shardwise.costs.software import STATES, Software, whole_gradients, whole_in_pipeline
from shardwise.layout.offload import TIERS, in_tier, weights_on_host

RESERVED_SHARE = 1.03  # what the caching allocator holds over what is allocated (assumed; 2 to 6% in SimuMax's runs)
CONTEXT_BYTES = 0.7e9  # the driver's context and NCCL's buffers, outside the allocator (assumed)
COPIES = "copies for the optimizer"  # copies of gradients, and decoded state
WEIGHTS_ALONE = "weights alone"  # the `peak` of a ledger in which only weights were counted


@dataclass(frozen=True)
class MemoryLedger:
    """The memory of one rank: `terms` {name: bytes}, and `peak`, the name of the largest transient among them."""

    terms: dict[str, float]
    peak: str = ""

    @property
    def allocated(self) -> float:
        return sum(self.terms.values())

    @property
    def reserved(self) -> float:
        return self.allocated * RESERVED_SHARE


def stage_parameters(
    shape: Shape, layout: Layout, layers: float, *, first: bool, last: bool, dense: float = 0.0
) -> dict[str, float]:
    """Returns {"dense": parameters, "experts": parameters} of a stage on one rank of tp and ep, before ZeRO shards.

    layers  layers of the stage, of which the first `dense` have no experts in a model that has experts
    first, last  whether the stage has the embedding, the head
    """
    t = layout.tp
    s = shape
    if last and s.ahead:  # layers that predict further tokens come after the last layer
        parameters = stage_parameters(s.with_(ahead=0), layout, layers + s.ahead, first=first, last=last, dense=dense)
        return parameters | {"dense": parameters["dense"] + s.ahead * s.joined_parameters / t}
    if dense:
        rest = stage_parameters(s, layout, layers - dense, first=first, last=last)
        front = stage_parameters(s.in_front, layout, dense, first=False, last=False)
        return {kind: rest[kind] + front[kind] for kind in rest}
    attention = s.attention_share(t) + s.norms * s.norm_parameters
    # with ep a rank has unsharded experts; otherwise tp shards each of them
    if s.experts:
        local = s.experts / layout.ep
        expert_tp = 1 if layout.ep > 1 else t
        experts = local * s.expert_parameters / expert_tp
        per_layer = attention + s.router_parameters + s.shared_experts * s.expert_parameters / t
    else:
        experts, per_layer = 0.0, attention + s.expert_parameters / t
    total = layers * per_layer
    if first:
        total += s.vocab * s.hidden / t + s.learned_positions * s.hidden
    if last:
        total += s.norm_parameters
        if s.head_parameters or (s.tied and not first):  # a tied head on another stage is a second copy
            total += s.vocab * s.hidden / t
    return {"dense": total, "experts": layers * experts}


def states(parameters: dict[str, float], layout: Layout, software: Software, precision: str = "") -> dict[str, float]:
    """Returns {"weights", "gradients", "master", "optimizer", `COPIES`: bytes} on one rank's device.

    COPIES are gradients' copies, which live only while the optimizer runs. Experts are sharded over the data ranks
    that hold the same ones. Offloaded state counts 0.

    parameters  as `stage_parameters` returns them
    precision   a key of `STATES`; "": the software's
    """
    policy, stage = resting(STATES[precision or software.states], layout), layout.sharded
    out = dict.fromkeys(("weights", "gradients", "master", "optimizer", COPIES), 0.0)
    for kind, count in parameters.items():
        ranks = float(layout.shard_ranks) if stage.state else 1.0
        if kind == "experts" and layout.ep > 1:
            ranks = max(1.0, ranks * layout.tp / layout.ep)
        share = 1.0 / ranks
        out["weights"] += count * policy.weight * (share if stage.weights else 1.0)
        out["gradients"] += count * policy.gradient * (share if stage.gradients else 1.0)
        out[COPIES] += count * policy.copies * share
        out["master"] += count * policy.master * (share if stage.state else 1.0)
        out["optimizer"] += count * policy.optimizer * (share if stage.state else 1.0)
        # a stage's weights are gathered once in a step, in two bytes an element, and stay gathered
        if whole_in_pipeline(software, layout):
            out["weights"] += count * 2.0 if stage.weights else 0.0
        if whole_gradients(software, layout):  # unsharded gradients live until they are reduced
            out["gradients"] += count * (software.grad_reduce_bytes - policy.gradient * share)
        if stage.weights and policy.master > policy.weight:
            out["weights"] -= count * policy.weight * share  # between steps FSDP keeps only the masters
    # all states are on the host, but gradient sums stay until they are reduced over the replicas
    if weights_on_host(layout.offload):
        waits = layout.replicas > 1 and layout.n_micro * layout.rounds > 1
        return dict.fromkeys(out, 0.0) | {"gradients": out["gradients"] if waits else 0.0}
    # masters stay on an accelerator, since the gradients are there
    out["optimizer"] *= 1.0 - sum(in_tier(layout.offload, "optimizer", tier) for tier in TIERS)
    return out


def layer_activations(shape: Shape, layout: Layout, software: Software) -> dict[str, float]:
    """Returns {tensor: bytes} that one layer keeps for its backward, for one micro-batch on one rank."""
    s, lay = shape, layout
    tokens, t = lay.tokens, lay.tp
    stream = tokens * s.hidden * ACT_BYTES / (t if lay.sp else 1)
    if lay.recompute == "full":
        parts = software.in_parts and not s.experts
        return {"layer input": stream} | ({"inputs of its parts": (1 + s.norms) * stream} if parts else {})
    kv = max(s.kv_width / t, s.kv_width / s.kv_heads)
    out = {
        "norm inputs": (1 if s.parallel else 2) * stream,
        "norm outputs": s.norms * stream,
        "q k v": tokens * (s.query_width / t + kv) * ACT_BYTES,
        "attention output": tokens * s.output_width / t * ACT_BYTES,
    }
    # keys and values are copied for each query head, and without recompute the copies are kept
    if software.repeats_keys and lay.recompute == "none":
        out["q k v"] = tokens * (2 * s.query_width + s.output_width) / t * ACT_BYTES
    if s.kv_latent:  # latents before and after their norm
        out["latents"] = tokens * (2 * s.q_latent + 2 * s.kv_latent + s.rope_dim) * ACT_BYTES
    if software.attention == "unfused":
        # selective recompute drops the scores
        if lay.recompute != "selective":
            scores = lay.micro_batch * s.heads_of(t) * (lay.seq / lay.cp) * lay.seq
            out["scores"] = scores * ((2 * ACT_BYTES + 1) if s.dropout else ACT_BYTES)
    else:
        out["softmax statistics"] = tokens * s.heads_of(t) * 4
    if s.dropout:
        out["dropout masks"] = 2 * tokens * s.hidden / (t if lay.sp else 1)
    out |= _feed_forward(shape, layout, software)
    written = not (software.fused or s.layer_norm)
    # an RMSNorm op by op keeps its input in float32 (4 bytes), and the normed value in bf16 (2): 3 times bf16
    if written:
        out["norm inputs"] *= 3
    if written and s.qk_norm:
        out["norms of heads"] = 3 * tokens * (s.query_width + s.kv_heads * s.head_dim) / t * ACT_BYTES
    if software.fp8:  # inputs of products are kept in FP8; attention keeps its output in bf16 too
        out["norm outputs"] *= software.bits / 16
        out["activation"] *= software.bits / 16
        if lay.recompute != "selective" or software.selective in (
            "attention",
            "latents",
            "activations",
            "experts",
        ):  # else it is cast again
            out["attention output"] *= 1 + software.bits / 16
    if lay.recompute == "selective" and software.attention != "unfused":
        _drop_what_is_computed_again(out, s, lay, software, stream)
    return out


def _drop_what_is_computed_again(
    out: dict[str, float], s: Shape, lay: Layout, software: Software, stream: float
) -> None:
    """Removes from `out`, {tensor: bytes} of a layer, what `software.selective` computes again in backward.

    stream  bytes of the layer's input on this rank
    """
    if software.selective == "attention":
        out.pop("softmax statistics", None)
        return
    # queries, keys and values are recomputed from the latents
    if software.selective == "latents":
        out["q k v"] *= 0.0 if s.kv_latent else 1.0
        return
    out["norm outputs"] = out["activation"] = 0.0
    if software.selective == "activations":
        return
    if software.selective == "experts":
        for name in ("up and gate", "routed tokens", "router"):
            out.pop(name, None)
        return
    out.pop("norms of heads", None)
    if software.selective == "products":  # of q, k, v, o, gate, up, down it keeps q, v, gate and down
        keys = lay.tokens * max(s.kv_heads / lay.tp, 1) * s.head_dim * ACT_BYTES
        out["q k v"] -= keys
        out["up and gate"] /= 2 if s.gated else 1
        out["norm inputs"] = (1 + s.gated) * stream
    elif not software.fused:  # kept: the layer's input, two products' outputs
        out["norm inputs"] = 3 * stream


def _feed_forward(shape: Shape, layout: Layout, software: Software) -> dict[str, float]:
    """Returns {tensor: bytes} that one layer's feed-forward, or its experts, keeps for backward on one rank."""
    s, lay = shape, layout
    copies = s.top_k + s.shared_experts if s.experts else 1
    inner = lay.tokens * s.ffn / lay.tp * ACT_BYTES * copies
    kept = 2 if s.gated and not software.fused else 1  # unfused: the gate's activation, and the gated product
    out = {"up and gate": inner * (2 if s.gated else 1), "activation": kept * inner}
    if s.experts:
        out["routed tokens"] = lay.tokens * s.top_k * s.hidden * ACT_BYTES / (lay.tp if lay.sp else 1)
        out["router"] = lay.tokens * s.experts * 4 * 2
    return out


def logits(shape: Shape, layout: Layout, software: Software) -> float:
    """Returns the peak bytes at the output matrix on one rank.

    That is the larger of the logits during the loss, and the logits' gradient together with the matrix's gradient,
    which is made in float32 before it is added to its buffer.
    """
    count = layout.tokens * shape.vocab / layout.tp
    gathered = layout.tokens * shape.hidden * ACT_BYTES if layout.sp and layout.tp > 1 else 0.0
    matrix = shape.vocab * shape.hidden / layout.tp * 4
    each = (software.cut_logit_bytes if layout.tp > 1 else 0.0) or software.logit_peak_bytes
    return max(count * each, count * ACT_BYTES + matrix) + gathered


def rank_memory(
    shape: Shape, layout: Layout, software: Software, *, layers: float, first: bool, last: bool, in_flight: float,
    precision: str = "", dense: float = 0.0,
) -> MemoryLedger:  # fmt: skip
    """Returns the memory of one rank of a stage.

    layers, dense, first, last  as in `stage_parameters`
    in_flight  micro-batches whose activations of the whole stage live at a time (a fraction counts parts of the stage)
    precision  a key of `STATES`; "": the software's
    """
    parameters = stage_parameters(shape, layout, layers, first=first, last=last, dense=dense)
    terms = states(parameters, layout, software, precision)
    full = STATES[precision or software.states]
    over = layout.shard_ranks if layout.sharded.state else 1
    largest = max(shape.vocab * (first or last), shape.ffn) * shape.hidden / layout.tp / over
    as_made = software.in_backward or layout.gradients == "as_made"
    # with one micro-batch each gradient is used and freed as it comes, so only the largest one lives
    if as_made and layout.n_micro * layout.rounds == 1:
        terms["gradients"] = min(terms["gradients"], largest * full.gradient)
    copies = terms.pop(COPIES) + decoded(full, layout, sum(parameters.values()) / over, largest)
    like_all = layers - dense + (shape.ahead if last else 0)
    kept = _of_layer(shape, layout, software)[0] * like_all
    if dense:
        kept += _of_layer(shape.in_front, layout, software)[0] * dense
    passing = {"activations": kept * in_flight}
    stream = layout.tokens * shape.hidden * ACT_BYTES / (layout.tp if layout.sp else 1)
    if first:
        # under full recompute it is the first layer's kept input, which is counted already
        passing["embedding output"] = 0.0 if layout.recompute == "full" else stream * in_flight
        # a dropout mask has one byte an element, the stream two
        if shape.dropout:
            passing["embedding output"] += stream / 2 * in_flight
    if last:
        passing["head input"] = 2 * stream * min(in_flight, 1.0)
    # FP8 copies of the layers' matrices, by rows and by columns; of ZeRO-3's gathered ones two layers at a time
    if software.fp8:
        cast = min(layers, 2) if layout.sharded.weights else layers
        both = 2 * software.bits / 8
        terms[f"weights in FP{software.bits}"] = both * sum(
            stage_parameters(shape, layout, cast, first=False, last=False).values()
        )
    # the output matrix, and perhaps the embedding, are not freed between forward and backward
    if layout.sharded.weights and software.kept_gathered:
        ends = (last + (first and software.kept_gathered > 1)) if not shape.tied else max(first, last)
        terms["ends, gathered"] = ACT_BYTES * ends * shape.vocab * shape.hidden / layout.tp
    terms["workspaces"] = software.workspace_bytes
    terms["buffers"] = buffers(shape, layout, software, layers)
    sorts = ([shape] * (layers > dense) + [shape.in_front] * (dense > 0)) or [shape]
    peaks = {"one layer's backward": max(_of_layer(sort, layout, software)[1] for sort in sorts)}
    if last:
        peaks["logits"] = logits(shape, layout, software) - terms["buffers"]  # no layer is gathered then
    name = max(peaks, key=lambda key: peaks[key])
    # its peak was reduced by the buffers, which are not in use then, so their term is merged into it
    if name == "logits":
        peaks[name] += terms.pop("buffers")
    # with one micro-batch shards of gradients come while activations go, so the two do not add up at the peak
    if layout.sharded.weights and layout.n_micro * layout.rounds == 1:
        later = min(terms["gradients"], sum(passing.values()) + peaks[name] - peaks["one layer's backward"])
        of_peak = min(later, peaks[name])  # taken from two terms, so that neither is below zero
        peaks[name] -= of_peak
        passing["activations"] -= later - of_peak
    passing[f"peak: {name}"] = peaks[name]
    if copies > sum(passing.values()):  # they live after the last backward, so only the larger of the two counts
        name, passing = COPIES, {f"peak: {COPIES}": copies}
    terms |= passing
    return MemoryLedger({key: value for key, value in terms.items() if value}, name)


@lru_cache(maxsize=16)  # ranks of a layout differ by how many layers they have
def _of_layer(shape: Shape, layout: Layout, software: Software) -> tuple[float, float]:
    """Returns (bytes that one layer keeps for its backward, bytes that backward adds while it runs)."""
    return sum(layer_activations(shape, layout, software).values()), transient(shape, layout, software)


def transient(shape: Shape, layout: Layout, software: Software) -> float:
    """Returns the bytes that live only during one layer's backward.

    These are recomputed activations, the float32 gradient of its largest matrix before it is added to its buffer,
    gradients of the stream, and tensors of attention around a ring.
    """
    again = 0.0
    if layout.recompute != "none":
        again = sum(layer_activations(shape, layout.with_(recompute="none"), software).values())
    if layout.recompute == "selective":  # tensors that were kept are not recomputed
        again -= sum(layer_activations(shape, layout, software).values())
    matrix = (2 if shape.gated else 1) * shape.hidden * shape.ffn / layout.tp * 4
    stream = layout.tokens * shape.hidden * ACT_BYTES * max(1, shape.top_k)  # a token is copied for each of its experts
    block = 0.0
    # a ring "passed" or "merged" keeps sums of its own; an "even" one is one kernel
    if layout.cp > 1 and software.ring != "even":
        block = merged_block(shape, layout, software)
    return again + matrix + 2 * stream + block


def buffers(shape: Shape, layout: Layout, software: Software, layers: float) -> float:
    """Returns the bytes of ZeRO-3's buffers in a stage of `layers` layers; 0 unless ZeRO shards weights.

    These are two gathered layers (all layers, if forward frees none) and one layer's unsharded gradients.
    """
    if not layout.sharded.weights:
        return 0.0
    policy = STATES[software.states]
    largest = max(shape.layer_parameters, shape.embedding_parameters) / layout.tp
    whole = 2.0 if policy.weight == 2 or software.states == "fsdp-mixed" else policy.weight
    if whole_in_pipeline(software, layout):
        return largest * software.grad_reduce_bytes
    gathered = 2 if layout.sharded.gathers > 1 else max(2, layers)
    crossing = 0.0
    if weights_on_host(layout.offload) and layout.shard_ranks == 1:  # the next unit's, in the dtype of the host
        crossing = policy.master or policy.weight
    return largest * (gathered * whole + software.grad_reduce_bytes + crossing)
