"""Randomness inside a module that does not depend on the layout: masks by global index, and how they are drawn."""

from shardwise.random.draws import DRAWS, hashed
from shardwise.random.modes import (
    EACH_ITS_OWN,
    BatchDims,
    ConstantRandom,
    Drawn,
    GlobalRandom,
    Samples,
    draws,
    python_restored,
    seed_python,
)  # fmt: skip
from shardwise.random.watch import HIDDEN, Randomness, Watch

__all__ = [
    "DRAWS", "EACH_ITS_OWN", "HIDDEN", "BatchDims", "ConstantRandom", "Drawn", "GlobalRandom", "Randomness", "Samples",
    "Watch", "draws", "hashed", "python_restored", "seed_python",
]  # fmt: skip
