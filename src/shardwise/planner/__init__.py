"""Which plans fit a cluster, which is the fastest, and why the others are not."""

from shardwise.planner.candidates import Constraints
from shardwise.planner.door import plan, simulate
from shardwise.planner.proposal_text import Proposal, Search
from shardwise.planner.propose import search

__all__ = ["Constraints", "Proposal", "Search", "plan", "search", "simulate"]
