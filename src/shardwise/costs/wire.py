"""How long a collective takes: by tables measured inside a node or between nodes, else by a formula.

    inside a domain   microseconds by op, ranks and bytes (collectives.csv), else bytes on the link over its rate
    between domains   microseconds by op, nodes, ranks of each and bytes where a probe measured them, else
                      a ring whose slowest hop is the outer link: each of the g ranks that a domain contributes
                      drives its own port, so the bus bandwidth is min(inside, g x port), and every domain adds a hop

    all-to-all        each rank sends the others their part by its own port, and its neighbours theirs by the domain's
                      link: no port carries anything for another rank

Bytes of a collective are those of the whole tensor, of an all-to-all those that one rank has. *What this does not do*:
congestion between groups, trees that beat rings on latency beyond the logarithm taken for all-reduce.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from shardwise.cluster import (
    BetweenTable,
    Cluster,
    CollectiveTable,
    collective_table,
    measured_between,
    measured_collectives,
)
from shardwise.cluster.tables import bus_factor

# Inside a step a collective also waits for the slowest of its ranks. SimuMax fits 5.5 to 9.2 microseconds for each rank
# beyond the first on 8 B200, where nccl-tests of the same sizes show none
SKEW_US, SKEWED_RANKS = 7.0, 8
# Bytes a second that DeepEP's kernels hand to a rank inside a node by 20 processors, their default: between 348 and 302
# GB/s by 16 (dispatch, combine) and 494 and 420 by 24, B200 and GB200 alike (docs/README_Hybrid-EP.md of DeepEP's
# hybrid-ep branch). HybridEP's take 530 to 550 of 8 ranks and 450 to 485 of 32, as an all-to-all of NCCL does
DEEPEP_RATE = 391e9
INSIDE_SHARE = 0.75  # of the link's rate that large collectives reach, without a table (assumed)


@dataclass(frozen=True)
class RankGroup:
    """A group of `size` ranks whose numbers are `stride` apart."""

    size: int
    stride: int = 1

    @property
    def span(self) -> int:
        return self.size * self.stride


@lru_cache(maxsize=4096)
def _lies(group: RankGroup, unit: int, ranks: int) -> tuple[bool, int]:
    """Returns (whether each group of an axis lies in one unit of `unit` ranks, fewest ranks of a group in a unit)."""
    # groups lie side by side in a unit
    if unit % group.span == 0:
        return True, group.size
    # each group covers whole units
    if unit % group.stride == 0 and group.span % unit == 0:
        return False, unit // group.stride
    # each rank of a group in a unit of its own
    if group.stride % unit == 0:
        return group.size == 1, 1
    fewest = group.size
    bases = range(0, min(max(ranks, group.span), group.span * unit), group.span)  # then the pattern repeats
    # how a group lies on units is told by where its first rank stands in one
    for first in {(base + within) % unit for base in bases for within in range(min(group.stride, unit))}:
        there = Counter((first + place * group.stride) // unit for place in range(group.size))
        fewest = min(fewest, *there.values())
    return fewest == group.size, fewest


@dataclass(frozen=True)
class Wire:
    """Times of communication on one cluster, in seconds.

    ranks   of the plan, all groups of an axis among them; by default as many as the cluster has devices
    """

    cluster: Cluster
    ranks: int = 0

    @property
    def table(self) -> CollectiveTable | None:
        """Returns times of collectives measured inside a domain: the cluster file's, else the catalogue's, or None."""
        if self.cluster.collectives:
            return measured_collectives(self.cluster.collectives)
        return collective_table(self.cluster.device.table) if self.cluster.device.table else None

    def between(self, op: str, tier: int) -> BetweenTable | None:
        """Returns the table measured between units of the innermost tier, or None where it lacks this op."""
        table = measured_between(self.cluster.between) if tier == 1 else None
        return table if table is not None and op in table.times else None

    @property
    def bandwidth(self) -> float:
        """Returns bytes a second of the device's own memory, for copies to and from communication buffers."""
        return self.cluster.device.memory_bandwidth_gbps.value * 1e9

    def tier(self, group: RankGroup) -> int:
        """Returns the index of the outermost tier that any group of this axis crosses; nodes may split some groups."""
        for index, unit in enumerate(self.cluster.sizes):
            if _lies(group, unit, self.ranks or self.cluster.world_size)[0]:
                return index
        return len(self.cluster.tiers) - 1

    def inside(self, group: RankGroup) -> int:
        """Returns how many ranks of a group lie in one unit of the innermost tier: the fewest where dealt unevenly."""
        return _lies(group, self.cluster.sizes[0], self.ranks or self.cluster.world_size)[1]

    def collective(self, op: str, group: RankGroup, size_bytes: float) -> float:
        """Returns seconds of an all_reduce, all_gather, reduce_scatter or all_to_all of a tensor of `size_bytes`."""
        if group.size <= 1 or size_bytes <= 0:
            return 0.0
        tier = self.tier(group)
        if tier == 0 or self._one_domain(group):
            return self._inside(op, group.size, size_bytes)
        local = self.inside(group)
        nodes = math.ceil(group.size / local)
        measured = self.between(op, tier)
        if measured is not None:
            return measured.seconds(op, nodes, local, size_bytes)
        hop = self.cluster.tiers[tier].latency_us.value * 1e-6
        base = self._inside(op, local, 1.0) if local > 1 else 10e-6
        # no ring: each rank sends every other one its part by its own port
        if op == "all_to_all":
            return base + (nodes - 1) * hop + self._to_each(group.size, local, size_bytes, tier)
        op = self._made_of(op)
        on_link = bus_factor(op, group.size) * size_bytes
        rate = local * self.cluster.tiers[tier].gbps.value * 1e9
        if local > 1:
            # a measured domain limits what its ranks pass on to each other
            rate = min(rate, bus_factor(op, local) * size_bytes / self._inside(op, local, size_bytes))
        if op == "all_reduce":  # trees
            return base + 2 * math.ceil(math.log2(nodes)) * hop + on_link / rate
        near = self.cluster.tiers[0].latency_us.value * 1e-6  # a ring meets every rank in turn
        return base + (nodes - 1) * hop + (group.size - nodes) * near + on_link / rate

    def pieces(self, op: str, group: RankGroup, size_bytes: float, pieces: int) -> float:
        """Returns seconds of a collective in `pieces` equal messages, one after the other, each with all its hops."""
        return pieces * self.collective(op, group, size_bytes / pieces)

    def all_reduce(self, inner: RankGroup, outer: RankGroup, size_bytes: float, pieces: int = 1) -> float:
        """Returns seconds of an all-reduce over two axes: where ranks lie evenly apart as over one of all of them, else
        within the inner one, across, and back."""
        if inner.size == 1:
            return self.pieces("all_reduce", outer, size_bytes, pieces)
        if outer.size == 1 or outer.stride == inner.span:
            both = RankGroup(inner.size * outer.size, inner.stride)
            return self.pieces("all_reduce", both, size_bytes, pieces)
        within = (self.pieces(op, inner, size_bytes, pieces) for op in ("reduce_scatter", "all_gather"))
        return sum(within) + self.pieces("all_reduce", outer, size_bytes / inner.size, pieces)

    def rows(self, group: RankGroup, size_bytes: float, copies: int, most: float = math.inf) -> float:
        """Returns the seconds of an all-to-all of rows for `copies` experts each, dealt at random over the group.

        A row goes once to each rank that has some of its experts (NVIDIA/Megatron-LM issue 2692), and to each node by
        one of its ranks: DeepEP and HybridEP hold a bit for each rank, and add up what comes back.

        size_bytes  of all copies that one rank sends
        most        bytes a second that a rank receives at most inside a node
        """
        local = self.inside(group)
        nodes = math.ceil(group.size / local)
        near = size_bytes / copies * _met(group.size, copies)
        if nodes == 1 or local == 1 or self._one_domain(group):
            return max(self.collective("all_to_all", group, near), near / most)
        far = size_bytes / copies * _met(nodes, copies) * (nodes - 1) / nodes / self._rate(self.tier(group))
        near_s = max(self._inside("all_to_all", local, near), near / most)
        return max(far, near_s) + self.collective("all_to_all", group, 1.0)

    def _to_each(self, ranks: int, local: int, size_bytes: float, tier: int) -> float:
        """Returns the seconds of an all-to-all across nodes, `local` of its ranks in this one: the slower link's."""
        far = size_bytes * (ranks - local) / ranks / self._rate(tier)
        near = self._inside("all_to_all", local, size_bytes * local / ranks) if local > 1 else 0.0
        return max(far, near)

    def _made_of(self, op: str) -> str:
        """Returns the collective of which one without a table is made: gloo's reduce-scatter is an all-reduce.

        Counted on a link between two hosts of two CPU ranks: 1.5 times the tensor each way, where a ring sends 0.75.
        """
        return "all_reduce" if op == "reduce_scatter" and self.cluster.device.kind == "cpu" else op

    def _one_domain(self, group: RankGroup) -> bool:
        """Whether a group lies in one domain: rack-scale tiers have the rate of the innermost one."""
        return all(t.name.startswith("nvlink") for t in self.cluster.tiers[: self.tier(group) + 1])

    def _inside(self, op: str, ranks: int, size_bytes: float) -> float:
        """Returns seconds of a collective inside one domain: by a table, else by a formula over the link's rate."""
        table = self.table
        if table is not None and op in table.times:
            return table.seconds(op, ranks, size_bytes)
        own, op = self.cluster.tiers[0], self._made_of(op)
        share = 1.0 if own.gbps.kind == "measured" else INSIDE_SHARE
        steps = (ranks - 1) * (2 if op == "all_reduce" else 1)
        return bus_factor(op, ranks) * size_bytes / (own.gbps.value * 1e9 * share) + steps * own.latency_us.value * 1e-6

    def basis(self, op: str, group: RankGroup) -> str:
        """Returns where the time of a collective comes from: a measured table and how near, or a formula, as text."""
        if group.size <= 1:
            return "none"
        tier = self.tier(group)
        table = self.table
        # within one domain a measured table is used, if there is one for this collective
        if tier == 0 or self._one_domain(group):
            if table is None or op not in table.times:
                return f"formula: {self.cluster.tiers[0].name} rate"
            measured = sorted(table.times[op])
            near = (
                ""
                # a table has some numbers of ranks; between them times are scaled
                if group.size in measured
                else f", scaled from {min(measured, key=lambda p: abs(p - group.size))} ranks"
            )
            return f"measured: {table.nccl if self.cluster.collectives else 'NCCL ' + table.nccl} on {table.name}{near}"
        local = self.inside(group)
        domains = math.ceil(group.size / local)
        between = self.between(op, tier)
        if between is not None:
            near = between.near(op, domains, local)
            what = f"measured: {self.cluster.tiers[tier].name} between {domains} nodes, {local} rank(s) of each"
            return f"{what}, {near}" if near else what
        return f"formula: {self.cluster.tiers[tier].name}, ring between {domains} domains"

    def skew(self, ranks: int) -> float:
        """Returns the seconds that a collective inside a step waits for its slowest rank, by ranks of one domain.

        Beyond as many as were measured it grows as the mean of the largest of so many waits does (exponential ones).
        """
        near = min(ranks, self.cluster.sizes[0])
        more = sum(1 / n for n in range(2, near + 1)) / sum(1 / n for n in range(2, SKEWED_RANKS + 1))
        return SKEW_US * 1e-6 * (near - 1 if near <= SKEWED_RANKS else (SKEWED_RANKS - 1) * more)

    def exchange(self, came: Mapping[int, float], group: RankGroup, calls: float) -> float:
        """Returns the seconds of `calls` exchanges; `came`: bytes sent to a rank in all, by distance of the sender.

        Links of different tiers work at the same time; of all ranks of the axis, that which has most to wait for.
        """
        if not came or calls <= 0:
            return 0.0
        # the links of one domain are alike, so the sum of what came tells
        if self.tier(group) == 0 or self._one_domain(group):
            # only neighbours at the ends of an axis: measured as such
            if group.size > 2 and came.keys() <= {-1, 1} and self.table is not None and "halo" in self.table.times:
                return calls * self._inside("halo", group.size, sum(came.values()) / calls)
            # an all-to-all's size counts what a rank keeps, too
            whole = sum(came.values()) * group.size / (group.size - 1)
            return calls * self._inside("all_to_all", group.size, whole / calls)
        # over several tiers the slowest link, and its latency, tell
        spread = self.by_tier(came, group)
        far = max(spread)
        sent = max(size / self._rate(tier) for tier, size in spread.items())
        return calls * (10e-6 + self.cluster.tiers[far].latency_us.value * 1e-6) + sent

    def by_tier(self, came: Mapping[int, float], group: RankGroup) -> dict[int, float]:
        """Returns bytes by tier for the rank that waits longest; `came`: bytes by how far off their sender is."""
        return _worst(self, tuple(sorted(came.items())), group)

    def _rate(self, tier: int) -> float:
        """Returns bytes a second of one rank's own link."""
        link = self.cluster.tiers[tier]
        share = INSIDE_SHARE if tier == 0 and link.gbps.kind != "measured" else 1.0
        return link.gbps.value * 1e9 * share

    def crosses(self, first: int, second: int) -> int:
        """Returns the tier over which two ranks talk."""
        for index, size in enumerate(self.cluster.sizes):
            if first // size == second // size:
                return index
        return len(self.cluster.tiers) - 1

    def send(self, size_bytes: float, first: int, second: int) -> float:
        """Returns seconds of a message between two ranks."""
        index = self.crosses(first, second)
        measured = self.between("send", index)
        if measured is not None:
            return measured.seconds("send", 2, 1, size_bytes)
        return self.cluster.tiers[index].latency_us.value * 1e-6 + size_bytes / self._rate(index)


