"""Tensor parallelism: derived cuts, shares of weights, parts of activations."""

from shardwise.parallel.tensor.apply import TensorParallel, install
from shardwise.parallel.tensor.compiled import compile_block, why_eager
from shardwise.parallel.tensor.derive import Cut, Derived
from shardwise.parallel.tensor.trial import Followed, Stage, find_cuts

__all__ = [
    "Cut",
    "Derived",
    "Followed",
    "Stage",
    "TensorParallel",
    "compile_block",
    "find_cuts",
    "install",
    "why_eager",
]
