"""Tensor parallelism: derived cuts, shares of weights, parts of activations."""

from shardwise.parallel.tensor.apply import TensorParallel, install
from shardwise.parallel.tensor.derive import Cut, Derived
from shardwise.parallel.tensor.trial import find_cuts

__all__ = ["Cut", "Derived", "TensorParallel", "find_cuts", "install"]
