"""From a plan's `offload=parameters` to the host's memory, or a file, for the shards of zero=3. By recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.device import on_host
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.layout.offload import placements, weights_on_host
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
    """Returns a function that puts the shards of zero=3 into a file, as the plan says; None where they stay in memory.

    Raises `RefusedPlan` for a device that has memory of its own.
    """
    placed = placements(plan.offload, "parameters")
    # weights on the host stay in memory there, whatever else moves
    if not placed or weights_on_host(plan.offload):
        return None
    if not on_host(mesh.device):
        raise RefusedPlan(f"offload={plan.offload}: {OWN_MEMORY}")

    def lay(shards: list[list[torch.Tensor]]) -> ShardFile | None:
        """Returns the file of the units' shards that move, as dealt; None, with a notice, where none does."""
        units = [_Unit(unit, sum(shard.numel() * shard.element_size() for shard in unit)) for unit in shards]
        (moving,) = dealt(units, placed)
        # units move whole: a small fraction of a model with one large unit moves none
        if not any(unit.size for unit in moving):
            largest, total = max(unit.size for unit in units), sum(unit.size for unit in units)
            notices.append(
                f"offload={plan.offload}: nothing moves for {placed[0]}: a unit's weights move together, up to "
                f"{largest:,} of {total:,} bytes, where more than half of them would: give another fraction"
            )
            return None
        return ShardFile([unit.shards for unit in moving], mesh.rank)

    return lay


def lie_on_host(plan: Plan, device: torch.device) -> bool:
    """Whether shards lie in the host's memory, as the plan says; `RefusedPlan` where that is the device's own."""
    if not weights_on_host(plan.offload):
        return False
    if not places.has_own_memory(device):
        raise RefusedPlan(f"offload={plan.offload}: {places.IN_MEMORY.format('parameters')}")
    return True


OWN_MEMORY = (
    "a file is mapped into the memory of the host, from which an accelerator would wait for each of its pages: use "
    "offload=parameters, the host's memory, or offload=optimizer:disk|parameters"
)
