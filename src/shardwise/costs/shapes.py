"""A decoder described by numbers: parameters by component, and FLOPs by a named convention.

The shapes of GPT, Llama and mixtures of experts are the same few matrices; what differs is data in `Shape`.

    parameters of a layer    q, k, v, o; up, (gate,) down, times experts; router; two norms
    FLOPs of a token         6 P for forward and backward (2 P + 4 P), and attention's 12 L h s, half of it if causal
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.errors import InputError


@dataclass(frozen=True)
class Shape:
    """A decoder. Widths in elements.

    gated             the feed-forward has three matrices (SwiGLU) and not two
    bias              the matrices have biases
    experts           0: dense. Then `ffn` is an expert's width, `top_k` of them see a token
    learned_positions length of a learned position table, 0 without
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
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, field) < 1:
                raise InputError(f"model shape {self.name}: {field} must be at least 1, got {getattr(self, field)}")

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> Shape:
        """From a row of the model catalogue."""
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
        )

    def with_(self, **changes: object) -> Shape:
        """A copy with some fields replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    # --- parameters

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """q, k, v and the output projection of one layer, biases included."""
        wide = self.query_width + 2 * self.kv_width
        matrices = self.hidden * wide + self.query_width * self.hidden
        biases = (wide if self.bias or self.qkv_bias else 0) + (self.hidden if self.bias else 0)
        return matrices + biases + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def expert_parameters(self) -> int:
        """One feed-forward (or one expert)."""
        up = 2 if self.gated else 1
        matrices = (up + 1) * self.hidden * self.ffn
        return matrices + (up * self.ffn + self.hidden if self.bias else 0)

    @property
    def router_parameters(self) -> int:
        return self.hidden * self.experts

    @property
    def norm_parameters(self) -> int:
        """One norm."""
        return self.hidden * (2 if self.layer_norm and self.norm_bias else 1)

    @property
    def layer_parameters(self) -> int:
        """One layer, all experts."""
        forwards = self.expert_parameters * max(1, self.experts + self.shared_experts)
        return self.attention_parameters + forwards + self.router_parameters + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """The output matrix, 0 where it is the embedding's."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return (
            self.layers * self.layer_parameters
            + self.embedding_parameters
            + self.head_parameters
            + self.norm_parameters
        )

    @property
    def active_parameters(self) -> int:
        """Those that a token meets."""
        idle = max(0, self.experts - self.top_k) * self.expert_parameters
        return self.parameters - self.layers * idle

    # --- FLOPs

    def flops_per_token(self, seq: int, convention: str = "6P+6Lhs") -> float:
        """Model FLOPs of forward and backward for one token.

        6P+6Lhs    P active parameters without the embedding lookup; attention counted causal (the default here)
        6P+12Lhs   all parameters, attention counted in full (PaLM, MosaicML)
        72Blsh2    Megatron's formula (Korthikanti et al. 2022), attention in full, vocabulary once
        96Blsh2    the same with a recomputed forward (Narayanan et al. 2021): hardware FLOPs
        """
        width = self.query_width
        if convention == "6P+12Lhs":
            return 6.0 * self.active_parameters + 12.0 * self.layers * width * seq
        if convention == "6P+6Lhs":
            lookup = self.embedding_parameters - (self.vocab * self.hidden if self.tied else 0)
            return 6.0 * (self.active_parameters - lookup) + 6.0 * self.layers * width * seq
        h, layers = self.hidden, self.layers
        if convention == "72Blsh2":
            return 72.0 * layers * h * h * (1 + seq / (6 * h) + self.vocab / (12 * h * layers))
        if convention == "96Blsh2":
            return 96.0 * layers * h * h * (1 + seq / (6 * h) + self.vocab / (16 * h * layers))
        raise InputError(f"unknown FLOP convention {convention!r}")
