"""`Shape`: a decoder's sizes, its parameters by component, its FLOPs. Families of decoders: planner/decoders.

GPT, Llama and mixtures of experts are made of the same few matrices; fields of `Shape` say which a model has.

    parameters of a layer    q, k, v, o; up, (gate,) down, times experts; router; two norms
    latent attention         q, k and v are projected from narrow latents; all heads share the rotary part of a key
    FLOPs of a token         6 P for forward and backward (2 P + 4 P), and attention's 12 L h s, half of it if causal
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.errors import InputError

# columns of the model catalogue that are 0 for most models
OF_SOME = (
    "kv_latent", "q_latent", "rope_dim", "value_dim", "dense_layers", "dense_ffn", "window", "windowed", "parallel",
    "ahead", "expert_bias",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes: layers, heads, and widths in elements.

    hidden            width of the stream (the model dimension)
    head_dim          width of a head's query and key
    ffn               inner width of the feed-forward, or of one expert
    gated             whether the feed-forward has three matrices (SwiGLU) and not two
    tied              whether the output matrix is the embedding
    bias              whether all matrices have biases; `qkv_bias`: those of q, k and v
    qk_norm           whether each head's queries and keys are normed
    experts           number of experts of a layer, 0: dense; a token is routed to `top_k` of them
    shared_experts    number of further experts that every token uses
    learned_positions length of a learned position table, 0 without
    kv_latent         width of the normed latent from which keys and values are projected (DeepSeek-V2, section 2.1);
                      0: from the stream. With a latent, `rope_dim` elements of `head_dim` are rotary
    q_latent          width of the latent from which queries are projected; 0: from the stream
    value_dim         width of a head's value; 0: `head_dim`
    dense_layers      number of first layers that have a feed-forward of width `dense_ffn` in place of experts
    windowed          number of layers in which a query attends to the last `window` positions alone
    parallel          number of norms (1 or 2) of a layer whose attention and feed-forward both read the layer's input
                      and are added to it (GPT-J, PaLM, GPT-NeoX, Falcon); 0: one after the other
    ahead             number of further tokens that are predicted, each by one more layer after a matrix that joins two
                      streams, and by the output matrix again (DeepSeek-V3, section 2.2)
    expert_bias       1: experts have biases and clamped activations (GPT-OSS); else 0
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    learned_positions: int = 0
    layer_norm: bool = False  # weight and bias; RMSNorm has a weight
    norm_bias: bool = True
    experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    dropout: bool = False
    kv_latent: int = 0
    q_latent: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    window: int = 0
    windowed: int = 0
    parallel: int = 0
    ahead: int = 0
    expert_bias: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, field) < 1:
                raise InputError(f"model shape {self.name}: {field} must be at least 1, got {getattr(self, field)}")

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> Shape:
        """Returns the shape of a row of the model catalogue; `row`: {column: text}."""
        gated = row["gated"] == "1"
        layer_norm = row["norm"].startswith("LayerNorm")
        return cls(
            layers=int(row["layers"]),
            hidden=int(row["hidden"]),
            heads=int(row["heads"]),
            kv_heads=int(row["kv_heads"]),
            head_dim=int(row["head_dim"]),
            ffn=int(row["ffn"]),
            vocab=int(row["vocab"]),
            gated=gated,
            tied=row["tied"] == "1",
            bias=not gated and "no bias" not in row["norm"],
            qkv_bias=row["qkv_bias"] == "1",
            qk_norm=row["qk_norm"] == "1",
            learned_positions=int(row["max_seq"] or 0) if row["learned_positions"] == "1" else 0,
            layer_norm=layer_norm,
            norm_bias="no bias" not in row["norm"],
            experts=int(row["experts"]),
            top_k=int(row["top_k"]),
            shared_experts=int(row["shared_experts"]),
            name=row["name"],
        ).with_(**{name: int(row[name]) for name in OF_SOME})

    def with_(self, **changes: object) -> Shape:
        """Returns a copy with some fields replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    # --- parameters

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Returns the elements of one token's keys and values of all kv heads."""
        return self.kv_heads * (self.head_dim + self.value_width)

    @property
    def value_width(self) -> int:
        """Returns the width of one head's value vector."""
        return self.value_dim or self.head_dim

    @property
    def output_width(self) -> int:
        """Returns the elements of attention's output for one token, of all heads."""
        return self.heads * self.value_width

    @property
    def attention_width(self) -> float:
        """Returns the mean of query and output width, all heads, so that both products have 2 x it FLOPs a pair."""
        return (self.query_width + self.output_width) / 2

    def heads_of(self, ranks: int) -> int:
        """Returns the query heads of the rank with the most, of `ranks` ranks over which heads are dealt.

        Query heads that share keys stay on one rank, unless there are more ranks than kv heads.
        """
        together = self.heads // self.kv_heads if ranks <= self.kv_heads else 1
        return math.ceil(self.heads / together / ranks) * together

    def projections(self, tp: int = 1) -> list[tuple[float, float]]:
        """Returns (out features, in features) of each of attention's matrices on the rank of `tp` with the most heads.

        The order is latents, q k v, output. A rank has at least one kv head, and matrices of latents are replicated.
        """
        heads, kv = self.heads_of(tp), math.ceil(self.kv_heads / tp) * self.kv_width / self.kv_heads
        out_of = [(float(self.hidden), float(heads * self.value_width))]
        if not self.kv_latent:
            return [(heads * self.head_dim + kv, float(self.hidden)), *out_of]
        made = float(heads * (self.head_dim - self.rope_dim + self.value_width))  # rotary part: with the latents
        queries = [(float(heads * self.head_dim), float(self.q_latent or self.hidden))]
        return [*self.latents, *queries, (made, float(self.kv_latent)), *out_of]

    def window_keys(self, seq: float) -> float:
        """Returns the length of a causal sequence with as many (query, key) pairs a query as a window has in `seq`."""
        window = min(float(self.window or seq), seq)
        return 2 * window - window * window / seq

    @property
    def latents(self) -> list[tuple[float, float]]:
        """Returns (out features, in features) of the matrices of latents, keys' rotary part included; [] without."""
        if not self.kv_latent:
            return []
        queries = [(float(self.q_latent), float(self.hidden))] if self.q_latent else []
        return [*queries, (float(self.kv_latent + self.rope_dim), float(self.hidden))]

    @property
    def attention_parameters(self) -> int:
        """Returns parameters of one layer's q, k, v and output projections, biases and norms of latents included."""
        return round(self.attention_share())

    def attention_share(self, tp: int = 1) -> float:
        """Returns the parameters of one layer's attention on one rank of `tp`."""
        matrices = sum(out * deep for out, deep in self.projections(tp))
        wide = self.query_width + self.kv_width
        biases = (wide if self.bias or self.qkv_bias else 0) + (self.hidden if self.bias else 0)
        norms = self.q_latent + self.kv_latent
        return matrices + (biases + (2 * self.head_dim if self.qk_norm else 0)) / tp + norms

    @property
    def expert_parameters(self) -> int:
        """Returns the number of parameters of one feed-forward block (or of one expert)."""
        up = 2 if self.gated else 1
        matrices = (up + 1) * self.hidden * self.ffn
        return matrices + (up * self.ffn + self.hidden if self.bias else 0)

    @property
    def router_parameters(self) -> int:
        return self.hidden * self.experts

    @property
    def norm_parameters(self) -> int:
        """Returns the number of parameters of one norm."""
        return self.hidden * (2 if self.layer_norm and self.norm_bias else 1)

    @property
    def norms(self) -> int:
        """Returns how many norms one layer has: one before attention, one before the feed-forward, or one for both."""
        return self.parallel or 2

    @property
    def layer_parameters(self) -> int:
        """Returns parameters of one layer, all its experts included."""
        forwards = self.expert_parameters * max(1, self.experts + self.shared_experts)
        return self.attention_parameters + forwards + self.router_parameters + self.norms * self.norm_parameters

    @property
    def joined_parameters(self) -> int:
        """Returns the parameters that a layer which predicts a further token adds: a joining matrix, three norms."""
        return 2 * self.hidden**2 + 3 * self.norm_parameters

    @cached_property
    def in_front(self) -> Shape:
        """Returns the `Shape` of this model's `dense_layers` alone, which come before those with experts."""
        return self.with_(
            layers=max(1, self.dense_layers), ffn=self.dense_ffn or self.ffn, experts=0, top_k=0, shared_experts=0,
            dense_layers=0, dense_ffn=0, ahead=0,
        )  # fmt: skip

    @property
    def layers_parameters(self) -> int:
        """Returns the parameters of all layers, including those that predict further tokens."""
        ahead = self.ahead * (self.layer_parameters + self.joined_parameters)
        more = self.dense_layers * (self.in_front.layer_parameters - self.layer_parameters) if self.dense_layers else 0
        return self.layers * self.layer_parameters + more + ahead

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Returns the parameters of the output matrix, 0 if it is the embedding (`tied`)."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Returns all parameters of the model."""
        return self.layers_parameters + self.embedding_parameters + self.head_parameters + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Returns the number of parameters that one token uses: of the experts only those to which it is routed."""
        idle = max(0, self.experts - self.top_k) * self.expert_parameters
        return self.parameters - (self.layers + self.ahead - self.dense_layers) * idle

    # --- FLOPs

    def flops_per_token(self, seq: int, convention: str = "6P+6Lhs") -> float:
        """Returns the model FLOPs of forward and backward for one token in a sequence of `seq`, by a convention.

        6P+6Lhs    P: active parameters without the embedding lookup; of attention only pairs that causality and windows
                   leave
        6P+12Lhs   P: active parameters; attention without a mask (PaLM, MosaicML)
        72Blsh2    Megatron's formula (Korthikanti et al. 2022), attention without a mask, vocabulary once
        96Blsh2    the same with a recomputed forward (Narayanan et al. 2021), so hardware FLOPs

        Raises `InputError` for any other convention.
        """
        width = self.attention_width
        if convention == "6P+12Lhs":
            return 6.0 * self.active_parameters + 12.0 * self.layers * width * seq
        if convention == "6P+6Lhs":
            lookup = self.embedding_parameters - (self.vocab * self.hidden if self.tied else 0)
            lookup -= self.ahead * self.vocab * self.hidden  # the output matrix is used again
            seen = (self.layers + self.ahead - self.windowed) * seq + self.windowed * self.window_keys(seq)
            return 6.0 * (self.active_parameters - lookup) + 6.0 * width * seen
        h, layers = self.hidden, self.layers
        if convention == "72Blsh2":
            return 72.0 * layers * h * h * (1 + seq / (6 * h) + self.vocab / (12 * h * layers))
        if convention == "96Blsh2":
            return 96.0 * layers * h * h * (1 + seq / (6 * h) + self.vocab / (16 * h * layers))
        raise InputError(f"unknown FLOP convention {convention!r}")
