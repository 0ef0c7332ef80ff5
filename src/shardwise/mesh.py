"""From a plan's rank grid to this rank's process groups.

plan dp_replicate=2,dp_shard=2 -> DeviceMesh [[0, 1], [2, 3]], axes dp_replicate (columns), dp_shard (rows),
and `data`, both together: the ranks over which a micro-batch's samples are dealt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm import Axis
from shardwise.errors import InputError
from shardwise.layout import Grid, Plan


@dataclass(frozen=True)
class Mesh:
    """This rank's place and its groups: one `Axis` for each mesh axis in use, and `data`."""

    plan: Plan
    rank: int
    device: torch.device
    replicate: Axis
    shard: Axis
    data: Axis
    device_mesh: DeviceMesh | None  # (dp_replicate, dp_shard), where there is more than one rank

    @property
    def group_axes(self) -> dict[str, str]:
        """Process group name -> axis name, for the ledger."""
        axes = (self.data, self.replicate, self.shard)
        return {axis.group.group_name: axis.name for axis in axes if axis.group is not None}


def build_mesh(plan: Plan, device: torch.device) -> Mesh:
    """Make this rank's groups. Collective when the plan has more than one rank."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    if world != plan.world_size:
        raise InputError(
            f"plan {plan} needs {plan.world_size} ranks, but {world} run: "
            f"start {plan.world_size} ranks or change the plan's degrees"
        )
    if world == 1:
        alone = {name: Axis.alone(name) for name in ("dp_replicate", "dp_shard", "data")}
        return Mesh(plan, 0, device, alone["dp_replicate"], alone["dp_shard"], alone["data"], None)
    shape = (plan.dp_replicate, plan.dp_shard)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    grid = Grid(plan)
    replicate = _axis(mesh, "dp_replicate", grid, rank)
    shard = _axis(mesh, "dp_shard", grid, rank)
    if shard.size == 1:
        data = Axis("dp_replicate", replicate.size, replicate.index, replicate.group, replicate.ranks)
    elif replicate.size == 1:
        data = shard
    else:
        data = Axis("data", world, rank, dist.group.WORLD, tuple(range(world)))
    return Mesh(plan, rank, device, replicate, shard, data, mesh)


def _axis(mesh: DeviceMesh, name: str, grid: Grid, rank: int) -> Axis:
    ranks = tuple(grid.group(rank, (name,)))
    if len(ranks) == 1:
        return Axis.alone(name, rank)
    return Axis(name, len(ranks), ranks.index(rank), mesh.get_group(name), ranks)
