"""`Wire`: seconds of a collective, by tables measured inside a node or between nodes, else by a formula.

    inside a domain   microseconds by op, ranks and bytes (collectives.csv), else bytes on the link over its rate
    between domains   microseconds by op, nodes, ranks of each and bytes if a probe measured them, else
                      a ring whose slowest hop is the outer link: each of the g ranks that a domain contributes
                      drives its own port, so the bus bandwidth is min(inside, g x port), and every domain adds a hop

    all-to-all        each rank sends to ranks of other domains by its own port, and to those of its domain by the
                      domain's link; no port carries data of another rank

A domain is a unit of the innermost tier (a node, or what NVLink joins). Bytes of a collective are those of the full
tensor, of an all-to-all those that one rank has. *What this does not do*:
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

# Inside a step a collective also waits for its slowest rank. SimuMax fits 5.5 to 9.2 microseconds for each rank beyond
# the first on 8 B200, while nccl-tests of the same sizes show none
SKEW_US, SKEWED_RANKS = 7.0, 8
# Bytes a second that a rank receives inside a node by DeepEP's kernels on 20 multiprocessors, their default: between
# 348 and 302 GB/s on 16 (dispatch, combine), 494 and 420 on 24, B200 as GB200 (docs/README_Hybrid-EP.md of DeepEP's
# hybrid-ep branch). HybridEP's take 530 to 550 of 8 ranks and 450 to 485 of 32, as an all-to-all of NCCL does
DEEPEP_RATE = 391e9
INSIDE_SHARE = 0.75  # share of the link's rate that large collectives reach, without a table (assumed)


@dataclass(frozen=True)
class RankGroup:
    """The groups of one axis: `size` ranks each, at distances of `stride`."""

    size: int
    stride: int = 1

    @property
    def span(self) -> int:
        return self.size * self.stride


@lru_cache(maxsize=4096)
def _lies(group: RankGroup, unit: int, ranks: int) -> tuple[bool, int]:
    """Returns (whether each group lies in one unit of `unit` ranks, fewest ranks of a group in a unit that has some).

    ranks  number of ranks of the plan, over which the groups of the axis are laid out
    """
    # each unit holds complete groups
    if unit % group.span == 0:
        return True, group.size
    # each group covers complete units
    if unit % group.stride == 0 and group.span % unit == 0:
        return False, unit // group.stride
    # each rank of a group in a unit of its own
    if group.stride % unit == 0:
        return group.size == 1, 1
    fewest = group.size
    bases = range(0, min(max(ranks, group.span), group.span * unit), group.span)  # then the pattern repeats
    # the position of a group's first rank in its unit decides how the group is spread over units
    for first in {(base + within) % unit for base in bases for within in range(min(group.stride, unit))}:
        there = Counter((first + place * group.stride) // unit for place in range(group.size))
        fewest = min(fewest, *there.values())
    return fewest == group.size, fewest


@dataclass(frozen=True)
class Wire:
    """Times of communication on one cluster, in seconds.

    ranks   number of ranks of the plan; 0: as many as the cluster has devices
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
        """Returns the table measured between nodes if `tier` is 1 and it has `op`, else None."""
        table = measured_between(self.cluster.between) if tier == 1 else None
        return table if table is not None and op in table.times else None

    @property
    def bandwidth(self) -> float:
        """Returns bytes a second of the device's own memory, for copies to and from communication buffers."""
        return self.cluster.device.memory_bandwidth_gbps.value * 1e9

    def tier(self, group: RankGroup) -> int:
        """Returns the index of the outermost tier that some group of this axis crosses (0: all inside one unit)."""
        for index, unit in enumerate(self.cluster.sizes):
            if _lies(group, unit, self.ranks or self.cluster.world_size)[0]:
                return index
        return len(self.cluster.tiers) - 1

    def inside(self, group: RankGroup) -> int:
        """Returns the number of ranks of a group in one unit of the innermost tier, the fewest if it is uneven."""
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
        # not a ring, since each rank sends to every other rank directly
        if op == "all_to_all":
            return base + (nodes - 1) * hop + self._to_each(group.size, local, size_bytes, tier)
        op = self._made_of(op)
        on_link = bus_factor(op, group.size) * size_bytes
        rate = local * self.cluster.tiers[tier].gbps.value * 1e9
        if local > 1:
            # ranks of a domain cannot pass data on to each other faster than its own collectives
            rate = min(rate, bus_factor(op, local) * size_bytes / self._inside(op, local, size_bytes))
        if op == "all_reduce":  # by trees, so hops grow with the logarithm
            return base + 2 * math.ceil(math.log2(nodes)) * hop + on_link / rate
        near = self.cluster.tiers[0].latency_us.value * 1e-6  # a ring visits every rank
        return base + (nodes - 1) * hop + (group.size - nodes) * near + on_link / rate

    def pieces(self, op: str, group: RankGroup, size_bytes: float, pieces: int) -> float:
        """Returns seconds of a collective of `size_bytes` in `pieces` equal collectives, one after the other."""
        return pieces * self.collective(op, group, size_bytes / pieces)

    def all_reduce(self, inner: RankGroup, outer: RankGroup, size_bytes: float, pieces: int = 1) -> float:
        """Returns seconds of an all-reduce over two axes.

        If all its ranks are evenly spaced it is one all-reduce over them. Otherwise it is a reduce-scatter over
        `inner`, an all-reduce over `outer` and an all-gather over `inner`.
        """
        if inner.size == 1:
            return self.pieces("all_reduce", outer, size_bytes, pieces)
        if outer.size == 1 or outer.stride == inner.span:
            both = RankGroup(inner.size * outer.size, inner.stride)
            return self.pieces("all_reduce", both, size_bytes, pieces)
        within = (self.pieces(op, inner, size_bytes, pieces) for op in ("reduce_scatter", "all_gather"))
        return sum(within) + self.pieces("all_reduce", outer, size_bytes / inner.size, pieces)

    def rows(self, group: RankGroup, size_bytes: float, copies: int, most: float = math.inf) -> float:
        """Returns the seconds of an all-to-all of tokens, each for `copies` experts that are random over the group.

        A token is sent once to each rank that has some of its experts (NVIDIA/Megatron-LM issue 2692), and once to
        each other node, as DeepEP and HybridEP do.

        size_bytes  bytes that one rank would send if each token were copied for each of its experts
        most        most bytes a second that a rank receives inside a node
        """
        local = self.inside(group)
        nodes = math.ceil(group.size / local)
        near = size_bytes / copies * _met(group.size, copies)
        if nodes == 1 or local == 1 or self._one_domain(group):
            return max(self.collective("all_to_all", group, near), near / most)
        # both links work at the same time, so the slower one counts
        far = size_bytes / copies * _met(nodes, copies) * (nodes - 1) / nodes / self._rate(self.tier(group))
        near_s = max(self._inside("all_to_all", local, near), near / most)
        return max(far, near_s) + self.collective("all_to_all", group, 1.0)

    def _to_each(self, ranks: int, local: int, size_bytes: float, tier: int) -> float:
        """Returns the seconds of an all-to-all across nodes on the slower of the two links, without latency.

        ranks, local  ranks of the group, and those of them in one node; `size_bytes`: bytes that one rank has
        """
        far = size_bytes * (ranks - local) / ranks / self._rate(tier)
        near = self._inside("all_to_all", local, size_bytes * local / ranks) if local > 1 else 0.0
        return max(far, near)

    def _made_of(self, op: str) -> str:
        """Returns the collective by which the backend implements `op`: gloo (CPUs) runs reduce_scatter as all_reduce.

        Counted on a link between two hosts of two CPU ranks: 1.5 times the tensor each way, while a ring sends 0.75.
        """
        return "all_reduce" if op == "reduce_scatter" and self.cluster.device.kind == "cpu" else op

    def _one_domain(self, group: RankGroup) -> bool:
        """Whether all tiers that a group crosses are NVLink's, so that it counts as one domain of one rate."""
        return all(t.name.startswith("nvlink") for t in self.cluster.tiers[: self.tier(group) + 1])

    def _inside(self, op: str, ranks: int, size_bytes: float) -> float:
        """Returns seconds of a collective of `ranks` ranks inside one domain, by a table, else by a formula."""
        table = self.table
        if table is not None and op in table.times:
            return table.seconds(op, ranks, size_bytes)
        own, op = self.cluster.tiers[0], self._made_of(op)
        share = 1.0 if own.gbps.kind == "measured" else INSIDE_SHARE
        steps = (ranks - 1) * (2 if op == "all_reduce" else 1)
        return bus_factor(op, ranks) * size_bytes / (own.gbps.value * 1e9 * share) + steps * own.latency_us.value * 1e-6

    def basis(self, op: str, group: RankGroup) -> str:
        """Returns one line for people on the source of a collective's time: a measured table, or a formula."""
        if group.size <= 1:
            return "none"
        tier = self.tier(group)
        table = self.table
        if tier == 0 or self._one_domain(group):
            if table is None or op not in table.times:
                return f"formula: {self.cluster.tiers[0].name} rate"
            measured = sorted(table.times[op])
            near = (
                ""
                # other numbers of ranks than those in the table are scaled
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
        """Returns the seconds that a collective of `ranks` ranks inside a step waits for its slowest rank.

        Only ranks of one domain count. Beyond SKEWED_RANKS, where it was measured, it grows as the expected maximum of
        that many exponential waits.
        """
        near = min(ranks, self.cluster.sizes[0])
        more = sum(1 / n for n in range(2, near + 1)) / sum(1 / n for n in range(2, SKEWED_RANKS + 1))
        return SKEW_US * 1e-6 * (near - 1 if near <= SKEWED_RANKS else (SKEWED_RANKS - 1) * more)

    def exchange(self, came: Mapping[int, float], group: RankGroup, calls: float) -> float:
        """Returns the seconds of `calls` exchanges over an axis, at the rank that waits longest.

        came  {sender's index minus the receiver's: bytes that a rank receives in all calls}

        Links of different tiers work at the same time.
        """
        if not came or calls <= 0:
            return 0.0
        # all links of one domain have the same rate, so the sum of the bytes is enough
        if self.tier(group) == 0 or self._one_domain(group):
            # exchanges with two neighbours have a table of their own
            if group.size > 2 and came.keys() <= {-1, 1} and self.table is not None and "halo" in self.table.times:
                return calls * self._inside("halo", group.size, sum(came.values()) / calls)
            # the size of an all-to-all includes the part that a rank keeps
            whole = sum(came.values()) * group.size / (group.size - 1)
            return calls * self._inside("all_to_all", group.size, whole / calls)
        spread = self.by_tier(came, group)
        far = max(spread)
        sent = max(size / self._rate(tier) for tier, size in spread.items())
        return calls * (10e-6 + self.cluster.tiers[far].latency_us.value * 1e-6) + sent

    def by_tier(self, came: Mapping[int, float], group: RankGroup) -> dict[int, float]:
        """Returns {tier: bytes} that the rank which waits longest receives; `came`: as in `exchange`."""
        return _worst(self, tuple(sorted(came.items())), group)

    def _rate(self, tier: int) -> float:
        """Returns bytes a second of one rank's own link of a tier."""
        link = self.cluster.tiers[tier]
        share = INSIDE_SHARE if tier == 0 and link.gbps.kind != "measured" else 1.0
        return link.gbps.value * 1e9 * share

    def crosses(self, first: int, second: int) -> int:
        """Returns the index of the tier that joins two ranks, given by their global ranks."""
        for index, size in enumerate(self.cluster.sizes):
            if first // size == second // size:
                return index
        return len(self.cluster.tiers) - 1

    def send(self, size_bytes: float, first: int, second: int) -> float:
        """Returns seconds of a message between two ranks, given by their global ranks."""
        index = self.crosses(first, second)
        measured = self.between("send", index)
        if measured is not None:
            return measured.seconds("send", 2, 1, size_bytes)
        return self.cluster.tiers[index].latency_us.value * 1e-6 + size_bytes / self._rate(index)


def _met(places: int, copies: int) -> float:
    """Returns the expected number of `places` (ranks or nodes) that get at least one of `copies` random choices."""
    return places * (1 - (1 - 1 / places) ** copies)


MOST_GROUPS = 64  # groups of one axis that are tried; further ones lie on nodes in the same ways


@lru_cache(maxsize=4096)
def _worst(wire: Wire, came: tuple[tuple[int, float], ...], group: RankGroup) -> dict[int, float]:
    """Returns {tier: bytes} received by that rank of any group of the axis for which they take longest.

    came  (sender's index minus the receiver's, bytes) for each sender
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
        if seconds > longest:
            best, longest = by_tier, seconds
    return best
