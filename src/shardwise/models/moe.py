"""A decoder with routed experts: each token goes through a few of many feed-forward networks.

    scores  = softmax(x Wr)                                  (B, S, E)
    chosen  = top-k of scores + bias                         the bias steers the choice alone
    y       = sum over chosen e of  w_e expert_e(x)  +  shared(x)         w: the chosen scores, made to sum to 1

The blocks' attention is that of `Decoder`. Experts are gated networks (SwiGLU), their weights stacked (E, ...).

Two ways to keep experts evenly used, both sums over samples, so that they are right on any number of ranks:

balance  an auxiliary loss for each sequence, E/(k S) sum_e count_e * mean score_e (DeepSeek-V3, 2024, equations 17 to
         20; after Fedus et al., "Switch Transformers", 2021, equation 4, whose counts are those of a whole batch and
         therefore no sum over samples)
bias     no loss; an expert that got more than its share is made less likely (Wang et al., "Auxiliary-loss-free load
         balancing", 2024). The excess is the gradient of a bias row (1, E), summed over samples as any gradient
         is; `sign_descent` moves the row against its sign.

Capacity (Lepikhin et al., "GShard", 2020, section 2.2, whose groups are sequences here): an expert takes at most
ceil(capacity * k S / E) tokens of a sequence, the earlier ones; without it no token is dropped.

It does not cache keys and values, and drops no token to make shapes static.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.decoder import Attention, DecoderConfig, turns

EXCESS = 1e-3  # scale of the bias row's gradient, which keeps its part of the norm small; only its sign is used


@dataclass(frozen=True)
class MoEConfig:
    """Shape of a `MoEDecoder`. `decoder.intermediate` is the width of the shared expert; 0: there is none."""

    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    experts: int = 8
    top_k: int = 2  # experts of each token
    width: int = 128  # of each expert's feed-forward network
    capacity: float | None = None  # most tokens of an expert in a sequence, over an equal share; None: no limit
    balance: float = 0.01  # weight of the loss term that spreads tokens over experts
    bias: bool = False  # whether scores have a bias that affects only which experts are chosen

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k} must lie between 1 and experts={self.experts}")
        if self.capacity is not None and self.capacity <= 0:
            raise ValueError(f"capacity={self.capacity} must be positive, or None for no limit")


class Router(nn.Module):
    """A router: x (B, S, H) -> indices of experts (B, S, k), their weights (B, S, k), loss term of each sample (B,)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.decoder.hidden))
        self.bias = nn.Parameter(torch.zeros(1, config.experts)) if config.bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, experts = self.config.top_k, self.config.experts
        logits = F.linear(x, self.weight)
        scores = logits.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        # the bias affects which experts are chosen; their weights are the scores without it
        wanted = scores if self.bias is None else scores + self.bias
        index = wanted.detach().topk(k, dim=-1).indices  # (B, S, k)
        weight = scores.gather(-1, index)
        weight = weight / weight.sum(-1, keepdim=True)
        chosen = F.one_hot(index, experts).flatten(1, 2)  # (B, S * k, E)
        count, even = chosen.sum(1).to(scores.dtype), index.shape[1] * k / experts  # (B, E)
        term = self.config.balance * (count / even * scores.mean(1)).sum(-1)  # (B,)
        if self.bias is not None:
            excess = EXCESS * (self.bias * (count - even)).sum(-1)
            term = term + excess - excess.detach()  # adds a gradient but 0 to the value
        # tokens beyond an expert's capacity get weight 0; counted within a sequence, so batches do not matter
        if self.config.capacity is not None:
            most = ceil(self.config.capacity * even)
            place = (chosen.cumsum(1) * chosen).sum(-1).view_as(index)  # from 1, within the sequence
            weight = weight * (place <= most)
        return index, weight.to(x.dtype), term


class Experts(nn.Module):
    """Routed experts: x (T, H), indices of experts (T, k) and their weights (T, k) -> (T, H)."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        flat = index.flatten()
        order = flat.argsort(stable=True)  # (token, expert) pairs, sorted by expert
        token = order // index.shape[1]
        done = []
        counts = torch.bincount(flat, minlength=len(self.gate_up)).tolist()
        for expert, rows in enumerate(x[token].split(counts)):
            gate, up = F.linear(rows, self.gate_up[expert]).chunk(2, dim=-1)
            done.append(F.linear(F.silu(gate) * up, self.down[expert]))
        pairs = torch.cat(done) * weight.flatten()[order, None]  # (T * k, H)
        return torch.zeros_like(x).index_add(0, token, pairs)


class MoEBlock(nn.Module):
    """A block: attention, then routed experts and a shared expert; x (B, S, H) -> x and the router's loss term (B,)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        sizes = config.decoder
        self.attention_norm = nn.RMSNorm(sizes.hidden, eps=sizes.norm_eps)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.RMSNorm(sizes.hidden, eps=sizes.norm_eps)
        self.router = Router(config)
        self.experts = Experts(config.experts, sizes.hidden, config.width)
        self.shared = Shared(sizes.hidden, sizes.intermediate) if sizes.intermediate else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), cos, sin)  # (B, S, H)
        y = self.mlp_norm(x)
        index, weight, term = self.router(y)
        routed = self.experts(y.flatten(0, 1), index.flatten(0, 1), weight.flatten(0, 1)).view_as(y)
        if self.shared is not None:
            routed = routed + self.shared(y)
        return x + routed, term


class Shared(nn.Module):
    """The shared expert: a gated feed-forward network that every token goes through."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoEDecoder(nn.Module):
    """A decoder with routed experts: tokens (B, S) -> logits (B, S, V), sum of the routers' loss terms (B,)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        sizes = config.decoder
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(MoEBlock(config) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=sizes.norm_eps)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2 and not name.endswith("router.bias"):
                residual = name.endswith(("attention.out.weight", "down", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / sqrt(2 * sizes.layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        if length > self.config.decoder.context:
            raise ValueError(f"{length} tokens are more than the context of {self.config.decoder.context}")
        cos, sin = turns(self.config.decoder, length, tokens.device)
        x = self.embedding(tokens)  # (B, S, H)
        terms = []
        for block in self.blocks:
            x, term = block(x, cos, sin)
            terms.append(term)
        return self.head(self.norm(x)), torch.stack(terms).sum(0)


def sign_descent(groups: list[dict], rate: float) -> list[dict]:
    """Returns param groups for AdamW in which the routers' bias rows have a group that moves by `rate` a step.

    With betas of 0 Adam divides a gradient by its own size, which leaves the sign. Bias rows are recognised by their
    shape (1, E).
    """
    rows: list[Any] = []
    rest = []
    for group in groups:
        # any other parameter of shape (1, E) would land in this group too
        rows += [param for param in group["params"] if param.dim() == 2 and param.shape[0] == 1]
        rest.append({**group, "params": [p for p in group["params"] if not (p.dim() == 2 and p.shape[0] == 1)]})
    own = {"name": "bias rows", "params": rows, "lr": rate, "betas": (0.0, 0.0), "eps": 1e-12, "weight_decay": 0.0}
    # a group without parameters is an error in some optimizers
    return [group for group in (*rest, own) if group["params"]]


__all__ = ["MoEConfig", "MoEDecoder", "sign_descent"]
