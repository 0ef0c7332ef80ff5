"""Tensor parallelism: derives which weights are sharded, holds shares of them, and compiles blocks on shares."""

from shardwise.parallel.tensor.compiled import OPTIONS, compile_block, why_eager
from shardwise.parallel.tensor.cut_weights import TensorParallel, install
from shardwise.parallel.tensor.derive import Derived, WeightCut
from shardwise.parallel.tensor.trial import Followed, TrialModule, find_cuts

__all__ = [
    "OPTIONS",
    "Derived",
    "Followed",
    "TensorParallel",
    "TrialModule",
    "WeightCut",
    "compile_block",
    "find_cuts",
    "install",
    "why_eager",
]
