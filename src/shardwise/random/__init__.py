"""Randomness inside a module that does not depend on the layout: masks by global index, and how they are drawn."""

from shardwise.random.draws import hashed
from shardwise.random.modes import BatchDims, ConstantRandom, GlobalRandom, Samples, python_restored, seed_python

__all__ = ["BatchDims", "ConstantRandom", "GlobalRandom", "Samples", "hashed", "python_restored", "seed_python"]
