"""Domain parallelism: fields whose spatial dims are cut into tiles over ranks. part/rules has operations on tiles."""

from shardwise.parallel.domain.space_dims import as_read, candidates, without_space
from shardwise.part.rules.writes import watch
from shardwise.part.tiles.gathers import Gather, explained, watching, whole

__all__ = ["Gather", "as_read", "candidates", "explained", "watch", "watching", "whole", "without_space"]
