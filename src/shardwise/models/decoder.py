"""A decoder-only language model in the style of Llama: tokens in, logits of the next token out.

    x = embedding(tokens)
    x = x + attention(norm(x))          one block, repeated: RoPE on queries and keys, grouped key-value heads
    x = x + down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

Llama (Touvron et al. 2023, section 2.2) joins RMSNorm (Zhang and Sennrich 2019, section 4), rotary
positions (Su et al. 2021, section 3.2), grouped-query attention (Ainslie et al. 2023, section 2.2) and
SwiGLU (Shazeer 2020, section 2). Projections that write to the residual stream start smaller by sqrt(2 *
layers), as in GPT-2 (Radford et al. 2019, section 2.3).

It does not cache keys and values, pad, pack documents, or stretch positions beyond its context.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a `Decoder`; `heads` must divide `hidden` and `kv_heads` must divide `heads`."""

    vocab: int = 256
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 512  # width of the feed-forward network
    context: int = 256  # largest number of positions
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False  # the head's matrix is the embedding's
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden={self.hidden} must split into heads={self.heads} of an even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def preset(cls, name: str) -> DecoderConfig:
        """Returns `nano` (1.05M parameters, for a CPU) or `1b` (1.24B, as Llama 3.2 1B); `ValueError` for others."""
        presets = {
            "nano": cls(),
            "1b": cls(
                vocab=128_256, hidden=2048, layers=16, heads=32, kv_heads=8, intermediate=8192,
                context=4096, rope_base=500_000.0, tied=True,
            ),
        }  # fmt: skip
        if name not in presets:
            raise ValueError(f"no preset {name!r}; there are {', '.join(presets)}")
        return presets[name]


def turns(config: DecoderConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns (cosine, sine) of `length` positions' rotary angles, each (S, D/2) (Su et al. 2021, section 3.2.2)."""
    powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    places = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(places, config.rope_base**-powers)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x (B, heads, S, D) with each pair (x[i], x[i + D/2]) rotated by its angle, in the dtype of x.

    cos, sin   as `turns` returns them; the product is computed in the wider dtype of x and cos
    """
    a, b = x.chunk(2, dim=-1)  # each (B, heads, S, D/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which `heads // kv_heads` query heads share one key-value head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        kv_width = config.kv_heads * config.head_dim
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, kv_width, bias=False)
        self.value = nn.Linear(config.hidden, kv_width, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        split = (-1, self.head_dim)
        q = self.query(x).unflatten(-1, split).transpose(1, 2)  # (B, heads, S, D)
        k = self.key(x).unflatten(-1, split).transpose(1, 2)  # (B, kv_heads, S, D)
        v = self.value(x).unflatten(-1, split).transpose(1, 2)  # (B, kv_heads, S, D)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, S, H)


class Block(nn.Module):
    """One block: attention, then the gated feed-forward network (SwiGLU), each with a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.gate = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))  # (B, S, H)
        y = self.mlp_norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))  # (B, S, H)


class Decoder(nn.Module):
    """A decoder-only language model: tokens (B, S) -> logits (B, S, V)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # projections into the residual stream start smaller by the square root of their number
                residual = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / sqrt(2 * config.layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens are more than the context of {self.config.context}")
        cos, sin = turns(self.config, length, tokens.device)
        x = self.embedding(tokens)  # (B, S, H)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))  # (B, S, V)


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: Tensor,
    length: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns `tokens` (B, S) continued by `length` tokens, (B, S + length), each from one full forward pass.

    temperature   divides the logits before sampling; 0 takes the most likely token
    generator     for sampling; None: torch's default one

    Beyond the context the model sees the last `context` tokens. The model is in eval mode meanwhile.
    """
    was_training = model.training
    model.eval()
    try:
        for _ in range(length):
            logits = model(tokens[:, -model.config.context :])[:, -1].float()  # (B, V)
            if temperature == 0:
                following = logits.argmax(-1, keepdim=True)  # (B, 1)
            else:
                chances = torch.softmax(logits / temperature, dim=-1)
                following = torch.multinomial(chances, 1, generator=generator)  # (B, 1)
            tokens = torch.cat((tokens, following), dim=1)
    finally:
        model.train(was_training)
    return tokens  # (B, S + length)
