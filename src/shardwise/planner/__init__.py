"""Which plans fit a cluster, which is the fastest, and why the others are not."""

from shardwise.planner.propose import Constraints, Proposal, Search, plan

__all__ = ["Constraints", "Proposal", "Search", "plan"]
