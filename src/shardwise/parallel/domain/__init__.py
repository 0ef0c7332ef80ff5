"""Domain parallelism: fields whose spatial dims are cut into tiles over ranks, and operations on them."""

from shardwise.parallel.domain import convolve, norms, padding, pooling  # noqa: F401 - functions on tiles
from shardwise.parallel.domain.inputs import candidates

__all__ = ["candidates"]
