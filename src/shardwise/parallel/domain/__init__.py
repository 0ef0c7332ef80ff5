"""Domain parallelism: fields whose spatial dims are cut into tiles over ranks, and operations on them.

An operation that reads neighbours is answered above autograd: a differentiable fetch of what this rank's outputs read,
dim by dim, so that corners come along, then the plain operation on it; its backward gives back and adds. Where torch
chooses an operation by how a tensor lies in memory (a linear layer's bias), the function on tiles chooses in its place:
a share of one row lies in memory in several ways, and ranks must come to one order of collectives. What was computed of
whole tensors alone takes its gradient whole.
"""

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
