"""Seconds and bytes of tensors that lie on the host or a disk between uses, as `tiers/` moves them.

Optimizer state of the parameters that a rank updates moves once in a step:

    host ── state ──> device    update    device ── state ──> host     over the device's link, waited for
    disk ── state ──> host      ...                host ── state ──> disk      beside the update, one sub-group ahead

Weight shards on a disk (zero=3) are read for each gather, beside forward and backward, and written by the update.

Weights on the host go to the device for each gather, and their gradients come back at the same time, both beside
forward and backward. The host's processor updates them when all gradients are there, and the device waits.

So the update takes the longer of (update + link) and disk. Masters move with the state if the device is a processor and
they are no shards of zero=3; on an accelerator they stay, since the gradients are there. The ranks of a host share its
disk.

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

HOST_DEVICES = 8  # most devices of one host if its figures do not say, even if NVLink joins more (assumed)
LINK_SHARE = 0.8  # share of the rate of the device's link to its host that large pinned copies reach (assumed)
# 10^9 bytes a second that a host's processor reads and writes in its memory for all its ranks (assumed: a fused AdamW
# over 30 * 10^9 weights on a host of eight devices took 5.6 s, 28 bytes for each weight)
HOST_GBPS = 150.0
UNFUSED = 84 / 28  # bytes that AdamW moves op by op, over those that a fused kernel moves
BUFFERS = 3  # number of sub-groups of a disk's state in the host's memory at a time (tiers/disk)


@dataclass(frozen=True)
class Offloaded:
    """The cost of one optimizer step's moves.

    host_s  seconds of the update on the host's processor, if weights lie on the host; else 0
    """

    link_s: float  # seconds on the device's link to the host, for which the device waits
    disk_s: float  # seconds at the disk, beside the update
    host_bytes: float  # of one rank in the host's memory
    disk_bytes: float  # optimizer state of one rank on disk
    weights_bytes: float = 0.0  # weights of one rank on disk
    host_s: float = 0.0

    def beside(self, update_s: float) -> float:
        """Returns the seconds of an update with its moves; `update_s`: seconds of the update without them."""
        return max((self.host_s or update_s) + self.link_s, self.disk_s)


def moved(states: States, layout: Layout, *, on_host: bool) -> dict[str, float]:
    """Returns {tier: bytes of optimizer state and masters there} per parameter that a rank updates.

    on_host  whether the device is the host's processor
    """
    masters = states.master if on_host and not layout.sharded.weights else 0.0
    return {tier: in_tier(layout.offload, "optimizer", tier) * (states.optimizer + masters) for tier in TIERS}


def lying(count: float, states: States, layout: Layout, *, on_host: bool) -> dict[str, float]:
    """Returns {"host": bytes, "disk": bytes} that one rank keeps there for the `count` parameters that it updates.

    State on a disk counts twice, since its file holds two versions. With an accelerator (`on_host` false) the buffers
    through which state goes to a disk are in the host's memory.
    """
    by_tier = moved(states, layout, on_host=on_host)
    in_file = count * by_tier["disk"]
    beside = 2 * states.held if weights_on_host(layout.offload) else 0.0  # weights, and gradients of their dtype
    staging = 0.0 if on_host else min(in_file, BUFFERS * SUBGROUP_BYTES)
    weights = count * in_tier(layout.offload, "parameters", "disk") * states.held
    return {"host": count * (by_tier["host"] + beside) + staging, "disk": 2 * in_file + weights}


def staged(layout: Layout, size: float, largest: float, share: float = 1.0) -> float:
    """Returns the bytes of host memory for the buffers through which state on a disk goes; 0 if none is there.

    size     bytes of state on the disk
    largest  those of the largest parameter
    share    fraction of a sub-group's bytes that is state, if the parameters are in the sub-group too
    """
    if not in_tier(layout.offload, "optimizer", "disk"):
        return 0.0
    group = SUBGROUP_BYTES * share
    return min(size, max(group, largest) + (BUFFERS - 1) * group)


def update_bytes(states: States, *, fused: bool) -> float:
    """Returns the bytes that AdamW's update reads and writes per parameter; `fused`: whether it is one kernel."""
    return (3 * states.held + 2 * states.optimizer) * (1.0 if fused else UNFUSED)


def offloaded(count: float, states: States, layout: Layout, cluster: Cluster, update: float) -> Offloaded:
    """Returns the cost of the moves around a rank's update of `count` parameters.

    update  bytes that the update reads and writes per parameter (`update_bytes`), if the host computes it

    Raises `RefusedPlan` for a tier that the device does not have, or if the cluster has no figure for a rate.
    """
    on_host = cluster.device.kind == "cpu"
    by_tier = moved(states, layout, on_host=on_host)
    _refuse_weights(layout, cluster)
    weights = in_tier(layout.offload, "parameters", "disk") * states.held
    _refuse_host(layout, cluster, by_tier["host"])
    link_s = disk_s = host_s = 0.0
    if weights_on_host(layout.offload):
        # besides the update, gradients are read for the norm, and read and written by the division: 3 passes
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
    """Raises `RefusedPlan` if `fraction` > 0 moves to the host and the device has no memory other than the host's."""
    if fraction and cluster.device.kind == "cpu":
        raise RefusedPlan(
            f"offload={layout.offload}: {cluster.device.name} is a processor, whose memory is the host's: nothing is "
            "gained"
        )


