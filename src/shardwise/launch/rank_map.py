"""Makes the map of a job: which ranks are on which node, and over which link the ranks of each axis communicate."""

from __future__ import annotations

from shardwise.cluster import Cluster, Tier
from shardwise.layout import Plan
from shardwise.layout.grid import AXES, Grid

FEW = 4  # up to so many nodes are all listed


def axes_of(plan: Plan) -> list[tuple[str, int, int]]:
    """Returns (axis, degree, stride between neighbours in ranks) of each axis of degree > 1, innermost first."""
    rows, stride = [], 1
    for axis, degree in zip(reversed(AXES), reversed(Grid(plan).shape), strict=True):
        if degree > 1:
            rows.append((axis, degree, stride))
        stride *= degree
    return rows


def leaves_node(degree: int, stride: int, per_node: int) -> bool:
    """Whether any group of an axis spans more than one node.

    degree, stride   of the axis, as `axes_of` returns them; `per_node`: ranks of a node
    """
    span = stride * degree  # `stride` interleaved groups begin at each multiple of it
    return stride * (degree - 1) >= per_node or per_node % span != 0


def map_lines(plan: Plan, nodes: int, per_node: int, cluster: Cluster | None = None) -> list[str]:
    """Returns lines of text: nodes with their ranks, then each axis with its link.

    nodes, per_node   number of nodes, and ranks of each; `cluster`: for names and rates of links, None: without these
    """
    # of many nodes the first two and the last show the pattern
    shown = range(nodes) if nodes <= FEW else (0, 1, nodes - 1)
    lines = ["ranks on nodes:"]
    for node in shown:
        if node == nodes - 1 > FEW - 1:
            lines.append("  ...")
        first, last = node * per_node, (node + 1) * per_node - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        lines.append(f"  node {node}: {ranks}{_shared_coordinates(plan, first, last)}")
    rows = axes_of(plan)
    if rows:
        lines.append("axes, innermost first:")
    for axis, degree, stride in rows:
        crosses = nodes > 1 and leaves_node(degree, stride, per_node)
        lines.append(f"  {axis:12} {degree:5} ranks, {stride} apart, {_link(degree, stride, crosses, cluster)}")
    return [*lines, *_slow(plan, nodes, per_node)]


def _shared_coordinates(plan: Plan, first: int, last: int) -> str:
    """Returns a text with the coordinates that ranks `first` to `last` share, such as " (pp 0)"; "" without any."""
    grid = Grid(plan)
    low, high = grid.coordinates(first), grid.coordinates(last)
    outer = []
    for axis in AXES:
        if low[axis] != high[axis]:
            break
        if getattr(plan, axis, 1) != 1:
            outer.append(f"{axis} {low[axis]}")
    return f" ({', '.join(outer)})" if outer else ""


def _link(degree: int, stride: int, crosses: bool, cluster: Cluster | None) -> str:
    """Returns a text on where the ranks of an axis communicate, and over which link (parameters as `link_of`)."""
    where = "between nodes" if crosses else "inside a node"
    if cluster is None:
        return where
    tier = link_of(degree, stride, crosses, cluster)
    return f"{where}, over {tier.name} ({tier.gbps.value:g} GB/s a device)"


def link_of(degree: int, stride: int, crosses: bool, cluster: Cluster) -> Tier:
    """Returns the tier of the cluster that an axis's messages use.

    degree, stride   of the axis, as `axes_of` returns them; `crosses`: whether its groups span several nodes
    """
    level = cluster.tier_of(stride * (degree - 1) + 1)
    return cluster.tiers[max(level, 1) if crosses and len(cluster.tiers) > 1 else level]


def _slow(plan: Plan, nodes: int, per_node: int) -> list[str]:
    """Returns [a remark] on the axes tp and cp_ulysses if their groups span several nodes; else []."""
    inside = {"tp", "cp_ulysses"}  # what sends activations in every layer and waits for them
    crossing = [
        axis for axis, degree, stride in axes_of(plan) if axis in inside and leaves_node(degree, stride, per_node)
    ]
    if nodes == 1 or not crossing:
        return []
    return [
        f"note: {', '.join(crossing)} goes over nodes, and waits for messages in every layer: at most {per_node} ranks "
        "of it keep it inside a node"
    ]
