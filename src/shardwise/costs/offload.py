"""Time and bytes of what lies outside of the device between uses, as `tiers/` moves it.

Once in a step, for the parameters that a rank updates, whatever its batch:

    host ── state ──> device    update    device ── state ──> host     over the device's link, waited for
    disk ── state ──> host      ...                host ── state ──> disk      beside the update, one sub-group ahead

Shards of weights (zero=3) are read for each gather too, beside forward and backward, and written by the update.

Weights on the host go to the device for each gather, and their gradients come back, beside the work and both ways at
once; the host's processor updates them when all is there, and the device waits.

So the update takes as long as the longer of (update + link) and disk. Masters move with the state where the device is
a processor and they are no shards of zero=3; on an accelerator they stay, since gradients lie beside them. The ranks of
a host share its disk.

Whether a host has the memory, and its disk the room: `costs/room`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.cluster import Cluster, Figure
from shardwise.costs.layout import Layout
from shardwise.costs.software import States
from shardwise.errors import RefusedPlan
from shardwise.layout.offload import SUBGROUP_BYTES, TIERS, in_tier, placements, weights_on_host

HOST_DEVICES = 8  # of one host at most, where no figure tells, also where a domain of links joins more (assumed)
LINK_SHARE = 0.8  # of the device's link to its host that large pinned copies reach (assumed)
# Of a host's memory, which its processor reads and writes for all its ranks, in 10^9 bytes a second (assumed: a fused
# AdamW over 30 * 10^9 weights on a host of eight devices took 5.6 s, 28 bytes for each)
HOST_GBPS = 150.0
UNFUSED = 84 / 28  # bytes that AdamW moves op by op, over those of one kernel
BUFFERS = 3  # of a disk, in the host's memory (tiers/disk)


@dataclass(frozen=True)
class Offloaded:
    """The cost of an update's moves: seconds; one rank's bytes of optimizer state in each tier, of weights on disk.

    host_s  seconds of an update that the host's processor computes, where weights lie there
    """

    link_s: float  # on the device's link, waited for
    disk_s: float  # at the disk, beside the update
    host_bytes: float
    disk_bytes: float
    weights_bytes: float = 0.0
    host_s: float = 0.0

    def beside(self, update_s: float) -> float:
        """Returns the seconds of an update with these moves, which takes `update_s` without."""
        return max((self.host_s or update_s) + self.link_s, self.disk_s)


def moved(states: States, layout: Layout, *, on_host: bool) -> dict[str, float]:
    """Returns {tier: bytes of optimizer state there} for each parameter that a rank updates.

    on_host  the device is the host's processor
    """
    masters = states.master if on_host and not layout.sharded.weights else 0.0
    return {tier: in_tier(layout.offload, "optimizer", tier) * (states.optimizer + masters) for tier in TIERS}


def lying(count: float, states: States, layout: Layout, *, on_host: bool) -> dict[str, float]:
    """Returns {"host", "disk": bytes that one rank keeps there} of `count` parameters that it updates.

    State on a disk counts twice, as its file does. On an accelerator it passes through the host's memory.
    """
    by_tier = moved(states, layout, on_host=on_host)
    in_file = count * by_tier["disk"]
    beside = 2 * states.held if weights_on_host(layout.offload) else 0.0  # weights, and gradients of their dtype
    staging = 0.0 if on_host else min(in_file, BUFFERS * SUBGROUP_BYTES)
    weights = count * in_tier(layout.offload, "parameters", "disk") * states.held
    return {"host": count * (by_tier["host"] + beside) + staging, "disk": 2 * in_file + weights}


def staged(layout: Layout, size: float, largest: float, share: float = 1.0) -> float:
    """Returns bytes of the buffers through which a disk's state goes, in the host's memory.

    size     bytes that lie on the disk; `largest`: those of the largest parameter
    share    of a sub-group's bytes that is state, where the parameters themselves come with it
    """
    if not in_tier(layout.offload, "optimizer", "disk"):
        return 0.0
    group = SUBGROUP_BYTES * share
    return min(size, max(group, largest) + (BUFFERS - 1) * group)


def update_bytes(states: States, *, fused: bool) -> float:
    """Returns the bytes of host memory that AdamW's update of one parameter moves. fused: in one kernel."""
    return (3 * states.held + 2 * states.optimizer) * (1.0 if fused else UNFUSED)