def _refuse_weights(layout: Layout, cluster: Cluster) -> None:
    """Raises `RefusedPlan` if weights cannot lie in the tier that `layout.offload` names."""
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
    """Returns the GB/s of a host's disk for reads and writes, measured, else by its data sheet; None if unknown."""
    return cluster.device.disk_gbps or cluster.node.disk_gbps


def _disk_gbps(cluster: Cluster) -> float:
    """Returns the GB/s of a host's disk; raises `RefusedPlan` if the cluster has no figure for it."""
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
    """Returns one line for people on the moves of a step, and what the forecast assumes about them."""
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
    """The cost of one micro-batch's moves to a tier and back, beside forward and backward."""

    link_s: float  # seconds on the device's link to the host
    disk_s: float  # seconds at the disk
    size: float  # bytes of one rank

    def beyond(self, micro_s: float) -> float:
        """Returns the seconds for which a micro-batch waits, whose forward and backward take `micro_s` seconds."""
        return max(0.0, self.link_s - micro_s, self.disk_s - micro_s)


def moves(put: Mapping[str, float], layout: Layout, cluster: Cluster) -> Moves:
    """Returns the cost of moving one micro-batch's activations away and back on each rank.

    put  {tier: bytes of one rank}

    Raises `RefusedPlan` for the host's memory if the device is a processor, or if no figure tells a rate.
    """
    on_host = cluster.device.kind == "cpu"
    _refuse_host(layout, cluster, in_tier(layout.offload, "activations", "host"))
    link_s = 0.0 if on_host else 2 * sum(put.values()) / (_link_gbps(cluster) * 1e9)
    disk = put.get("disk", 0.0)
    disk_s = 2 * disk * ranks_of_host(layout, cluster) / (_disk_gbps(cluster) * 1e9) if disk else 0.0
    return Moves(link_s, disk_s, sum(put.values()))


def moves_told(cost: Moves, micro_s: float) -> str:
    """Returns one line for people on `moves`; `micro_s`: seconds of a micro-batch's forward and backward."""
    return (
        f"{cost.size / 1e9:.3g} GB of activations of each micro-batch there and back, in {cost.link_s:.3g} s over the "
        f"link to the host and {cost.disk_s:.3g} s at the disk, beside {micro_s:.3g} s of forward and backward"
    )


def reads(size: float, layout: Layout, cluster: Cluster) -> Moves:
    """Returns the cost of reading weights from disk for one micro-batch's gathers; `size`: bytes of a rank's shards."""
    disk = in_tier(layout.offload, "parameters", "disk") * size * layout.sharded.gathers
    return Moves(0.0, disk * ranks_of_host(layout, cluster) / (_disk_gbps(cluster) * 1e9), disk)


def crossing_seconds(size: float, cluster: Cluster) -> float:
    """Returns the seconds in which `size` bytes cross a device's link to its host one way."""
    return size / (_link_gbps(cluster) * 1e9)


def crossings(size: float, gradients: float, layout: Layout, cluster: Cluster) -> Moves:
    """Returns the cost of one micro-batch's weights crossing from the host for each gather, and of gradients back.

    size, gradients  bytes of weights and of gradients of one rank's shards
    """
    return Moves(crossing_seconds(max(size * layout.sharded.gathers, gradients), cluster), 0.0, size)


def crossings_told(cost: Moves, micro_s: float) -> str:
    """Returns one line for people on `crossings`; `micro_s`: seconds of a micro-batch's forward and backward."""
    return (
        f"{cost.size / 1e9:.3g} GB of weights come from the host for each gather, and gradients go back at the same "
        f"time, in {cost.link_s:.3g} s of each micro-batch of {micro_s:.3g} s ({LINK_SHARE:g} of the link's rate, "
        "assumed)"
    )


def reads_told(cost: Moves, micro_s: float) -> str:
    """Returns one line for people on `reads`; `micro_s`: seconds of a micro-batch's forward and backward."""
    return (
        f"{cost.size / 1e9:.3g} GB of weights read for each micro-batch of {micro_s:.3g} s, in {cost.disk_s:.3g} s at "
        "the disk; less, where the host has memory to keep them"
    )


def brought(layout: Layout, size: float, largest: float) -> float:
    """Returns the device bytes of weights that are being brought from a disk or the host, beside those in use.

    From a disk that is two of the largest units. From the host it is the next unit if one rank holds all weights;
    otherwise the peak of the gather contains them already, and 0 is returned.

    size     bytes of a rank's weights
    largest  bytes of its largest unit
    """
    if weights_on_host(layout.offload):
        return min(size, largest) if layout.shard_ranks == 1 else 0.0
    fraction = in_tier(layout.offload, "parameters", "disk")
    return min(fraction * size, 2 * largest) if fraction else 0.0


def refuse(layout: Layout, *, traced: bool = False) -> None:
    """Raises `RefusedPlan` if the layout's offload is not forecast; `traced`: whether a task's module is traced."""
    placed = placements(layout.offload)
    forecast = not any(
        part.state == "activations" or (part.state, part.tier) == ("parameters", "disk") for part in placed
    )
    # only a trace knows which bytes blocks keep; a decoder given by its sizes has none
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
