"""What tests of exchanges between ranks share: indices dealt at random, and inner products over ranks."""

from __future__ import annotations

import random

import numpy as np
import torch

from shardwise.part import Owners

DOUBLE = torch.float64


def dealt_at_random(n: int, ranks: int, rng: random.Random) -> Owners:
    if rng.random() < 0.5:
        return Owners.blocks(n, ranks)
    return Owners.of(np.array([rng.randrange(ranks) for _ in range(n)]), ranks)


def inner_product(a: torch.Tensor, b: torch.Tensor) -> float:
    """<a, b>, summed over ranks."""
    total = (a * b).sum().reshape(1)
    torch.distributed.all_reduce(total)
    return float(total)
