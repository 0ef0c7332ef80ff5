"""Which plans fit a cluster, which is the fastest, and why the others are not."""

from shardwise.planner.door import plan, simulate
from shardwise.planner.propose import Constraints, Proposal, Search, search

__all__ = ["Constraints", "Proposal", "Search", "plan", "search", "simulate"]
