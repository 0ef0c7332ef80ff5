"""Sequence parallelism: positions cut over ranks; attention by all-to-all (Ulysses) or around the ranks (ring)."""

from shardwise.parallel.sequence.attention import attend
from shardwise.parallel.sequence.inputs import candidates

__all__ = ["attend", "candidates"]
