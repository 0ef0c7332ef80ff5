"""A language model in the style of GPT-2: biases and dropout everywhere, learned positions, a tied head.

    x = dropout(embedding(tokens) + positions)
    x = x + dropout(out(attention(norm(x))))          one block, repeated
    x = x + dropout(down(gelu(up(norm(x)))))
    logits = norm(x) @ embedding^T

Radford et al. 2019, section 2.3: pre-norm, and projections that write to the residual stream start smaller
by sqrt(2 * layers), as each block writes twice. GELU (Hendrycks and Gimpel 2016, section 2) is the tanh form.

The key third of the fused bias adds the same number to every score of a query, which softmax cancels. So its
exact gradient is zero, and the computed one is rounding error, which Adam magnifies. It is kept because GPT-2
has it.

It does not cache keys and values, pad, or load the published weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPT2Config:
    """Shape of a `GPT2`; the defaults are GPT-2 small (124M)."""

    vocab: int = 50_257
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    context: int = 1024  # largest number of positions
    norm_eps: float = 1e-5
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} must split into heads={self.heads}")


class GPT2Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values, and dropout on its weights."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, S, 3, heads, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, S, D)
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, S, H)


class GPT2Block(nn.Module):
    """One block: attention, then a feed-forward network four times as wide, each with a residual."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attention = GPT2Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))  # (B, S, H)
        wide = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")  # (B, S, 4H)
        return x + self.dropout(self.down(wide))  # (B, S, H)


class GPT2(nn.Module):
    """GPT-2: tokens (B, S) -> logits (B, S, V)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(GPT2Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # projections into the residual stream start smaller by the square root of their number
                residual = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / sqrt(2 * config.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens are more than the context of {self.config.context}")
        places = torch.arange(length, device=tokens.device)  # (S,)
        x = self.dropout(self.embedding(tokens) + self.positions(places))  # (B, S, H)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, S, V)
