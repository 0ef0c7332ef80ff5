"""Rank processes: `RankPool` for many small runs, `launch` for one real run, `join` for ranks of a launcher.

Nothing here imports torch into the calling process; only the ranks need it.
"""

from __future__ import annotations

from shardwise.ranks.join import join, leave
from shardwise.ranks.launcher_ranks import LauncherRanks
from shardwise.ranks.launchers import LaunchedPlace, local_size
from shardwise.ranks.mpi import here
from shardwise.ranks.nodes import apart, nodes_of
from shardwise.ranks.pool import RankPool
from shardwise.ranks.start_ranks import RankEvent, launch

__all__ = [
    "LaunchedPlace",
    "LauncherRanks",
    "RankEvent",
    "RankPool",
    "apart",
    "here",
    "join",
    "launch",
    "leave",
    "local_size",
    "nodes_of",
]
