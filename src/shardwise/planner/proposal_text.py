"""`Proposal` (a plan with its forecast), `Search` (a result), and both as text and tables. For whole jobs: worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.cluster import Cluster
from shardwise.cluster.cluster_words import in_words
from shardwise.costs.layout import Layout
from shardwise.costs.memory import CONTEXT_BYTES
from shardwise.costs.room import NAMES, Room
from shardwise.costs.units import bytes_text, seconds_text
from shardwise.layout import Plan
from shardwise.layout.rules import applying
from shardwise.simulator.forecast import Forecast

MOST_LOST = 16  # most lines on families that lost


def search_text(search: Search, cluster: Cluster, subject: str, batch: str, command: str, top: int) -> str:
    """Returns a search's result as text: a table, the best plan in detail, why other families lost.

    subject, batch  descriptions of the model and of its global batch
    command  the command line that runs the best plan
    top      number of plans in the table
    """
    best = search.best
    lines = [
        f"{subject} on {in_words(cluster)}, {batch}",
        f"{search.considered} plans considered, {search.fitted} fit, {len(search.proposals)} simulated, in "
        f"{search.seconds:.1f} s",
        "",
        *_rows(search.proposals[:top], f"{best.forecast.rate[1]}/s"),
    ]
    if best.runnable:
        lines += ["", f"no plan that this version runs fits; the first lacks: {best.runnable}"]
    if search.later:
        lines += ["", "faster, but not in this version yet:"]
    for p in search.later:
        gain = 1 - p.forecast.step_s / best.forecast.step_s
        lines += [f"  {gain:.0%} faster: {_shown(str(p.plan))}", f"    lacks: {p.runnable}"]
    lines += [
        "",
        f"best: {best.plan}",
        *(f"  {line}" for line in forecast_lines(best.forecast)),
        *(f"  {line}" for line in rank_map(best.layout, cluster)),
    ]
    # a plan that cannot run has no command
    if not best.runnable:
        lines += ["", f"to run it: {command}"]
    lines += ["", "why the other families lost:", *_lost_lines(search.lost)]
    if search.notes:
        lines += ["", *search.notes]
    return "\n".join(lines)


def first_text(proposals: Sequence[Proposal], looked_at: int) -> str:
    """Returns the table of the best plans so far, shown while a search continues; `looked_at`: number of layouts."""
    rows = _rows(proposals, f"{proposals[0].forecast.rate[1]}/s")
    plans = "one plan" if looked_at == 1 else f"{looked_at:,} plans"
    return "\n".join([f"so far, of {plans} looked at (the search goes on; ctrl-C ends with the best):", *rows, ""])


def _lost_lines(lost: dict[str, str]) -> list[str]:
    """Returns one line for each reason in {family: reason}, those of memory last; equal reasons share a line."""
    names: dict[str, list[str]] = {}
    for name, why in sorted(lost.items(), key=lambda item: item[1].startswith("needs")):
        names.setdefault(why, []).append(name)
    together = {why: ", ".join(some) for why, some in names.items()}
    width = min(24, max((len(name) for name in together.values()), default=0))
    lines = [f"  {name:{width}}  {why}" for why, name in together.items()]
    return [
        *lines[:MOST_LOST],
        *([f"  and {len(lines) - MOST_LOST} more, in --json"] if len(lines) > MOST_LOST else []),
    ]


def _rows(proposals: Sequence[Proposal], rate: str) -> list[str]:
    """Returns a table with one line for each plan, and columns for a host's bytes if any plan offloads.

    rate  head of the column of samples or tokens per second
    """
    tiers = [tier for tier in NAMES if any(tier in p.forecast.room.needed for p in proposals)]
    rows = [
        [
            str(i + 1), seconds_text(p.forecast.step_s), _rate(p.forecast.rate[0]), f"{p.forecast.mfu:.1%}",
            bytes_text(p.forecast.needed_bytes), *(_of_host(p.forecast.room, tier) for tier in tiers),
            _shown(str(p.plan)),
        ]
        for i, p in enumerate(proposals)
    ]  # fmt: skip
    return table(["", "step", rate, "MFU", "memory", *(f"host's {NAMES[tier]}" for tier in tiers), "plan"], rows)


def _of_host(room: Room, tier: str) -> str:
    if tier not in room.needed:
        return "-"
    there = room.there(tier)
    return f"{bytes_text(room.needed[tier])} of {'?' if there is None else bytes_text(there)}"


def _shown(plan: str, most: int = 110) -> str:
    return plan if len(plan) <= most else plan[: most - 3] + "..."


def _rate(value: float) -> str:
    """Returns a number as text with three digits and k, M, G or T."""
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Returns the head and the rows as lines of aligned columns; each row has as many cells as the head."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]


def forecast_lines(forecast: Forecast) -> list[str]:
    """Returns lines for people: the parts of the step's time, the terms of memory, the sources of the figures."""
    lines = [
        f"step {seconds_text(forecast.step_s)}, MFU {forecast.mfu:.1%} ("
        f"{'FLOPs counted from the trace' if forecast.convention == 'counted' else forecast.convention}), "
        f"{_rate(forecast.rate[0])} {forecast.rate[1]}/s"
    ]  # fmt: skip
    for name, seconds in sorted(forecast.parts.items(), key=lambda item: -item[1]):
        if seconds > 0:
            lines.append(f"  {seconds / forecast.step_s:6.1%}  {seconds_text(seconds):>8}  {name}")
    if forecast.bubble:
        lines.append(f"  pipeline bubble {forecast.bubble:.1%}")
    if forecast.halos:
        links = ", ".join(f"{bytes_text(size)} over {link}" for link, size in forecast.halos.items())
        lines.append(f"  a tile is sent {links} by others in a step")
    worst = forecast.worst
    lines.append(
        f"memory of the fullest rank: {bytes_text(worst.allocated)} allocated, {bytes_text(worst.reserved)} reserved, "
        f"and {bytes_text(CONTEXT_BYTES)} outside the allocator; peak at: {worst.peak}"
    )
    for name, size in sorted(worst.terms.items(), key=lambda item: -item[1]):
        lines.append(f"  {size / worst.allocated:6.1%}  {bytes_text(size):>9}  {name}")
    lines += [f"tiers keep {line}" for line in forecast.room.lines]
    lines.append("rests on:")
    lines += [f"  {name}: {basis}" for name, basis in forecast.basis.items() if basis != "none"]
    return lines


