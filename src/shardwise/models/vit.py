"""A vision transformer: patches of an image and a class token in, logits of the image's class out.

    x = dropout([class; patches(image)] + positions)
    x = x + dropout(attention(norm(x)))               one block, repeated; attention is not causal
    x = x + dropout(mlp(norm(x)))
    logits = head(norm(x)[class])

Dosovitskiy et al. 2021, section 3.1, equations 1 to 4. Residual projections start smaller with depth, as in
GPT-2 (Radford et al. 2019, section 2.3), and the head starts small but not zero, so that the first step
reaches every parameter. The exact gradient of the key bias is zero, as in `gpt2.py`.

It does not interpolate positions: every image has the configured size, a multiple of the patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ViTConfig:
    """Shape of a `ViT`; the defaults fit the 8 by 8 digits of scikit-learn."""

    image: int = 8  # pixels along a side of the image
    patch: int = 2  # pixels along a side of a patch
    channels: int = 1
    classes: int = 10
    hidden: int = 64
    layers: int = 4
    heads: int = 4
    intermediate: int = 256  # width of the feed-forward network
    norm_eps: float = 1e-6
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.image % self.patch:
            raise ValueError(f"image={self.image} must be a multiple of patch={self.patch}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} must split into heads={self.heads}")


class ViTBlock(nn.Module):
    """One block: attention over all tokens, then a feed-forward network, each with a residual."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.up = nn.Linear(config.hidden, config.intermediate)
        self.down = nn.Linear(config.intermediate, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def attend(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, heads, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, D)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, T, H)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.attention_norm(x)))  # (B, T, H)
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))  # (B, T, H)


class ViT(nn.Module):
    """A vision transformer: images (B, C, image, image) -> logits (B, classes)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        tokens = 1 + (config.image // config.patch) ** 2
        self.patches = nn.Conv2d(config.channels, config.hidden, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.hidden))
        self.positions = nn.Parameter(torch.empty(1, tokens, config.hidden))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(ViTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.classes)
        for name, parameter in self.named_parameters():
            # convolutions keep their own initialisation; norms, biases and tokens have one dim or none
            if parameter.dim() > 1 and not name.startswith("patches"):
                # projections into the residual stream start smaller by the square root of their number
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / sqrt(2 * config.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)  # (B, T - 1, H)
        first = self.class_token.expand(patches.shape[0], -1, -1)  # (B, 1, H)
        x = self.dropout(torch.cat((first, patches), dim=1) + self.positions)  # (B, T, H)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))  # (B, classes)
