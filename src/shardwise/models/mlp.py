"""A multilayer perceptron, optionally with frozen and unused parameters, which are hard to shard correctly.

    x = gelu(linear(x))          `layers` times
    out = linear(x)

`frozen` stops the first layer's parameters from training; `unused` adds a layer that `forward` never calls,
so that its gradients stay None. GELU is Hendrycks and Gimpel 2016, section 2. It has no norm and no
dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class MLPConfig:
    """Shape of an `MLP`: `layers` hidden layers of width `hidden`, then the output layer."""

    features: int = 16
    hidden: int = 32
    layers: int = 2
    outputs: int = 4
    frozen: bool = False  # whether the first layer is frozen
    unused: bool = False  # whether there is a layer that is never called

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers={self.layers} must be at least 1")


class MLP(nn.Module):
    """A multilayer perceptron: x (B, features) -> (B, outputs)."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.features] + [config.hidden] * config.layers
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.out = nn.Linear(config.hidden, config.outputs)
        if config.frozen:
            self.layers[0].requires_grad_(False)
        if config.unused:
            self.unused = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))  # (B, hidden)
        return self.out(x)  # (B, outputs)
