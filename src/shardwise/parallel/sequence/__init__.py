"""Sequence parallelism: positions are cut over ranks; attention runs by all-to-all (Ulysses) or around a ring."""

import shardwise.parallel.sequence.hf_attention  # noqa: F401  registers a hook that runs when a module is cut
from shardwise.parallel.sequence.attention import AttentionCall, attend, explained, watching
from shardwise.parallel.sequence.inside import insides
from shardwise.parallel.sequence.position_dims import candidates, of_several

__all__ = ["AttentionCall", "attend", "candidates", "explained", "insides", "of_several", "watching"]
