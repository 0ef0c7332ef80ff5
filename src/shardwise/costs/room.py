"""`Room`: bytes that offloading takes of one host's memory and disk for all its ranks, and the bytes that it has.

    host    offloaded state, weights, gradients and activations, or buffers of files on disk, of every rank of the host
    disk    for every rank a file of twice the state, one of weights, one of activations

A tenth of a host's memory is left for its system, the ranks' own programs and readers of data (assumed). torch rounds
pinned memory up to a power of two for each weight, which is not counted; nor is a checkpoint's buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.cluster import Cluster, Figure, Node
from shardwise.costs.layout import Layout
from shardwise.costs.offload import ranks_of_host

SYSTEM = 0.1  # share of a host's memory that is left free (assumed)
NAMES = {"host": "memory", "disk": "disk"}
UNKNOWN = {
    "host": 'host-512gb in the cluster\'s text, or memory_gb of [node] in its file, tells it',
    "disk": 'disk-2tb in the cluster\'s text, or disk_gb of [node] in its file, tells it',
}  # fmt: skip


@dataclass(frozen=True)
class Room:
    """Bytes that the ranks of one host keep in its memory and on its disk, and what the host has."""

    needed: Mapping[str, float] = field(default_factory=dict)  # tier ("host" or "disk") -> bytes of all its ranks
    node: Node = field(default_factory=Node)  # the host's memory and disk
    ranks: int = 1  # ranks of the host

    def there(self, tier: str) -> float | None:
        """Returns the bytes that the host has for a tier; None if that is not known."""
        figure = self._figure(tier)
        return None if figure is None else figure.value * 1e9 * (1 - SYSTEM if tier == "host" else 1)

    def _figure(self, tier: str) -> Figure | None:
        return self.node.memory_gb if tier == "host" else self.node.disk_gb

    @property
    def lacks(self) -> tuple[str, ...]:
        """Returns the tiers for which the host is known to have too few bytes."""
        known = {tier: self.there(tier) for tier in self.needed}
        return tuple(tier for tier, there in known.items() if there is not None and self.needed[tier] > there)

    @property
    def over(self) -> float:
        """Returns the largest share of needed over available bytes of a tier (above 1: too much); 0 if unknown."""
        shares = [size / there for tier, size in self.needed.items() if (there := self.there(tier))]
        return max(shares, default=0.0)

    def line(self, tier: str) -> str:
        """Returns one line for people: the bytes that a host's ranks need in a tier, and those that it has."""
        there, figure = self.there(tier), self._figure(tier)
        kept = f"{_gb(self.needed[tier] / 1e9)} GB of a host's {NAMES[tier]} for its {self.ranks} rank(s)"
        if there is None or figure is None:
            return f"{kept}, of how much is not known: {UNKNOWN[tier]}"
        less = f" less {SYSTEM:.0%} for its system, assumed" if tier == "host" else ""
        return f"{kept}, of {_gb(there / 1e9)} GB ({_gb(figure.value)}{less}; {figure.kind}: {figure.source})"

    @property
    def lines(self) -> list[str]:
        """Returns `line` of each tier in which bytes are needed."""
        return [self.line(tier) for tier in self.needed]

    def as_dict(self) -> dict[str, Any]:
        """Returns {tier: {"needed_bytes": bytes, "room_bytes": bytes or None if unknown}} of one host."""
        return {tier: {"needed_bytes": size, "room_bytes": self.there(tier)} for tier, size in self.needed.items()}


def _gb(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def of_host(by_rank: Sequence[Mapping[str, float]], layout: Layout, cluster: Cluster) -> Room:
    """Returns the `Room` of one host of the cluster.

    by_rank  {tier: bytes} of each rank that differs, each standing for equally many ranks. A host that holds complete
             replicas needs the mean times its ranks; any other host may hold only ranks that need the most
    """
    ranks = ranks_of_host(layout, cluster)
    mean = ranks % (layout.world_size // layout.replicas) == 0
    needed = {}
    for tier in NAMES:
        sizes = [rank.get(tier, 0.0) for rank in by_rank]
        if size := ranks * (sum(sizes) / len(sizes) if mean else max(sizes)):
            needed[tier] = size
    return Room(needed, cluster.node, ranks)
