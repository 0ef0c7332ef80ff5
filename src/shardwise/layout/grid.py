"""The rank grid: the coordinates of a rank on each axis, and the ranks of each axis group.

The axes run from outermost (slowest links) to innermost (fastest):

    dp_replicate . pp . dp_shard . domain0 . domain1 . domain2 . cp . cp_ulysses . tp

where a plan's `domain` has one axis for each dim of space that it tiles. So
rank = ((dp_replicate * P_pp + pp) * P_dp_shard + dp_shard) ... in mixed radix. For dp_replicate=2, dp_shard=2:

    rank          0      1      2      3
    dp_replicate  0      0      1      1
    dp_shard      0      1      0      1
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.layout.plan import ALONG, Plan

SPACE = ("domain0", "domain1", "domain2")  # one for each dim of space: tiles are products of shares
INNER = (*SPACE, *ALONG)  # axes that cut positions: their ranks share samples and sum gradients
AXES = ("dp_replicate", "pp", "dp_shard", *INNER, "tp")  # outermost first
CHUNKS = "chunks"  # name of the axis of `position_chunks`, which one rank computes one after the other; the innermost


def inner_axes(domain: tuple[int, ...], **along: int) -> tuple[tuple[str, int], ...]:
    """Returns (name, degree) of each axis that cuts positions, outermost first.

    domain  degrees of the first len(domain) axes of space, the only ones returned;  along  degrees of cp, cp_ulysses
    """
    return (*zip(SPACE, domain, strict=False), *((name, along.get(name, 1)) for name in ALONG))


@dataclass(frozen=True)
class Grid:
    """Rank arithmetic of one plan. Pure: no process group is needed."""

    plan: Plan

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the degree of each axis, in the order of `AXES`."""
        tiles = dict(zip(SPACE, self.plan.domain, strict=False))
        return tuple(tiles.get(axis, 1) if axis in SPACE else getattr(self.plan, axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns axis -> the rank's coordinate (0 to degree - 1) on it, for all `AXES`."""
        coordinate = {}
        for axis, degree in zip(reversed(AXES), reversed(self.shape), strict=True):  # the last axis varies fastest
            rank, coordinate[axis] = divmod(rank, degree)
        return {axis: coordinate[axis] for axis in AXES}

    def rank(self, coordinates: dict[str, int]) -> int:
        """Returns the rank at these coordinates (absent axes are 0)."""
        rank = 0
        for axis, degree in zip(AXES, self.shape, strict=True):
            rank = rank * degree + coordinates.get(axis, 0)
        return rank

    def shard_index(self, coordinates: dict[str, int]) -> int:
        """Returns the index of these coordinates within the group of dp_shard and the axes that cut positions."""
        index = 0
        for axis, degree in zip(AXES, self.shape, strict=True):
            if axis == "dp_shard" or axis in INNER:
                index = index * degree + coordinates[axis]
        return index

    def group(self, rank: int, axes: tuple[str, ...]) -> list[int]:
        """Returns the ranks that differ from `rank` on `axes` alone, `rank` among them, in rank order."""
        mine = self.coordinates(rank)
        rest = [axis for axis in AXES if axis not in axes]
        everyone = range(math.prod(self.shape))
        return [r for r in everyone if all(self.coordinates(r)[a] == mine[a] for a in rest)]


def placement(plan: Plan, devices: int) -> tuple[list[dict[str, int]], list[str]]:
    """Returns (for each rank {"rank", "node", "device", axis: coordinate}, axes with a group on several nodes).

    devices  number of ranks on each node, filled in rank order
    """
    grid = Grid(plan)
    ranks = range(math.prod(grid.shape))
    rows = [{"rank": r, "node": r // devices, "device": r % devices, **grid.coordinates(r)} for r in ranks]
    if plan.ep > 1:  # no axis of its own: neighbours on dp_shard and the axes that cut positions
        rows = [{**row, "ep": grid.shard_index(row) % plan.ep} for row in rows]
    leaving, stride = [], 1
    for axis, degree in zip(reversed(AXES), reversed(grid.shape), strict=True):
        # a group of the axis: `degree` ranks, `stride` apart
        spans = stride * (degree - 1) + 1
        # it is wider than a node, or some group begins on one and ends on the next
        if degree > 1 and (spans > devices or (devices % (stride * degree) and len(ranks) > devices)):
            leaving.append(axis)
        if axis == "tp" and plan.ep > 1:  # ranks of ep are a tp degree apart
            spans = degree * (plan.ep - 1) + 1
            if spans > devices or (devices % (degree * plan.ep) and len(ranks) > devices):
                leaving.append("ep")
        stride *= degree
    return rows, leaving
