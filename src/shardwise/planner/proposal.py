"""`Proposal` (a plan with its forecast) and `Search` (the result of a search)."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.layout import Plan
from shardwise.layout.rules import applying
from shardwise.simulator.forecast import Forecast


def lacking(plan: Plan) -> str:
    """Returns why this version cannot run the plan, or why no version can; "" where it runs."""
    return "; ".join(f"{rule.combination}: {rule.reason}" for rule in applying(plan))


def senseless(plan: Plan) -> bool:
    """Whether the plan cannot be right in any version."""
    return any(rule.kind == "illegal" for rule in applying(plan))


@dataclass
class Proposal:
    """A plan, its layout and its forecast."""

    plan: Plan
    layout: Layout
    forecast: Forecast
    family: str

    @property
    def runnable(self) -> str:
        """Empty where this version can run the plan, else what it lacks."""
        return lacking(self.plan)


@dataclass
class Search:
    """The result of a search.

    proposals  plans that this version runs, from best to worst; those that it cannot run where there is no other
    later      faster ones that this version cannot run yet, a few
    lost       why each other family lost
    notes      what to know
    capacity   bytes of a device that a plan could have
    stopped    it was interrupted: the best so far
    cluster    the part of it that was planned on, where no plan has all devices; else None
    """

    proposals: list[Proposal]
    lost: dict[str, str]
    notes: list[str] = field(default_factory=list)
    considered: int = 0
    fitted: int = 0
    seconds: float = 0.0
    capacity: float = 0.0
    later: list[Proposal] = field(default_factory=list)
    stopped: bool = False
    cluster: Cluster | None = None

    @property
    def best(self) -> Proposal:
        return self.proposals[0]
