"""Builds a rank's mesh: its process groups on the axes of a plan (order of axes: layout/grid).

plan dp_replicate=2,dp_shard=2 -> axes dp_replicate [0, 2], [1, 3] and dp_shard [0, 1], [2, 3], and `data`, both
together: the ranks over which a micro-batch's samples are dealt. With tp or pp, all ranks of these groups have the same
coordinates on those axes; `world` is all ranks.

With context parallelism `data` and `gradients` differ. Over `data`, samples are dealt. Over `gradients`, gradients of
equal weights are summed: these are `data` and the `inner` axes (domain, cp, cp_ulysses), whose ranks share their
samples and each compute a share of the positions. `shard`, over which ZeRO shards, includes the inner axes too:

    dp_shard=2,cp=2   ranks 0 1 2 3   data [0, 2], [1, 3]   cp [0, 1], [2, 3]   shard = gradients [0, 1, 2, 3]

ep folds onto `shard`: dp_shard=4,ep=2, and dp_shard=2,cp=2,ep=2 -> ep [0, 1], [2, 3]; the ranks that hold the same
experts are `expert_shard` [0, 2], [1, 3], and with dp_replicate `expert_data`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm import Axis, meet, refuse_shared_devices
from shardwise.comm.recording import name_axes
from shardwise.device import on_host, pick_device
from shardwise.errors import InputError
from shardwise.layout import Grid, Plan
from shardwise.layout.grid import AXES, INNER, SPACE

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates and groups, an `Axis` for each (of size 1 if the axis is not used).

    A mesh belongs to one task, so that results of `once` hold for each engine that is built on it.
    """

    plan: Plan
    rank: int
    device: torch.device
    replicate: Axis
    shard: Axis  # dp_shard and the inner axes: ranks over which ZeRO shards
    data: Axis  # ranks over which samples are dealt
    gradients: Axis  # replicate and shard: ranks that hold equal weights and sum their gradients
    inner: tuple[Axis, ...]  # axes in use whose ranks share samples and sum gradients, outermost first
    tp: Axis
    pp: Axis
    world: Axis
    ep: Axis
    expert_shard: Axis  # ranks of dp_shard and the inner axes with the same experts
    expert_data: Axis  # the same, over all replicas too
    device_mesh: DeviceMesh | None  # (dp_replicate, dp_shard) for FSDP2; None if `gradients` has one rank
    made: tuple[dist.ProcessGroup, ...] = ()  # groups that were made for this mesh, which `close` destroys
    found: dict[str, Any] = field(default_factory=dict, compare=False)  # name -> result of `once`

    @property
    def counts(self) -> bool:
        """Whether this rank counts losses, weights and samples, which all ranks of the inner axes have alike."""
        return all(axis.index == 0 for axis in self.inner)

    @property
    def expert_axes(self) -> tuple[Axis, Axis, Axis]:
        """Returns the axes (ep, expert_shard, expert_data)."""
        return self.ep, self.expert_shard, self.expert_data

    @property
    def group_axes(self) -> dict[str, str]:
        """Returns {name of a process group: name of its axis}, for the ledger of collectives."""
        axes = (self.world, self.gradients, self.shard, self.data, self.replicate, self.tp, self.pp, *self.inner,
                *self.expert_axes)  # fmt: skip
        return {axis.group.group_name: axis.name for axis in axes if axis.group is not None}

    def once(self, what: str, search: Callable[[], T]) -> T:
        """Returns `search()`, cached on this mesh under the name `what`. Collective if `search` is."""
        if what not in self.found:
            self.found[what] = search()
        return self.found[what]

    def close(self) -> None:
        """Destroys the process groups that were made for this mesh. No collective may be under way."""
        for group in self.made:
            dist.destroy_process_group(group)