def offloaded(count: float, states: States, layout: Layout, cluster: Cluster, update: float) -> Offloaded:
    """Returns the cost of moves around an update of `count` parameters on a rank, of `update` bytes each on a host.

    Raises `RefusedPlan` for places that the device does not have, and where no figure tells a rate.
    """
    on_host = cluster.device.kind == "cpu"
    by_tier = moved(states, layout, on_host=on_host)
    _refuse_weights(layout, cluster)
    weights = in_tier(layout.offload, "parameters", "disk") * states.held
    _refuse_host(layout, cluster, by_tier["host"])
    link_s = disk_s = host_s = 0.0
    if weights_on_host(layout.offload):
        # gradients are read for the norm, read and written by the division
        host_s = count * (update + 3 * states.held) * ranks_of_host(layout, cluster) / (HOST_GBPS * 1e9)
        by_tier["host"] += 2 * states.held
    # state crosses the device's link, there and back
    elif not on_host and any(by_tier.values()):
        link_s = 2 * count * sum(by_tier.values()) / (_link_gbps(cluster) * 1e9)
    if by_tier["disk"] + weights:
        size = count * (by_tier["disk"] + weights)
        disk_s = 2 * size * ranks_of_host(layout, cluster) / (_disk_gbps(cluster) * 1e9)
    return Offloaded(link_s, disk_s, count * by_tier["host"], count * by_tier["disk"], count * weights, host_s)


def _refuse_host(layout: Layout, cluster: Cluster, fraction: float) -> None:
    """Raise `RefusedPlan` for a move to the host's memory on a device that has none of its own."""
    if fraction and cluster.device.kind == "cpu":
        raise RefusedPlan(
            f"offload={layout.offload}: {cluster.device.name} is a processor, whose memory is the host's: nothing is "
            "gained"
        )


def _refuse_weights(layout: Layout, cluster: Cluster) -> None:
    """Raise `RefusedPlan` where weights cannot lie where the layout says."""
    if in_tier(layout.offload, "parameters", "disk") and cluster.device.kind != "cpu":
        raise RefusedPlan(
            f"offload={layout.offload}: {cluster.device.name} has memory of its own, which would wait for each page of "
            "a mapped file: use offload=parameters, the host's memory"
        )
    _refuse_host(layout, cluster, in_tier(layout.offload, "parameters", "host"))


def _link_gbps(cluster: Cluster) -> float:
    if cluster.device.host_gbps is None:
        raise RefusedPlan(f"offload: {cluster.device.name} has no figure for its link to the host (host_gbps)")
    return cluster.device.host_gbps.value * LINK_SHARE


def disk_rate(cluster: Cluster) -> Figure | None:
    """Returns the GB/s of a host's disk, reads and writes alike: measured, else its data sheet's; None: unknown."""
    return cluster.device.disk_gbps or cluster.node.disk_gbps


def _disk_gbps(cluster: Cluster) -> float:
    """Returns the rate of a host's disk, GB/s; `RefusedPlan` where nothing tells it."""
    rate = disk_rate(cluster)
    if rate is None:
        raise RefusedPlan(
            f"offload to disk: {cluster.device.name} has no figure for the disk of its host: give disk_gbps in the "
            "cluster's file, or disk-12gb/s in its text, or measure it by shardwise probe"
        )
    return rate.value


def ranks_of_host(layout: Layout, cluster: Cluster) -> int:
    """Returns how many ranks of a plan share a host."""
    return min(cluster.sizes[0], layout.world_size, cluster.node.devices or HOST_DEVICES)


def told(cost: Offloaded, cluster: Cluster) -> str:
    """Returns a remark on what moves in a step and what the forecast assumes of it."""
    parts = []
    if cost.link_s:
        parts.append(
            f"{cost.link_s:.3g} s of state over the link to the host and back ({LINK_SHARE:g} of its rate, assumed), "
            "waited for"
        )
    if cost.host_s:
        parts.append(
            f"{cost.host_s:.3g} s of the update on the host's processor, at {HOST_GBPS:g} GB/s of its memory for all "
            "its ranks (assumed); the device waits; less with an optimizer's one kernel (fused=True) than op by op"
        )
    if cost.disk_s and (rate := disk_rate(cluster)) is not None:
        parts.append(
            f"{cost.disk_s:.3g} s of reads and writes at {rate.value:.3g} GB/s of a host's disk ({rate.source}), "
            "beside the update"
        )
    places = {
        "the host's memory": cost.host_bytes, "a disk (twice that in the file)": cost.disk_bytes,
        "a disk, of weights": cost.weights_bytes,
    }  # fmt: skip
    lies = [f"{size / 1e9:,.3g} GB of each rank in {where}" for where, size in places.items() if size]
    return "; ".join([*parts, *lies])


