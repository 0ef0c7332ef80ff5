"""The layout of a run over ranks: the `Plan` (pure data), the rules that refuse one, and the arithmetic of ranks."""

from shardwise.layout.grid import AXES, Grid
from shardwise.layout.plan import Plan
from shardwise.layout.rules import RULES, Rule, check

__all__ = ["AXES", "RULES", "Grid", "Plan", "Rule", "check"]
