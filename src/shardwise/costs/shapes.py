"""`Shape`: a decoder by numbers, its parameters by component, its FLOPs. Families: planner/decoders.

The shapes of GPT, Llama and mixtures of experts are the same few matrices; what differs is data in `Shape`.

    parameters of a layer    q, k, v, o; up, (gate,) down, times experts; router; two norms
    latent attention         q and k v by way of narrow latents; the rotary part of a key is one for all heads
    FLOPs of a token         6 P for forward and backward (2 P + 4 P), and attention's 12 L h s, half of it if causal
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.errors import InputError

# of some models, 0 in the catalogue for the others
OF_SOME = (
    "kv_latent", "q_latent", "rope_dim", "value_dim", "dense_layers", "dense_ffn", "window", "windowed", "parallel",
    "ahead", "expert_bias",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes: layers, heads, and widths in elements.

    gated             the feed-forward has three matrices (SwiGLU) and not two
    bias              the matrices have biases
    experts           0: dense. Then `ffn` is an expert's width, `top_k` of them see a token
    learned_positions length of a learned position table, 0 without
    kv_latent         keys and values are made from a latent of this width, which is normed (DeepSeek-V2, section 2.1);
                      0: from the stream. Then `head_dim` is the width of a query and key, `rope_dim` of it rotary
    q_latent          queries too; 0: from the stream
    value_dim         width of a head's value where it is not `head_dim`
    dense_layers      so many layers in front have one feed-forward of `dense_ffn` in place of experts
    windowed          in so many layers a query sees the last `window` positions alone
    parallel          attention and feed-forward read the same stream and are added to it together, through so many
                      norms of it, 1 or 2 (GPT-J, PaLM, GPT-NeoX, Falcon); 0: one after the other
    ahead             so many tokens further on are predicted as well, each by one more layer, behind a matrix that
                      joins two streams, and the output matrix again (DeepSeek-V3, section 2.2)
    expert_bias       1: experts have biases, and what they activate is clamped (GPT-OSS)
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
        """Returns the shape that a row of the model catalogue describes."""
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
        """Returns the width of one token's keys and values, all heads, as attention reads them."""
        return self.kv_heads * (self.head_dim + self.value_width)

    @property
    def value_width(self) -> int:
        """Returns the width of one head's value vector."""
        return self.value_dim or self.head_dim

    @property
    def output_width(self) -> int:
        """Returns the width of attention's output: all heads' values."""
        return self.heads * self.value_width

    @property
    def attention_width(self) -> float:
        """Returns the mean width of attention's two products, all heads."""
        return (self.query_width + self.output_width) / 2

    def heads_of(self, ranks: int) -> int:
        """Returns the query heads of the rank that has most; heads that share keys stay together while these last."""
        together = self.heads // self.kv_heads if ranks <= self.kv_heads else 1
        return math.ceil(self.heads / together / ranks) * together

    def projections(self, tp: int = 1) -> list[tuple[float, float]]:
        """Returns (out, in) of each of attention's matrices on the fullest of `tp` ranks.

        Keys and values are kept whole beyond the kv heads, and so are the matrices that make latents.
        """
        heads, kv = self.heads_of(tp), math.ceil(self.kv_heads / tp) * self.kv_width / self.kv_heads
        out_of = [(float(self.hidden), float(heads * self.value_width))]
        if not self.kv_latent:
            return [(heads * self.head_dim + kv, float(self.hidden)), *out_of]
        made = float(heads * (self.head_dim - self.rope_dim + self.value_width))  # the rotary part is not
        queries = [(float(heads * self.head_dim), float(self.q_latent or self.hidden))]
        return [*self.latents, *queries, (made, float(self.kv_latent)), *out_of]

    def window_keys(self, seq: float) -> float:
        """Returns the length of a causal sequence whose queries see, in the mean, as many positions as the window."""
        window = min(float(self.window or seq), seq)
        return 2 * window - window * window / seq

    @property
    def latents(self) -> list[tuple[float, float]]:
        """Returns (out, in) of the matrices that make latents, and of the keys' rotary part."""
        if not self.kv_latent:
            return []
        queries = [(float(self.q_latent), float(self.hidden))] if self.q_latent else []
        return [*queries, (float(self.kv_latent + self.rope_dim), float(self.hidden))]

    @property
    def attention_parameters(self) -> int:
        """Returns parameters of one layer's q, k, v and output projections, biases and norms of latents included."""
        return round(self.attention_share())

    def attention_share(self, tp: int = 1) -> float:
        """Returns attention's parameters on one of `tp` ranks."""
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
        """Returns extra parameters of a layer that predicts further ahead: a matrix that joins streams, three norms."""
        return 2 * self.hidden**2 + 3 * self.norm_parameters

    @cached_property
    def in_front(self) -> Shape:
        """Returns the `Shape` of this model's dense layers alone, those in front of its layers with experts."""
        return self.with_(
            layers=max(1, self.dense_layers), ffn=self.dense_ffn or self.ffn, experts=0, top_k=0, shared_experts=0,
            dense_layers=0, dense_ffn=0, ahead=0,
        )  # fmt: skip

    @property
    def layers_parameters(self) -> int:
        """Returns parameters of all layers, those that predict further ahead among them."""
        ahead = self.ahead * (self.layer_parameters + self.joined_parameters)
        more = self.dense_layers * (self.in_front.layer_parameters - self.layer_parameters) if self.dense_layers else 0
        return self.layers * self.layer_parameters + more + ahead

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Returns parameters of the output matrix, 0 where it is the embedding's."""
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
        """Returns model FLOPs of forward and backward for one token.

        6P+6Lhs    P active parameters without the embedding lookup; attention counted causal, and as far as windows
               reach (the default here)
        6P+12Lhs   all parameters, attention counted in full (PaLM, MosaicML)
        72Blsh2    Megatron's formula (Korthikanti et al. 2022), attention in full, vocabulary once
        96Blsh2    the same with a recomputed forward (Narayanan et al. 2021): hardware FLOPs
        Raises `InputError` for another.
        """
        width = self.attention_width
        if convention == "6P+12Lhs":
            return 6.0 * self.active_parameters + 12.0 * self.layers * width * seq
        if convention == "6P+6Lhs":
            lookup = self.embedding_parameters - (self.vocab * self.hidden if self.tied else 0)
            lookup -= self.ahead * self.vocab * self.hidden  # the output matrix is met again
            seen = (self.layers + self.ahead - self.windowed) * seq + self.windowed * self.window_keys(seq)
            return 6.0 * (self.active_parameters - lookup) + 6.0 * width * seen
        h, layers = self.hidden, self.layers
        if convention == "72Blsh2":
            return 72.0 * layers * h * h * (1 + seq / (6 * h) + self.vocab / (12 * h * layers))
        if convention == "96Blsh2":
            return 96.0 * layers * h * h * (1 + seq / (6 * h) + self.vocab / (16 * h * layers))
        raise InputError(f"unknown FLOP convention {convention!r}")
