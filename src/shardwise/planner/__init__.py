"""Finds the plans that fit a cluster, the fastest first, with the reasons why others lost."""

from shardwise.planner.candidates import Constraints
from shardwise.planner.door import plan, simulate
from shardwise.planner.proposal_text import Proposal, Search
from shardwise.planner.propose import search

__all__ = ["Constraints", "Proposal", "Search", "plan", "search", "simulate"]
