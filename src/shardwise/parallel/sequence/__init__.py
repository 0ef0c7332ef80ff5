"""Sequence parallelism: positions cut over ranks; attention by all-to-all (Ulysses) or around the ranks (ring)."""

import shardwise.parallel.sequence.interfaces  # noqa: F401  its doors are opened where a module is cut
from shardwise.parallel.sequence.attention import AttentionCall, attend, explained, watching
from shardwise.parallel.sequence.inputs import candidates
from shardwise.parallel.sequence.inside import insides

__all__ = ["AttentionCall", "attend", "candidates", "explained", "insides", "watching"]