@dataclass(frozen=True)
class Moves:
    """The cost of one micro-batch's moves to a tier and back: seconds on the link, seconds at the disk, and bytes."""

    link_s: float
    disk_s: float
    size: float

    def beyond(self, micro_s: float) -> float:
        """Returns the seconds that a micro-batch of `micro_s` waits: forward and backward run beside the moves."""
        return max(0.0, self.link_s - micro_s, self.disk_s - micro_s)


def moves(put: Mapping[str, float], layout: Layout, cluster: Cluster) -> Moves:
    """Returns the cost of moving one micro-batch's activations on each rank; `put`: their bytes by tier.

    Raises `RefusedPlan` for the host's memory on a processor, and where no figure tells a rate.
    """
    on_host = cluster.device.kind == "cpu"
    _refuse_host(layout, cluster, in_tier(layout.offload, "activations", "host"))
    link_s = 0.0 if on_host else 2 * sum(put.values()) / (_link_gbps(cluster) * 1e9)
    disk = put.get("disk", 0.0)
    disk_s = 2 * disk * ranks_of_host(layout, cluster) / (_disk_gbps(cluster) * 1e9) if disk else 0.0
    return Moves(link_s, disk_s, sum(put.values()))


def moves_told(cost: Moves, micro_s: float) -> str:
    """Returns a remark on what moves with each micro-batch and what the forecast assumes of it."""
    return (
        f"{cost.size / 1e9:.3g} GB of activations of each micro-batch there and back, in {cost.link_s:.3g} s over the "
        f"link to the host and {cost.disk_s:.3g} s at the disk, beside {micro_s:.3g} s of forward and backward"
    )


def reads(size: float, layout: Layout, cluster: Cluster) -> Moves:
    """Returns the cost of reading weights from disk for one micro-batch's gathers, `size` bytes on each rank."""
    disk = in_tier(layout.offload, "parameters", "disk") * size * layout.sharded.gathers
    return Moves(0.0, disk * ranks_of_host(layout, cluster) / (_disk_gbps(cluster) * 1e9), disk)


def crossing_seconds(size: float, cluster: Cluster) -> float:
    """Returns the seconds in which so many bytes cross a device's link to its host, one way."""
    return size / (_link_gbps(cluster) * 1e9)


def crossings(size: float, gradients: float, layout: Layout, cluster: Cluster) -> Moves:
    """Returns the cost of one micro-batch's weights crossing from the host for each gather, and of gradients back.

    size, gradients  bytes of weights and of gradients of one rank's shards
    """
    return Moves(crossing_seconds(max(size * layout.sharded.gathers, gradients), cluster), 0.0, size)


def crossings_told(cost: Moves, micro_s: float) -> str:
    """Returns a remark on what crosses the link for the gathers of each micro-batch."""
    return (
        f"{cost.size / 1e9:.3g} GB of weights come from the host for each gather, and gradients go back at the same "
        f"time, in {cost.link_s:.3g} s of each micro-batch of {micro_s:.3g} s ({LINK_SHARE:g} of the link's rate, "
        "assumed)"
    )


def reads_told(cost: Moves, micro_s: float) -> str:
    """Returns a remark on what is read for the gathers of each micro-batch."""
    return (
        f"{cost.size / 1e9:.3g} GB of weights read for each micro-batch of {micro_s:.3g} s, in {cost.disk_s:.3g} s at "
        "the disk; less, where the host has memory to keep them"
    )


def brought(layout: Layout, size: float, largest: float) -> float:
    """Returns bytes of weights that are in memory on their way from a disk: two units', of the largest.

    From the host to a rank alone the next unit's; for a gather over ranks they are part of its own peak.

    size     of a rank's weights
    """
    if weights_on_host(layout.offload):
        return min(size, largest) if layout.shard_ranks == 1 else 0.0
    fraction = in_tier(layout.offload, "parameters", "disk")
    return min(fraction * size, 2 * largest) if fraction else 0.0


def refuse(layout: Layout, *, traced: bool = False) -> None:
    """Raises `RefusedPlan` for layouts whose offload is not forecast. traced: of a task, whose module is traced."""
    placed = placements(layout.offload)
    forecast = not any(
        part.state == "activations" or (part.state, part.tier) == ("parameters", "disk") for part in placed
    )
    # a task is traced, so what its blocks keep is known; a decoder's numbers do not tell
    if not (traced or forecast):
        raise RefusedPlan(
            f"offload={layout.offload} is not forecast: what activations, and weights on a disk, of a decoder by its "
            "numbers cost when they come and go with every layer is not modelled: offload=optimizer and "
            "offload=parameters are"
        )
    if weights_on_host(layout.offload) and layout.pp > 1:
        raise RefusedPlan(
            f"offload={layout.offload} is not forecast with a pipeline, whose stages' links to their hosts are not "
            "modelled: leave pp out, which zero=3 does without"
        )
