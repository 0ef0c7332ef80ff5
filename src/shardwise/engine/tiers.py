"""From a plan's `offload` to a rank's `StateTiers`: what is refused, what moves and where. Made by `parallelize`.

An optimizer is tried, not recognised: on small tensors, sub-group by sub-group, it must give the same bits as at once.
Then a copy of it takes a step on zeros for each kind of parameter, which tells what it keeps of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import proxy

import torch
from torch import nn

from shardwise.device import on_host
from shardwise.engine.optimizer import same_by_subgroups
from shardwise.errors import RefusedPlan
from shardwise.layout.offload import Placement, placements, weights_on_host
from shardwise.step.optimizer_modes import has_mode
from shardwise.step.state import RankState
from shardwise.step.task_optimizer import OptimizerFn
from shardwise.tiers import HostMemory, Place, StateFile, StateTiers, Subgroup, Unit, kept_for, places
from shardwise.tiers import subgroups as rules


def make_tier(state: RankState, makes: Sequence[OptimizerFn]) -> StateTiers | None:
    """Returns where the optimizer's state lies between steps, as the plan says; None where all it updates is here.

    makes   what makes such an optimizer, by which it is tried; one for each of the settings that its groups have
    Raises `RefusedPlan` for an optimizer whose state cannot lie elsewhere, and a place that has no room.
    """
    state.notices += _op_by_op(state)
    placed = _moving(state)
    if not placed and (state.shards is None or state.owners is not None):  # owners update whole tensors, in memory
        return None
    _refuse(state, placed, makes)
    with torch.random.fork_rng(devices=[]):
        units = _units(state, kept=bool(placed))
    if placed and not any(unit.size for unit in units):
        raise RefusedPlan(
            f"offload={state.plan.offload}: {type(state.optimizer).__name__} keeps no state beside the weights that "
            "could lie elsewhere (SGD without momentum): leave optimizer out of offload"
        )
    placed_groups: list[tuple[Place, list[Subgroup]]] = []
    dealt = rules.dealt(units, placed)
    for placement, part in zip(placed, dealt, strict=True):
        groups = rules.grouped(part)
        if groups:
            placed_groups.append((_place(placement, groups, state), groups))
        else:
            state.notices.append(_nothing_moves(placement, units, state))
    # whose state stays steps by sub-groups too, so that few of the weights are here at once
    stays = [unit.without_state() for unit in units[sum(map(len, dealt)) :] if unit.weights]
    if stays:
        placed_groups.append((Place(), rules.grouped(stays)))
    params = [param for group in state.optimizer.param_groups for param in group["params"]]
    rounds = state.owners is None
    # no cycle: an engine that is dropped gives the file's room back at once
    technique = proxy(state.technique)
    return StateTiers(
        state.optimizer, placed_groups, lambda: technique.wide_masters() if rounds else [], params, rounds=rounds,
        shards=state.shards,
    )  # fmt: skip


def _op_by_op(state: RankState) -> list[str]:
    """Returns a notice where the host's processor updates op by op what one of torch's kernels could."""
    if not weights_on_host(state.plan.offload) or getattr(state.optimizer, "defaults", {}).get("fused", True):
        return []
    return [
        f"{type(state.optimizer).__name__} updates weights on the host's processor op by op: with fused=True it does "
        "so in one kernel, in about a third of the time, and rounds the last digit otherwise"
    ]


def _moving(state: RankState) -> tuple[Placement, ...]:
    """Returns the placements for which state moves: none to the host, where weights lie there with what they have."""
    beside = weights_on_host(state.plan.offload)
    placed = placements(state.plan.offload, "optimizer")
    return tuple(placement for placement in placed if not (beside and placement.tier == "host"))


def _refuse(state: RankState, placed: Sequence[Placement], makes: Sequence[OptimizerFn]) -> None:
    text = f"offload={state.plan.offload}"
    if not places.gains(state.device) and any(one.tier == "host" for one in placed):
        raise RefusedPlan(f"{text}: {places.IN_MEMORY.format('optimizer')}")
    if has_mode(state.optimizer) and not on_host(state.device):
        raise RefusedPlan(
            f"{text}: {type(state.optimizer).__name__} is switched between training and evaluation, which changes "
            "weights by state that would lie elsewhere: leave optimizer out of offload"
        )
    slots = state.technique.slots
    shapes, numbers = [slot.shape for slot in slots], [slot.master.is_complex() for slot in slots]
    alike = not state.needs_closure and all(same_by_subgroups(make, shapes, numbers) for make in makes)
    if not alike:
        raise RefusedPlan(
            f"{text}: the optimizer would step by sub-groups of parameters, and on a trial "
            f"{type(state.optimizer).__name__} does not give the same bits so (the update of one tensor depends on "
            "others, or it counts its own calls): leave offload out, or use an optimizer that treats tensors one by one"
        )


def _nothing_moves(placement: Placement, units: Sequence[Unit], state: RankState) -> str:
    largest, total = max(unit.size for unit in units), sum(unit.size for unit in units)
    return (
        f"offload={state.plan.offload}: nothing moves for {placement}: what moves together (a parameter's state, or "
        f"all of a bucket's) is up to {largest:,} of {total:,} bytes, and lies where more than half of it would: give "
        "another fraction"
    )


def _place(placement: Placement, groups: list[Subgroup], state: RankState) -> Place:
    if placement.tier == "host":
        return HostMemory(groups, state.device)
    disk = StateFile(groups, state.mesh.rank)
    state.notices.extend(disk.notices)
    return disk


def _units(state: RankState, *, kept: bool) -> list[Unit]:
    """Returns the `Unit`s that move together, in the optimizer's order: a parameter each, or a bucket's pieces.

    kept  with what the optimizer keeps of each
    """
    # a device's masters stay: their gradients lie beside them, and torch has no gradient on another device
    masters = state.technique.wide_masters() if state.owners is None and on_host(state.device) else []
    states_by_kind: dict[tuple, dict] = {}
    units: list[Unit] = []
    of_master: dict[int, Unit] = {}
    for number, group in enumerate(state.optimizer.param_groups):
        for param in (param for param in group["params"] if param.requires_grad):  # a script's group may list others
            kind = (number, param.shape, param.stride(), param.dtype, *sorted(map(str, vars(param).items())))
            if kind not in states_by_kind:
                states_by_kind[kind] = kept_for(state.optimizer, number, param) if kept and param.numel() else {}
            wide = _master_of(param, masters)
            if wide is None or wide not in of_master:
                units.append(Unit([], [], wide, None if wide is None else rules.spec_of(masters[wide][1])))
                units[-1].wide = wide if units[-1].master is not None else None
                if wide is not None:
                    of_master[wide] = units[-1]
            unit = units[-1] if wide is None else of_master[wide]
            unit.params.append(param)
            unit.states.append(states_by_kind[kind])
            if state.shards is not None and state.shards.holds(param):
                unit.weights += param.numel() * param.element_size()
    return units


def _master_of(param: nn.Parameter, masters: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int | None:
    """Returns the number of the wide master that a parameter is, or is a view of."""
    for number, (_, master) in enumerate(masters):
        start = master.data_ptr()
        if param.numel() and start <= param.data_ptr() < start + master.numel() * master.element_size():
            return number
    return None
