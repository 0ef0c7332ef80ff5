"""Sequence parallelism: positions cut over ranks; attention by all-to-all (Ulysses) or around the ranks (ring)."""

from shardwise.parallel.sequence.attention import AttentionCall, attend, explained, watching
from shardwise.parallel.sequence.inputs import candidates
from shardwise.parallel.sequence.inside import insides

__all__ = ["AttentionCall", "attend", "candidates", "explained", "insides", "watching"]
