"""Time of keeping the optimizer's state in the host's memory and updating there. A forecast only: no plan runs it.

Once in a step, nothing of it hidden, for the parameters that a rank updates:

    device ── gradients ──> host        over the device's own link (PCIe, C2C)
    host      reads gradients, reads and writes masters and state: the memory of a node, shared by its devices
    device <── weights ──── host

Ren et al. 2021 (ZeRO-Offload) move the same; what they hide behind backward is not taken off here. *A forecast: no plan
of this version offloads.*
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.costs.software import States
from shardwise.errors import RefusedPlan

HOST_MEMORY_GBPS = 300.0  # of a node, for a processor's Adam (assumed: eight channels of DDR5 at 38 GB/s)
HOST_DEVICES = 8  # of one host at most, also where a domain of links joins more (assumed)
LINK_SHARE = 0.8  # of the device's link to its host that large pinned copies reach (assumed)


@dataclass(frozen=True)
class Offloaded:
    """Seconds of a step that the update takes on the host, and the bytes that a node holds for its devices."""

    link_s: float
    host_s: float
    node_bytes: float

    @property
    def seconds(self) -> float:
        return self.link_s + self.host_s


def offloaded(count: float, states: States, layout: Layout, cluster: Cluster) -> Offloaded:
    """Returns the cost of updating `count` parameters of each rank on the host."""
    link = cluster.device.host_gbps
    if link is None:
        raise RefusedPlan(f"offload: {cluster.device.name} has no figure for its link to the host (host_gbps)")
    ranks = min(cluster.sizes[0], layout.world_size, HOST_DEVICES)  # of a host, whose memory they share
    own = states.master or states.weight
    host = count * ranks * (states.gradient + 2 * own + 2 * states.optimizer)
    return Offloaded(
        count * (states.gradient + states.weight) / (link.value * LINK_SHARE * 1e9),
        host / (HOST_MEMORY_GBPS * 1e9),
        count * ranks * (states.master + states.optimizer),
    )


def refuse(layout: Layout) -> None:
    """Raises `RefusedPlan` for layouts whose offload is not forecast."""
    if layout.offload not in ("none", "optimizer"):
        raise RefusedPlan(
            f"offload={layout.offload} is not forecast: what weights or activations that come and go with every layer "
            "cost hangs on how much of it is hidden, which is not modelled; offload=optimizer is"
        )
