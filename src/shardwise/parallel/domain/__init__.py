"""Domain parallelism: fields whose spatial dims are cut into tiles over ranks, and operations on them."""

from shardwise.parallel.domain import (  # noqa: F401 - functions on tiles
    apart,
    convolve,
    entire,
    fourier,
    linear,
    matrices,
    norms,
    padding,
    patches,
    pooling,
    resize,
    sampling,
)
from shardwise.parallel.domain.gathers import Gather, explained, watching, whole
from shardwise.parallel.domain.inputs import as_read, candidates, without_space
from shardwise.parallel.domain.writes import watch

__all__ = ["Gather", "as_read", "candidates", "explained", "watch", "watching", "whole", "without_space"]