def overlap_from(plan: Plan, host: bool) -> float:
    """Returns the number of multiplications from which a tile's convolution overlaps with halo messages; inf: never.

    host   Whether ranks compute on a CPU

    By default (domain_overlap=auto) it is what takes a fraction of a millisecond on that kind of device; a smaller
    convolution ends before a message arrives, and overlapping would only add operations.
    """
    return {"always": 0.0, "never": math.inf, "auto": 1e7 if host else 1e9}[plan.domain_overlap]


def build_mesh(plan: Plan, device: torch.device) -> Mesh:
    """Makes the process groups of a plan and returns this rank's mesh. Collective.

    Raises `InputError` if the number of running ranks is not the plan's.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    if world != plan.world_size:
        started = f"; shardwise run --nproc {plan.world_size} SCRIPT.py starts them" if world == 1 else ""
        raise InputError(
            f"plan {plan} needs {plan.world_size} ranks, but {world} run: "
            f"start {plan.world_size} ranks or change the plan's degrees{started}"
        )
    if world == 1:
        alone = {name: Axis.alone(name) for name in ("dp_replicate", "dp_shard", "data", "gradients", "tp", "pp")}
        replicate, shard, data, gradients, tp, pp = alone.values()
        experts = _experts(plan, Grid(plan), 0, shard, data)
        everyone = Axis.alone("world")
        # FSDP2 (zero=3) needs a device mesh even for one rank
        units, groups = _alone(device) if plan.sharded.weights else (None, ())
        return Mesh(plan, 0, device, replicate, shard, data, gradients, (), tp, pp, everyone, *experts, units, groups)
    refuse_shared_devices(device)
    grid = Grid(plan)
    used = [a for a, n in zip(AXES, grid.shape, strict=True) if n > 1 or a in ("dp_replicate", "dp_shard")]
    shape = tuple(dict(zip(AXES, grid.shape, strict=True))[axis] for axis in used)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=tuple(used))
    axes = {name: _axis(mesh, name, grid, rank) for name in AXES}
    least = overlap_from(plan, on_host(device))
    axes |= {name: replace(axes[name], overlap_from=least, halo_depth=plan.domain_depth) for name in SPACE}
    everyone = Axis("world", world, rank, dist.group.WORLD, tuple(range(world)))
    inner = tuple(axes[name] for name in INNER if axes[name].size > 1)
    replicate = axes["dp_replicate"]
    data = _together("data", ("dp_replicate", "dp_shard"), axes, grid, everyone)
    shard = _together("dp_shard", ("dp_shard", *INNER), axes, grid, everyone)
    gradients = data
    # ranks of inner axes share samples, so they are no data ranks, but their gradients are summed
    if inner:
        gradients = _together("gradients", ("dp_replicate", "dp_shard", *INNER), axes, grid, everyone)
    experts = _experts(plan, grid, rank, axes["dp_shard"], data)
    made = Mesh(
        plan, rank, device, replicate, shard, data, gradients, inner, axes["tp"], axes["pp"], everyone, *experts,
        _rows(mesh, replicate, shard, gradients, inner), _made(mesh, data, shard, gradients, *experts),
    )  # fmt: skip
    name_axes(made.group_axes)
    for axis in (axes["pp"], axes["cp"]):  # their first messages involve only some ranks, so connect all now
        meet(axis, device)
    return made


def _alone(device: torch.device) -> tuple[DeviceMesh, tuple[dist.ProcessGroup, ...]]:
    """Returns (device mesh (1, 1) of this rank, groups that were made for it), for FSDP2 in one process."""
    made: tuple[dist.ProcessGroup, ...] = ()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        made = (dist.group.WORLD,)
    mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    pick_device(device)  # init_device_mesh may have made the device of the rank's index current
    return mesh, made


def _rows(
    mesh: DeviceMesh, replicate: Axis, shard: Axis, gradients: Axis, inner: tuple[Axis, ...]
) -> DeviceMesh | None:
    """Returns FSDP2's device mesh (dp_replicate, dp_shard), the latter with the inner axes; None for a single rank.

    It is 1-d (dp_shard) if there are inner axes and no replicas.
    """
    if gradients.size == 1:
        return None
    if not inner:
        return mesh["dp_replicate", "dp_shard"]
    if replicate.group is None:
        return DeviceMesh.from_group(shard.group, mesh.device_type, mesh_dim_names=("dp_shard",))
    table = torch.tensor(gradients.ranks).view(replicate.size, shard.size)
    return DeviceMesh.from_group(
        [replicate.group, shard.group], mesh.device_type, mesh=table, mesh_dim_names=("dp_replicate", "dp_shard")
    )


def _made(mesh: DeviceMesh, *axes: Axis) -> tuple[dist.ProcessGroup, ...]:
    """Returns the process groups of the device mesh and the axes, without the world's."""
    groups = [*mesh.get_all_groups(), *(axis.group for axis in axes if axis.group is not None)]
    return tuple({id(group): group for group in groups if group is not dist.group.WORLD}.values())