def _met(places: int, copies: int) -> float:
    """Returns how many of `places` have one of `copies` experts at least, in the mean, each dealt at random."""
    return places * (1 - (1 - 1 / places) ** copies)


MOST_GROUPS = 64  # of one axis that are looked at: how they lie on nodes repeats


@lru_cache(maxsize=4096)
def _worst(wire: Wire, came: tuple[tuple[int, float], ...], group: RankGroup) -> dict[int, float]:
    """Returns {tier: bytes} that arrive at the rank of a group for which they take longest.

    came  (distance in ranks, bytes) from each sender
    """
    ranks = max(wire.ranks or wire.cluster.world_size, group.span)
    firsts = [at + within for at in range(0, ranks, group.span) for within in range(group.stride)][:MOST_GROUPS]
    best: dict[int, float] = {}
    longest = -1.0
    for first, place in product(firsts, range(group.size)):
        by_tier: dict[int, float] = {}
        for distance, size in came:
            # a rank at an edge has fewer neighbours
            if 0 <= place + distance < group.size:
                tier = wire.crosses(first + place * group.stride, first + (place + distance) * group.stride)
                by_tier[tier] = by_tier.get(tier, 0.0) + size
        seconds = max((size / wire._rate(tier) for tier, size in by_tier.items()), default=-1.0)
        # the rank that waits longest stands for the group
        if seconds > longest:
            best, longest = by_tier, seconds
    return best