def rank_map(layout: Layout, cluster: Cluster) -> list[str]:
    """Returns lines for people with each axis's ranks, their distance, and the slowest tier that it crosses."""
    lines, stride = ["ranks, innermost first:"], 1
    for name, size in (
        ("tp", layout.tp), *reversed(layout.inner), ("dp_shard", layout.shard), ("pp", layout.pp),
        ("dp_replicate", layout.replicas),
    ):  # fmt: skip
        if size > 1:
            tier = cluster.tiers[cluster.tier_of((size - 1) * stride + 1)]
            lines.append(f"  {name:12} {size:5} ranks, {stride} apart, over {tier.name}")
            stride *= size
    return lines if len(lines) > 1 else ["one rank"]


def proposal_dict(p: Proposal) -> dict[str, Any]:
    """Returns a proposal as a dict for JSON, with the keys of `Forecast.as_dict`.

    runnable  True, or text on what this version lacks
    """
    return {
        "plan": str(p.plan), "family": p.family, "runnable": p.runnable or True, "world_size": p.plan.world_size,
        "micro_batch": p.layout.micro_batch, "needed_bytes": p.forecast.needed_bytes, **p.forecast.as_dict(),
    }  # fmt: skip


def lacking(plan: Plan) -> str:
    """Returns why this version, or any version, cannot run the plan; "" if it can."""
    return "; ".join(f"{rule.combination}: {rule.reason}" for rule in applying(plan))


def senseless(plan: Plan) -> bool:
    """Whether no version can run the plan."""
    return any(rule.kind == "illegal" for rule in applying(plan))


@dataclass
class Proposal:
    """A plan with its layout and its forecast; `family`: name of its kind (`candidates.family`)."""

    plan: Plan
    layout: Layout
    forecast: Forecast
    family: str

    @property
    def runnable(self) -> str:
        """Returns "" if this version can run the plan, else text on what it lacks."""
        return lacking(self.plan)


@dataclass
class Search:
    """The result of a search.

    proposals  plans that fit and that this version runs, best first; if there are none, plans that it only forecasts
    later      a few faster plans that this version cannot run yet
    lost       {family: why it lost} of all families but the best plan's
    notes      lines for people
    considered number of layouts tried, of which `fitted` fit
    seconds    seconds that the search took
    capacity   bytes of a device that a plan could use
    stopped    whether it was interrupted, so that these are the best so far
    cluster    the part of the cluster that was planned on, if no plan uses all devices; else None
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