def _experts(plan: Plan, grid: Grid, rank: int, shard: Axis, data: Axis) -> tuple[Axis, Axis, Axis]:
    """Returns the axes (ep, expert_shard, expert_data); without ep (ep of size 1, `shard`, `data`). Collective."""
    if plan.ep == 1:
        return Axis.alone("ep", rank), shard, data
    every = ("dp_replicate", "dp_shard", *INNER)
    return (
        _grouped("ep", plan, grid, rank, every, lambda at: (at["dp_replicate"], grid.shard_index(at) // plan.ep)),
        _grouped(
            "expert_shard", plan, grid, rank, every, lambda at: (at["dp_replicate"], grid.shard_index(at) % plan.ep)
        ),
        _grouped("expert_data", plan, grid, rank, every, lambda at: (grid.shard_index(at) % plan.ep,)),
    )


def _grouped(
    name: str, plan: Plan, grid: Grid, rank: int, over: tuple[str, ...], key: Callable[[dict[str, int]], tuple]
) -> Axis:
    """Returns an axis over the ranks that differ only on the axes `over` and have this rank's key. Collective.

    key   coordinates of a rank by axis -> its key
    """
    groups: dict[tuple, list[int]] = {}
    for other in range(plan.world_size):
        at = grid.coordinates(other)
        rest = tuple(at[axis] for axis in AXES if axis not in over)
        groups.setdefault((rest, key(at)), []).append(other)
    ranks = next(tuple(group) for group in groups.values() if rank in group)
    if len(ranks) == 1:
        return Axis.alone(name, rank)
    mine, _ = dist.new_subgroups_by_enumeration(list(groups.values()))
    return Axis(name, len(ranks), ranks.index(rank), mine, ranks)


def _together(name: str, names: tuple[str, ...], axes: dict[str, Axis], grid: Grid, world: Axis) -> Axis:
    """Returns an axis called `name` over the product of the axes `names`. Collective.

    An existing group is reused if only one of them has several ranks, or all ranks are in the product.
    """
    used = [axes[axis_name] for axis_name in names if axes[axis_name].size > 1]
    if len(used) <= 1:
        return used[0] if used else axes[names[0]]
    # the world's own group, so that no second communicator is made
    if math.prod(axis.size for axis in used) == world.size:
        return Axis(name, world.size, world.index, world.group, world.ranks)
    # every rank must make the same groups, in the same order
    groups = sorted({tuple(grid.group(r, names)) for r in world.ranks})
    mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    ranks = next(ranks for ranks in groups if world.index in ranks)
    return Axis(name, len(ranks), ranks.index(world.index), mine, ranks)


def _axis(mesh: DeviceMesh, name: str, grid: Grid, rank: int) -> Axis:
    ranks = tuple(grid.group(rank, (name,)))
    if len(ranks) == 1:
        return Axis.alone(name, rank)
    return Axis(name, len(ranks), ranks.index(rank), mesh.get_group(name), ranks)
