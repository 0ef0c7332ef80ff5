"""Seconds and messages of a decoder's layer, embedding and head on one rank. Bytes held: costs/memory.

For T tokens on a rank, tensor degree t, width h:

    forward        q k v        (T, h) x (h, (q+2kv)/t)          backward       the same product for the input
                   attention    kernel, or scores written         (input)       and its attention
                   o            (T, q/t) x (q/t, h)               backward      (n/t, T) x (T, k), added into float32
                   up gate      (T, h) x (h, 2f/t)                (weight)
                   down         (T, f/t) x (f/t, h)
    between them   norms, rotary, activation, dropout, residuals: bytes over memory bandwidth

Messages of tensor, sequence, context and expert parallelism are returned beside the seconds, and the simulator decides
which of them overlap with compute. Sources: Korthikanti et al. 2022 (tensor and sequence), Liu et al. 2023
(ring), Jacobs et al. 2023 (Ulysses).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.cluster import Device
from shardwise.costs import expert_moves as moves
from shardwise.costs.fp8 import FP8
from shardwise.costs.host_seconds import HostSeconds, layer_host
from shardwise.costs.kernels import Kernels
from shardwise.costs.layout import Layout
from shardwise.costs.rings import ACT_BYTES, LAUNCHES, Message, merged_bytes, ring_messages
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software, handled_bytes

EAGER = 1.6  # an unfused chain of elementwise ops moves about this many times a fused one's bytes (assumed)
# Bytes moved for each bf16 element: (forward, backward) of fused kernels, (forward, backward) op by op as in modules of
# transformers, counted in their traces (tests/forecast/test_costs.py): there an RMSNorm is eight operations in float32
MOVED = {
    "layer_norm": ((4, 6), (4, 6)),
    "rms_norm": ((4, 6), (36, 96)),
    "residual": ((6, 6), (6, 6)),
    "dropout": ((1, 1), (5, 5)),
    "shared_input": ((0, 0), (0, 6)),  # for each further product that reads a tensor: its gradient is added
    "gated": ((6, 10), (10, 18)),
    "activation": ((4, 6), (4, 6)),
    "rotary": ((4, 4), (20, 32)),
    "repeated": ((2, 2), (2, 2)),  # copies of keys and values for each query head: written; summed
}
HOST_US = 10.0  # microseconds in which eager PyTorch starts an op on a GPU (assumed)
LAYER_OPS = (38, 71)  # ops that the host starts in a layer's (forward, backward): a trace of transformers' Llama
CASTS = (8, 4)  # further ops if products are in FP8: casts of (inputs and weights, gradients of outputs)


def host_seconds(device: Device, software: Software) -> float:
    """Returns the host's seconds to start one op of an eager module; 0 if the device is a CPU.

    The device runs behind the host, so many ops take at least this time each. Fused software starts fewer ops, which
    is counted as less time for each.
    """
    if device.kind == "cpu":
        return 0.0
    op_us = device.op_us.value if device.op_us is not None else HOST_US
    return 1e-6 * op_us / (EAGER if software.fused else 1.0)


@dataclass
class BlockTimes:
    """Seconds and messages of a layer, an embedding or a head for one micro-batch on one rank.

    host  seconds that the host takes to start the kernels
    """

    forward: float = 0.0
    backward_input: float = 0.0  # gradients of inputs
    backward_weight: float = 0.0  # gradients of weights
    recompute: float = 0.0  # the part of forward that runs again in backward
    attention_forward: float = 0.0  # contained in `forward`
    attention_backward: float = 0.0
    forward_messages: list[Message] = field(default_factory=list)
    backward_messages: list[Message] = field(default_factory=list)
    recompute_messages: list[Message] = field(default_factory=list)
    host: HostSeconds = field(default_factory=HostSeconds)

    @property
    def backward(self) -> float:
        return self.recompute + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class BlockCosts:
    """Computes the times of one layer of `shape` under `layout`, on `kernels`, as `software` runs it."""

    shape: Shape
    layout: Layout
    software: Software
    kernels: Kernels

    def layer(self) -> BlockTimes:
        """Returns the times of one layer on one micro-batch."""
        attention, products = self._attention(), self._products()
        kinds = self._norms(), self._feed_forward_stream(), self._casts(), self._reorders()
        streams = [sum(kind) for kind in zip(*kinds, strict=True)]
        # no layer is faster than the host starts its ops
        least = [ops * self.kernels.host_s for ops in self.started]
        forward = max(products[0] + attention[0] + streams[0], least[0])
        backward_input = max(products[1] + attention[1] + streams[1], least[1] - products[2])
        times = BlockTimes(forward, backward_input, products[2], 0.0, attention[0], attention[1])
        times.host = layer_host(self.shape, self.layout, self.software, self.kernels.device.name)
        times.forward_messages, times.backward_messages = self._messages()
        if self.layout.recompute == "full":
            times.recompute, times.recompute_messages = self._all_again(forward, times.forward_messages)
        elif self.layout.recompute == "selective":
            times.recompute = self._selected(attention, streams[0])
            if self.software.selective == "experts":
                times.recompute_messages = [m for m in times.forward_messages if m.axis == "ep"]
        return times

    def _all_again(self, forward: float, messages: list[Message]) -> tuple[float, list[Message]]:
        """Returns (seconds, messages) of the part of a layer that full recompute runs again.

        forward, messages  seconds and messages of the layer's complete forward
        """
        s, lay = self.shape, self.layout
        early = self.software.stops_early and not s.dropout  # dropout keeps a mask after the last product
        # all of forward runs again if the software does not stop early, or weighs rows after experts' last product
        if not early or (s.experts and not self.software.weighs_first):
            return forward, list(messages)
        again, product = list(messages), self.kernels.layer_product
        ends: list[tuple[float, float, float]]
        # recompute ends before the last product, so neither that product nor the message after it runs again
        if s.experts:
            rows, local, over = self._expert_rows()
            ends, sent = [(rows, s.hidden, s.ffn / over)] * round(local), [m for m in messages if m.axis == "ep"][:1]
        else:
            last = [(s.hidden, s.ffn / lay.tp), s.projections(lay.tp)[-1]][: 2 if self.software.in_parts else 1]
            ends = [(lay.tokens, *pair) for pair in last]
            sent = [m for m in messages if m.op in ("all_reduce", "reduce_scatter")][-len(ends) :]
        for message in sent:
            again.remove(message)
        return forward - sum(product(*end) for end in ends), again

    def _selected(self, attention: tuple[float, float, float], streams: float) -> float:
        """Returns seconds of what `software.selective` recomputes in a layer.

        attention  as `_attention` returns it
        streams    seconds of elementwise operations in forward
        """
        if self.software.selective == "attention":
            return attention[2]
        if self.software.selective == "latents":
            pairs = self.shape.projections(self.layout.tp)[len(self.shape.latents) : -1]
            products = (self.kernels.layer_product(self.layout.tokens, wide, deep) for wide, deep in pairs)
            return (sum(products) + self._rotary()[0]) if self.shape.kv_latent else 0.0
        if self.software.selective == "activations":
            return self._norms()[0] + self._activated()[0]
        if self.software.selective == "experts":
            product = self.kernels.layer_product
            forward = sum(n * product(rows, wide, deep) for rows, wide, deep, n, _ in self._feed_forward())
            return self._norms()[0] + self._feed_forward_stream()[0] + forward
        again = streams + attention[0] - attention[2]  # the rotary part of attention is elementwise
        if self.software.selective == "products":  # k, o and up of q, k, v, o, gate, up, down
            s, t, rows = self.shape, self.layout.tp, self.layout.tokens
            third = (s.ffn / t, s.hidden) if s.gated else (s.hidden, s.ffn / t)
            keys, out = (math.ceil(s.kv_heads / t) * s.head_dim, s.hidden), (s.hidden, s.heads_of(t) * s.value_width)
            times = max(1, s.top_k) + s.shared_experts if s.experts else 1
            each = ((keys, 1), (out, 1), (third, times))
            again += sum(self.kernels.layer_product(rows * n, wide, deep) for (wide, deep), n in each)
        return again

    @property
    def started(self) -> tuple[int, int]:
        """Returns the number of ops that the host starts in a layer's (forward, backward)."""
        more = CASTS if self.software.fp8 else (0, 0)
        return LAYER_OPS[0] + more[0], LAYER_OPS[1] + more[1]

    # --- products

    def _products(self) -> tuple[float, float, float]:
        """Returns seconds of a layer's matrix products: (forward, gradients of inputs, gradients of weights)."""
        tokens = self.layout.tokens
        out = [0.0, 0.0, 0.0]

        def add(rows: float, wide: float, deep: float, times: float = 1.0, shared: bool = True) -> None:
            out[0] += times * product(rows, wide, deep)
            out[1] += times * product(rows, deep, wide)
            out[2] += times * product(wide, deep, rows, accumulate=self.software.accumulates)
            out[2] += self._handled(times * wide * deep) if shared else 0.0

        product = self.kernels.layer_product
        for wide, deep in self.shape.projections(self.layout.tp):
            add(tokens, wide, deep)
        for rows, wide, deep, times, shared in self._feed_forward():
            add(rows, wide, deep, times, shared)
        return out[0], out[1], out[2]

    def _feed_forward(self) -> list[tuple[float, float, float, float, bool]]:
        """Returns the matrix products of the feed-forward, or of router and experts.
        Each is (rows, out features, in features, number of them, whether several data ranks have these weights)."""
        s, lay, t, tokens = self.shape, self.layout, self.layout.tp, self.layout.tokens
        up = (2 if s.gated else 1) * s.ffn
        if not s.experts:
            return [(tokens, up / t, s.hidden, 1, True), (tokens, s.hidden, s.ffn / t, 1, True)]
        rows, local, over = self._expert_rows()
        # weights of experts that no other data rank has are neither gathered nor reduced
        shared = lay.ep < lay.shard_ranks or not lay.sharded.weights
        found: list[tuple[float, float, float, float, bool]] = [(tokens, s.experts, s.hidden, 1, True)]
        found += [(rows, up / over, s.hidden, local, shared), (rows, s.hidden, s.ffn / over, local, shared)]
        if s.shared_experts:  # computed as one feed-forward as wide as all of them together
            beside = s.shared_experts / t
            found += [(tokens, beside * up, s.hidden, 1, True), (tokens, s.hidden, beside * s.ffn, 1, True)]
        return found

    def _expert_rows(self) -> tuple[float, float, int]:
        """Returns (tokens of each local expert under balanced load, experts on this rank, ranks that shard each)."""
        s, lay = self.shape, self.layout
        rows = lay.tokens * s.top_k * lay.ep / s.experts
        over = 1 if lay.ep > 1 else lay.tp
        return rows / lay.tp if lay.ep > 1 and lay.sp else rows, max(1.0, s.experts / lay.ep), over

    def _handled(self, weights: float) -> float:
        """Returns the seconds of gradient sums and ZeRO-3's copies for `weights` weights in a micro-batch."""
        return weights * handled_bytes(self.software, self.layout) / self.kernels.bandwidth

    # --- attention

    def _attention(self) -> tuple[float, float, float]:
        """Returns seconds of attention without its projections: (forward, backward, its part of the recompute)."""
        s, lay = self.shape, self.layout
        heads = s.heads_of(lay.tp * lay.ulysses)
        queries, keys = lay.seq / lay.cp, lay.seq
        if self.software.attention == "unfused":
            forward, backward = self._unfused(lay.micro_batch * heads, queries, keys)
            return forward, backward, forward
        rope = self._rotary()
        if self.merges:  # balanced causal work: each of cp blocks has the FLOPs of a causal block
            launches = (each * (int(lay.cp) - 1) for each in LAUNCHES[self.software.ring])
            joined = map(self._stream, merged_bytes(s, lay, self.software), launches)
            forward, backward = (
                lay.cp * self._fused(heads, queries, queries, backward=back) + more
                for back, more in zip((False, True), joined, strict=True)
            )
            return forward + rope[0], backward + rope[1], forward
        forward, backward = (self._fused(heads, queries, keys, backward=back) for back in (False, True))
        return forward + rope[0], backward + rope[1], forward

    def _fused(self, heads: float, queries: float, keys: float, *, backward: bool) -> float:
        """Returns seconds of a fused attention kernel, the mean over layers with and without a window."""
        s, lay = self.shape, self.layout
        wide = s.attention_width / s.heads

        def over(seen: float) -> float:
            args = (self.software.attention, lay.micro_batch, heads, queries, seen, wide)
            return self.kernels.attention(*args, backward=backward)

        if not (s.windowed and self.software.windows):
            return over(keys)
        share = s.windowed / s.layers
        return share * over(s.window_keys(keys)) + (1 - share) * over(keys)

    @property
    def merges(self) -> bool:
        """Whether attention runs around a ring of cp and merges its blocks' outputs by separate kernels."""
        return self.layout.cp > 1 and self.software.ring in LAUNCHES and self.kernels.device.kind != "cpu"

    def _unfused(self, rows: float, queries: float, keys: float) -> tuple[float, float]:
        """Returns seconds (forward, backward) of attention that writes its scores; `rows`: samples times heads."""
        scores = rows * queries * keys
        d = self.shape.attention_width / self.shape.heads
        into, out_of = self.kernels.batched(rows, queries, keys, d), self.kernels.batched(rows, queries, d, keys)
        written = scores * ACT_BYTES
        soft = self.kernels.stream(2 * written)  # scale, mask and softmax in one kernel
        drop = self.kernels.stream(2 * written + scores) if self.shape.dropout else 0.0
        return into + out_of + soft + drop, 2 * (into + out_of) + 1.5 * soft + drop

    # --- streams

    def _stream(self, size_bytes: float, kernels: int) -> float:
        return self.kernels.stream(size_bytes, kernels * (1 if self.software.fused else 2))

    def _moved(self, elements: Mapping[str, float]) -> tuple[float, float]:
        """Returns (bytes that forward moves, bytes of backward); `elements`: {kind of elementwise op: count}."""
        passes = {name: MOVED[name][0 if self.software.fused else 1] for name in elements}
        forward, backward = (sum(passes[name][way] * count for name, count in elements.items()) for way in (0, 1))
        return forward, backward

    def _norms(self) -> tuple[float, float]:
        """Returns seconds (forward, backward) of norms and of two residual additions, with dropout if any."""
        s, lay = self.shape, self.layout
        whole = lay.tokens / (lay.tp if lay.sp else 1) * s.hidden
        latent = lay.tokens * (s.q_latent + s.kv_latent)
        heads = lay.tokens * (s.query_width + s.kv_heads * s.head_dim) / lay.tp if s.qk_norm else 0.0
        norm = "layer_norm" if s.layer_norm else "rms_norm"
        forward, backward = self._moved({
            norm: s.norms * whole + latent + heads,
            "residual": 2 * whole,
            "dropout": 2 * whole if s.dropout else 0.0,
            # products that read one norm's output, less one: q, k, v; gate, up; all of them if one norm feeds both
            "shared_input": ((1 if s.kv_latent else 2) + s.gated + (s.norms == 1)) * whole,
        })  # fmt: skip
        more = 2 * (bool(latent) + bool(heads))
        return self._stream(forward, 4 + more), self._stream(backward, 6 + more)

    def _rotary(self) -> tuple[float, float]:
        """Returns seconds (forward, backward) of rotary embeddings, and of copying keys and values for query heads."""
        s, lay = self.shape, self.layout
        turned = 0.0 if s.learned_positions else s.query_width + s.kv_heads * s.head_dim
        copied = s.query_width + s.output_width if self.software.repeats_keys and s.kv_heads < s.heads else 0.0
        if not turned + copied:
            return 0.0, 0.0
        tokens = lay.tokens / lay.tp
        forward, backward = self._moved({"rotary": tokens * turned, "repeated": tokens * copied})
        return self._stream(forward, 2), self._stream(backward, 2)

    def _feed_forward_stream(self) -> tuple[float, float]:
        """Returns seconds (forward, backward) of the activation, and of copies of tokens for their experts and back."""
        s, lay, soft = self.shape, self.layout, self.software
        routed = moves.routed_bytes(s, lay, soft) * (1.0 if soft.fused else EAGER)
        more = zip(self._activated(), moves.bias_bytes(s, lay, soft), moves.routing_kernels(s, soft), strict=True)
        forward, backward = (first + self._stream(routed + size, count) for first, size, count in more)
        return forward, backward

    def _activated(self) -> tuple[float, float]:
        """Returns seconds (forward, backward) of the activation, and of clamping its inputs if the model does."""
        s, lay, soft = self.shape, self.layout, self.software
        copies = (0 if soft.joins_experts else max(1, s.top_k)) + s.shared_experts if s.experts else 1
        forward, backward = self._moved({"gated" if s.gated else "activation": lay.tokens * copies * s.ffn / lay.tp})
        clamped = moves.clamp_bytes(s, lay, soft)
        return self._stream(forward + clamped[0], 1), self._stream(backward + clamped[1], 2)

    def _reorders(self) -> tuple[float, float]:
        """Returns seconds (forward, backward) of copies before and after tp's collectives with sp; zeros without."""
        s, lay, soft = self.shape, self.layout, self.software
        whole = lay.tokens * s.hidden * ACT_BYTES
        if not (lay.sp and lay.tp > 1 and soft.reorders):
            return 0.0, 0.0
        # a reduce-scatter in pieces writes each rank's part of the sum by itself, then adds all of them
        if soft.overlap_tp and soft.dtensors:
            added = self._stream(2 * (1 + 1 / lay.tp) * whole, 2)
            return added, added
        # with one sample the gathered parts lie in order already
        if lay.micro_batch == 1:
            return 0.0, 0.0
        # gathers and scatters of two products; in backward also inputs gathered again for gradients of weights
        gathered, again = whole * soft.bits / 16, 0 if soft.dtensors else 2
        return (
            self._stream(2 * (2 * gathered + 2 * whole), 4),
            self._stream(2 * ((2 + again) * gathered + 2 * whole), 4 + again),
        )

    def _casts(self) -> tuple[float, float]:
        """Returns seconds (forward, backward) of casts to FP8: of inputs and weights, and of outputs' gradients.

        Weights are cast once in a step, so each micro-batch bears its part.
        """
        # other precisions have no FP8 copies to make
        if not self.software.fp8:
            return 0.0, 0.0
        s, lay = self.shape, self.layout
        pairs = [*s.projections(lay.tp), ((2 if s.gated else 1) * s.ffn / lay.tp, s.hidden), (s.hidden, s.ffn / lay.tp)]
        apart = s.shared_experts if s.experts else 1
        rows = [lay.tokens] * (len(pairs) - 2) + [lay.tokens * apart] * 2
        # weights are cast once in a step, of which a micro-batch bears its share
        weights = s.layer_parameters / lay.tp / (lay.ep if s.experts else 1) / (lay.n_micro * lay.rounds)
        # a layer of experts casts each token for each of its experts
        taken, given = moves.cast_elements(s, lay, self.software)
        inputs = sum(count * deep for count, (_, deep) in zip(rows, pairs, strict=True)) + taken + weights
        outputs = sum(count * wide for count, (wide, _) in zip(rows, pairs, strict=True)) + given
        dealt, moved = moves.cast_kernels(s, lay, self.software), FP8[self.software.fp8].cast_bytes
        return self.kernels.stream(inputs * moved, CASTS[0] + dealt), self.kernels.stream(
            outputs * moved, CASTS[1] + dealt
        )

    # --- communication

    def _messages(self) -> tuple[list[Message], list[Message]]:
        """Returns the collectives of one layer on one micro-batch: (in forward, in backward)."""
        s, lay = self.shape, self.layout
        whole = lay.tokens * s.hidden * ACT_BYTES
        gathered = whole * self.software.bits / 16  # inputs of FP8 products are cast before the gather
        forward: list[Message] = []
        backward: list[Message] = []
        overlapped = self.software.overlap_tp
        # sp gathers after each norm (a sum in backward), and sums what is added to the stream
        read, added = s.norms, 1 if s.parallel and self.software.one_sum else 2
        if lay.tp > 1 and lay.sp:
            gather = Message("all_gather", "tp", gathered, overlapped)
            scatter = Message("reduce_scatter", "tp", whole, overlapped)
            forward += [gather] * read + [scatter] * added
            # gathering the saved input for gradients of weights runs beside gradients of inputs
            backward += [gather] * added + [scatter] * read
            backward += [Message("all_gather", "tp", gathered, True)] * (0 if self.software.dtensors else read)
        elif lay.tp > 1:
            forward += [Message("all_reduce", "tp", whole, overlapped)] * added
            backward += [Message("all_reduce", "tp", whole, overlapped)] * read
        if lay.cp > 1:
            around = ring_messages(s, lay, self.software)
            forward += around[0]
            backward += around[1]
        if lay.ulysses > 1:
            dealt = s.query_width + s.kv_width + s.output_width
            qkv = lay.micro_batch * lay.seq / lay.cp * dealt / lay.tp * ACT_BYTES
            forward.append(Message("all_to_all", "ulysses", qkv / lay.ulysses))
            backward.append(Message("all_to_all", "ulysses", qkv / lay.ulysses))
        # tokens go to their experts, and the results come back
        if s.experts and lay.ep > 1:
            routed = moves.routed_rows(s, lay) * s.hidden * ACT_BYTES
            forward += [Message("all_to_all", "ep", routed)] * 2
            backward += [Message("all_to_all", "ep", routed)] * 2
        return forward, backward

    # --- the two ends

    def joined(self) -> BlockTimes:
        """Returns the times of two norms and the joining matrix before a layer that predicts further tokens."""
        s, tokens = self.shape, self.layout.tokens
        k, wide = self.kernels, s.hidden / self.layout.tp
        forward, backward = self._moved({"layer_norm" if s.layer_norm else "rms_norm": 2 * tokens * s.hidden})
        return BlockTimes(
            k.layer_product(tokens, wide, 2 * s.hidden) + self._stream(forward, 2),
            k.layer_product(tokens, 2 * s.hidden, wide) + self._stream(backward, 2),
            k.layer_product(wide, 2 * s.hidden, tokens, accumulate=self.software.accumulates),
        )

    def embedding(self) -> BlockTimes:
        """Returns the times of the embedding: a lookup, and a scatter-add into float32 in backward."""
        lay = self.layout
        moved = lay.tokens * self.shape.hidden * ACT_BYTES
        table = self._handled(self.shape.vocab * self.shape.hidden / lay.tp)
        times = BlockTimes(self._stream(2 * moved, 2), 0.0, self._stream(3 * moved, 3) + table)
        if lay.tp > 1:
            times.forward_messages = [Message("reduce_scatter" if lay.sp else "all_reduce", "tp", moved)]
        return times

    def head(self) -> BlockTimes:
        """Returns the times of the output matrix and of cross-entropy over logits that tp cuts along the vocabulary."""
        s, lay, k = self.shape, self.layout, self.kernels
        tokens, vocab = lay.tokens, s.vocab / lay.tp
        logits = tokens * vocab
        loss_bytes, back_bytes = (each * logits for each in self.software.loss_bytes)
        times = BlockTimes(
            k.product(tokens, vocab, s.hidden) + k.stream(loss_bytes, 4),
            k.product(tokens, s.hidden, vocab) + k.stream(back_bytes, 3),
            k.product(vocab, s.hidden, tokens, accumulate=self.software.accumulates) + self._handled(vocab * s.hidden),
        )
        if lay.tp > 1:
            # the loss over a sharded vocabulary all-reduces three numbers a token: maximum, sum, picked logit
            whole = tokens * s.hidden * ACT_BYTES
            times.forward_messages = [Message("all_gather", "tp", whole)] if lay.sp else []
            times.backward_messages = [Message("reduce_scatter" if lay.sp else "all_reduce", "tp", whole)]
            times.forward_messages += [Message("all_reduce", "tp", tokens * 4)] * 3
        return times
