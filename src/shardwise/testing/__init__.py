"""For tests of code that runs on ranks: `RankPool`, and the pytest fixture in `shardwise.testing.plugin`."""

from __future__ import annotations

from shardwise.ranks import RankPool

__all__ = ["RankPool"]
