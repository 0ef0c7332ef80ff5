"""Set up a plan's `offload=parameters`: shards of zero=3 lie in the host's memory, or in a file."""

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
    """The shards of one FSDP2 unit on this rank, and their `size` in bytes."""

    shards: list[torch.Tensor]
    size: int


def shards_elsewhere(
    plan: Plan, mesh: Mesh, notices: list[str]
) -> Callable[[list[list[torch.Tensor]]], ShardFile | None] | None:
    """Returns a function from each unit's shards to the file that has them; None if the plan moves none to a disk.

    The function itself returns None, and adds a line to `notices`, if the plan's fraction rounds to no unit.
    Raises `RefusedPlan` for an accelerator.
    """
    placed = placements(plan.offload, "parameters")
    # weights on the host stay in memory there, whatever else moves
    if not placed or weights_on_host(plan.offload):
        return None
    if not on_host(mesh.device):
        raise RefusedPlan(f"offload={plan.offload}: {OWN_MEMORY}")

    def lay(shards: list[list[torch.Tensor]]) -> ShardFile | None:
        """Returns the file with the shards of the units that move. `shards`: for each unit, flat tensors."""
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
    """Whether the plan keeps shards of weights in the host's memory; `RefusedPlan` if `device` is the CPU."""
    if not weights_on_host(plan.offload):
        return False
    if not places.has_own_memory(device):
        raise RefusedPlan(f"offload={plan.offload}: {places.IN_MEMORY.format('parameters')}")
    return True


OWN_MEMORY = (
    "a file is mapped into the memory of the host, from which an accelerator would wait for each of its pages: use "
    "offload=parameters, the host's memory, or offload=optimizer:disk|parameters"
)
