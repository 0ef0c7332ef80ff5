"""From a plan's `offload=parameters` to a file for the shards of zero=3. By recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.device import on_host
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.layout.offload import placements
from shardwise.mesh import Mesh
from shardwise.tiers import ShardFile, places
from shardwise.tiers.subgroups import dealt


@dataclass
class _Unit:
    shards: list[torch.Tensor]
    size: int


def shards_elsewhere(
    plan: Plan, mesh: Mesh, notices: list[str]
) -> Callable[[list[list[torch.Tensor]]], ShardFile | None] | None:
    """Returns what gives the shards of zero=3 memory of a file, as the plan says; None where they stay.

    Raises `RefusedPlan` for a tier that gains nothing and a device that has memory of its own.
    """
    placed = placements(plan.offload, "parameters")
    if not placed:
        return None
    if any(placement.tier == "host" for placement in placed):
        if not on_host(mesh.device):
            raise RefusedPlan(f"offload={plan.offload}: {OWN_MEMORY}")
        raise RefusedPlan(f"offload={plan.offload}: {places.IN_MEMORY.format('parameters')}")
    if not on_host(mesh.device):
        raise RefusedPlan(f"offload={plan.offload}: {OWN_MEMORY}")

    def lay(shards: list[list[torch.Tensor]]) -> ShardFile | None:
        units = [_Unit(unit, sum(shard.numel() * shard.element_size() for shard in unit)) for unit in shards]
        (moving,) = dealt(units, placed)
        if not any(unit.size for unit in moving):
            largest, total = max(unit.size for unit in units), sum(unit.size for unit in units)
            notices.append(
                f"offload={plan.offload}: nothing moves for {placed[0]}: a unit's weights move together, up to "
                f"{largest:,} of {total:,} bytes, where more than half of them would: give another fraction"
            )
            return None
        return ShardFile([unit.shards for unit in moving], mesh.rank)

    return lay


OWN_MEMORY = (
    "weights lie on a disk for ranks whose device is the processor; an accelerator's would come over its link for "
    "every gather, which is not built: use offload=optimizer with zero=3, more ranks of dp_shard, or remat=full"
)
