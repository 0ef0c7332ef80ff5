"""Ranks: the processes of a run. `RankPool` for many small runs, `launch` for one real run, `join` under torchrun.

Nothing here imports torch into the calling process; only the ranks need it.
"""

from __future__ import annotations

from shardwise.ranks.join import join
from shardwise.ranks.launch import RankEvent, launch
from shardwise.ranks.pool import RankPool

__all__ = ["RankEvent", "RankPool", "join", "launch"]
