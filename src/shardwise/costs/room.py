"""Room on one host: what tiers take of its memory and its disk, over all its ranks, and what it has (`Node`).

    host    state, weights and gradients that lie there, or a file's buffers, of every rank of the host
    disk    a file of twice the state, one of weights, one of activations, of every rank

A tenth of a host's memory is left for its system, the ranks' own programs and readers of data (assumed). Memory that
is pinned is rounded up by torch, to powers of two of each weight, which is not counted; nor is a checkpoint's buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.cluster import Cluster, Figure, Node
from shardwise.costs.layout import Layout
from shardwise.costs.offload import ranks_of_host

SYSTEM = 0.1  # of a host's memory (assumed)
NAMES = {"host": "memory", "disk": "disk"}
UNKNOWN = {
    "host": 'host-512gb in the cluster\'s text, or memory_gb of [node] in its file, tells it',
    "disk": 'disk-2tb in the cluster\'s text, or disk_gb of [node] in its file, tells it',
}  # fmt: skip


@dataclass(frozen=True)
class Room:
    """Bytes that all `ranks` of one host keep off their devices, by tier ("host", "disk"), and the host's figures."""

    needed: Mapping[str, float] = field(default_factory=dict)  # bytes by tier
    node: Node = field(default_factory=Node)  # the host's figures
    ranks: int = 1

    def there(self, tier: str) -> float | None:
        """Returns the bytes that a host has for a tier; None where that is not known."""
        figure = self._figure(tier)
        return None if figure is None else figure.value * 1e9 * (1 - SYSTEM if tier == "host" else 1)

    def _figure(self, tier: str) -> Figure | None:
        return self.node.memory_gb if tier == "host" else self.node.disk_gb

    @property
    def lacks(self) -> tuple[str, ...]:
        """Returns the tiers in which a host is known to have too little."""
        known = {tier: self.there(tier) for tier in self.needed}
        return tuple(tier for tier, there in known.items() if there is not None and self.needed[tier] > there)

    @property
    def over(self) -> float:
        """Returns the largest share of a tier's room that its bytes take (above 1: too much); 0: room unknown."""
        shares = [size / there for tier, size in self.needed.items() if (there := self.there(tier))]
        return max(shares, default=0.0)

    def line(self, tier: str) -> str:
        """Returns one line of text: how many bytes a host's ranks keep in a tier, of how many that it has."""
        there, figure = self.there(tier), self._figure(tier)
        kept = f"{_gb(self.needed[tier] / 1e9)} GB of a host's {NAMES[tier]} for its {self.ranks} rank(s)"
        if there is None or figure is None:
            return f"{kept}, of how much is not known: {UNKNOWN[tier]}"
        less = f" less {SYSTEM:.0%} for its system, assumed" if tier == "host" else ""
        return f"{kept}, of {_gb(there / 1e9)} GB ({_gb(figure.value)}{less}; {figure.kind}: {figure.source})"

    @property
    def lines(self) -> list[str]:
        """Returns a line of text for each tier that holds bytes."""
        return [self.line(tier) for tier in self.needed]

    def as_dict(self) -> dict[str, Any]:
        """Returns {tier: {"needed_bytes", "room_bytes"}} of one host; the room is None where unknown."""
        return {tier: {"needed_bytes": size, "room_bytes": self.there(tier)} for tier, size in self.needed.items()}


def _gb(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def of_host(by_rank: Sequence[Mapping[str, float]], layout: Layout, cluster: Cluster) -> Room:
    """Returns the room that one host needs.

    by_rank  bytes by tier of each rank that differs, where each of them stands for as many. A host that has whole
             replicas of the model has their mean, another may have the fullest of them alone
    """
    ranks = ranks_of_host(layout, cluster)
    mean = ranks % (layout.world_size // layout.replicas) == 0
    needed = {}
    for tier in NAMES:
        sizes = [rank.get(tier, 0.0) for rank in by_rank]
        if size := ranks * (sum(sizes) / len(sizes) if mean else max(sizes)):
            needed[tier] = size
    return Room(needed, cluster.node, ranks)
