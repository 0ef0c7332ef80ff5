"""Forecast on fewer devices than there are: which counts a batch divides over, and that part of a cluster."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cluster import Cluster
from shardwise.planner.candidates import Constraints
from shardwise.planner.subject import Subject

MOST_COUNTS = 2  # of the largest that do, beside the largest power of two


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """Returns the cluster made of the first `count` devices (rounded up to whole units of a tier)."""
    tiers, left = [], count
    for tier in cluster.tiers:
        size = min(tier.count, left)
        tiers.append(replace(tier, count=size))
        # the number of units of the next tier that these devices fill
        left = -(-left // size)
    return replace(cluster, tiers=tuple(tiers), name=f"{count} of {cluster}")


def counts_that_do(subject: Subject, cluster: Cluster, constraints: Constraints) -> list[int]:
    """Returns smaller numbers of devices that have plans: the largest ones of whole nodes, and a power of two.

    For a model by its numbers, of which it is quick to ask, and where no field of the plan was fixed; else none.
    """
    world, node = cluster.world_size, cluster.sizes[0] if len(cluster.tiers) > 1 else 1
    if subject.own or constraints.fixed:
        return []

    def has_any(count: int) -> bool:
        if first_devices(cluster, count).world_size != count:  # no whole part of the nodes that there are
            return False
        return next(iter(subject.layouts(count, constraints)), None) is not None

    power = 1 << (world - 1).bit_length() - 1
    least = power if first_devices(cluster, power).world_size == power else power // 2
    whole = range((world - 1) // node * node, least, -node)
    counts: list[int] = []
    for count in whole:
        if len(counts) < MOST_COUNTS and has_any(count):
            counts.append(count)
    return [*counts, *([power] if power < world and has_any(power) else [])]
