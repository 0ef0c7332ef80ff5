"""Sequence parallelism: positions cut over ranks; attention by all-to-all (Ulysses) or around the ranks (ring)."""

import shardwise.parallel.sequence.hf_attention  # noqa: F401  its doors are opened where a module is cut
from shardwise.parallel.sequence.attention import AttentionCall, attend, explained, watching
from shardwise.parallel.sequence.inside import insides
from shardwise.parallel.sequence.position_dims import candidates, of_several

__all__ = ["AttentionCall", "attend", "candidates", "explained", "insides", "of_several", "watching"]
