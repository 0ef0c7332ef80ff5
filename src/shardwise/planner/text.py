"""Proposals and forecasts for a reader."""

from __future__ import annotations

from typing import Any

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.costs.memory import CONTEXT_BYTES
from shardwise.planner.propose import Proposal, Search
from shardwise.planner.units import bytes_text, seconds_text
from shardwise.simulator.forecast import Forecast


def search_text(search: Search, cluster: Cluster, subject: str, batch: str, command: str, top: int) -> str:
    """The table, the best plan in detail, why the others lost."""
    head = ["", "step", f"{search.best.forecast.rate[1]}/s", "MFU", "memory", "runs", "plan"]
    rows = [
        [
            str(i + 1), seconds_text(p.forecast.step_s), _rate(p.forecast.rate[0]), f"{p.forecast.mfu:.1%}",
            bytes_text(p.forecast.needed_bytes), "yes" if not p.runnable else "not yet", _shown(str(p.plan)),
        ]
        for i, p in enumerate(search.proposals[:top])
    ]  # fmt: skip
    best = search.best
    lines = [
        f"{subject} on {cluster} ({cluster.world_size} devices), {batch}",
        f"{search.considered} plans considered, {search.fitted} fit, {len(search.proposals)} simulated, in "
        f"{search.seconds:.1f} s",
        "",
        *table(head, rows),
        "",
        f"best: {best.plan}",
        *(f"  {line}" for line in forecast_lines(best.forecast)),
        *(f"  {line}" for line in rank_map(best.layout, cluster)),
        "",
        *_to_run(search, command),
    ]
    lines += ["", "why the other families lost:"]
    width = max((len(name) for name in search.lost), default=0)
    lines += [f"  {name:{width}}  {why}" for name, why in search.lost.items()]
    if search.notes:
        lines += ["", *search.notes]
    return "\n".join(lines)


def _to_run(search: Search, command: str) -> list[str]:
    """The command, of the best that runs, and what keeps the best of all from it."""
    best = search.best
    if not best.runnable:
        return [f"to run it: {command}"]
    lines = [f"this version cannot run it yet: {best.runnable}"]
    now = next((p for p in search.proposals if not p.runnable), None)
    if now is not None:
        slower = now.forecast.step_s / best.forecast.step_s - 1
        lines.append(f"the best that runs today ({slower:+.0%}): {command}")
    return lines


def _shown(plan: str, most: int = 110) -> str:
    return plan if len(plan) <= most else plan[: most - 3] + "..."


def _rate(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Columns, aligned."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]


def forecast_lines(forecast: Forecast) -> list[str]:
    """Where the step's time goes, what the memory holds, what the figures rest on."""
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
    worst = forecast.worst
    lines.append(
        f"memory of the fullest rank: {bytes_text(worst.allocated)} allocated, {bytes_text(worst.reserved)} reserved, "
        f"and {bytes_text(CONTEXT_BYTES)} outside the allocator; peak at: {worst.peak}"
    )
    for name, size in sorted(worst.terms.items(), key=lambda item: -item[1]):
        lines.append(f"  {size / worst.allocated:6.1%}  {bytes_text(size):>9}  {name}")
    lines.append("rests on:")
    lines += [f"  {name}: {basis}" for name, basis in forecast.basis.items() if basis != "none"]
    return lines


def rank_map(layout: Layout, cluster: Cluster) -> list[str]:
    """How the axes lie on nodes and links."""
    lines, stride = ["ranks, innermost first:"], 1
    for name, size in (
        ("tp", layout.tp), ("cp_ulysses", layout.ulysses), ("cp", layout.cp), ("dp_shard", layout.shard),
        ("pp", layout.pp), ("dp_replicate", layout.replicas),
    ):  # fmt: skip
        if size > 1:
            tier = cluster.tiers[cluster.tier_of((size - 1) * stride + 1)]
            lines.append(f"  {name:12} {size:5} ranks, {stride} apart, over {tier.name}")
            stride *= size
    return lines if len(lines) > 1 else ["one rank"]


def proposal_dict(p: Proposal) -> dict[str, Any]:
    """A proposal for JSON."""
    return {
        "plan": str(p.plan), "family": p.family, "runnable": p.runnable or True, "world_size": p.plan.world_size,
        "micro_batch": p.layout.micro_batch, "needed_bytes": p.forecast.needed_bytes, **p.forecast.as_dict(),
    }  # fmt: skip
