"""Domain parallelism: operations on fields whose spatial dims are cut into tiles over ranks."""

from shardwise.parallel.domain import convolve, norms, padding, pooling  # noqa: F401 - functions on tiles
