"""Set up a plan's `offload`, `optimizer_state` and `masters`: refusals, and a rank's `StateTiers`.

An optimizer is tried, not recognised. On small tensors, stepped one sub-group of parameters after another, it must give
the same bits as in one step. Then a copy of it takes a step on zeros for each kind of parameter, to see its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from weakref import proxy

import torch
from torch import nn

from shardwise.comm import gather_json
from shardwise.device import on_host
from shardwise.engine.optimizer import same_by_subgroups
from shardwise.errors import RefusedPlan
from shardwise.layout.offload import Placement, placements, weights_on_host
from shardwise.look.memory_limits import check_host
from shardwise.step.optimizer_modes import has_mode
from shardwise.step.state import RankState
from shardwise.step.task_optimizer import OptimizerFn
from shardwise.tiers import (
    CODECS,
    HALVES,
    DeviceMemory,
    Draw,
    HostMemory,
    Place,
    StateFile,
    StateTiers,
    Subgroup,
    Undo,
    Unit,
    element_draws,
    kept_for,
    places,
)
from shardwise.tiers import subgroups as rules
from shardwise.tiers.subgroups import Path, Spec


def make_tier(state: RankState, makes: Sequence[OptimizerFn]) -> StateTiers | None:
    """Returns what moves and codes the optimizer's state between steps; None if the plan asks for neither.

    makes   functions that make such an optimizer over given groups, by which it is tried; one for each setting
    Raises `RefusedPlan` for an optimizer whose state cannot be moved or coded, and a tier without room. Collective.
    """
    state.notices += _op_by_op(state)
    placed, narrow = _moving(state), _narrow(state)
    as_made = state.plan.gradients == "as_made"
    if as_made:
        _refuse_as_made(state)
    # no state moves or is coded, and no weight is updated within backward or lies in a file (owners' masters never do)
    if not placed and not narrow and not as_made and (state.shards is None or state.owners is not None):
        _check_host(state, ())
        return None
    _refuse(state, placed, makes)
    with torch.random.fork_rng(devices=[]):
        units = _units(state, kept=bool(placed) or state.plan.optimizer_state != "full")
    if placed or narrow:  # depends on the plan alone, so that all ranks join the collective
        _refuse_nothing(state, units)
    placed_groups: list[tuple[Place, list[Subgroup]]] = []
    dealt = rules.dealt(units, placed)
    _check_host(state, [*zip(placed, dealt, strict=True)])
    for placement, part in zip(placed, dealt, strict=True):
        groups = rules.grouped(part)
        if groups:
            placed_groups.append((_place(placement, groups, state), groups))
        elif units:  # a rank without units updates nothing, since there are fewer elements than ranks
            state.notices.append(_nothing_moves(placement, units, state))
    left = units[sum(map(len, dealt)) :]
    # the rest steps by sub-groups too if its state is coded, or if not all weights are in memory at once
    if stays := [unit for unit in map(_staying, left) if unit.size or unit.weights]:
        groups = rules.grouped(stays)
        placed_groups.append((DeviceMemory(groups, state.device) if narrow else Place(), groups))
    params = [param for group in state.optimizer.param_groups for param in group["params"]]
    # a script may later give its optimizer parameters that are views of the same masters
    known = {*params}
    params += [slot.master for slot in state.technique.slots if slot.master not in known]
    rounds = state.owners is None
    # a weak reference, without which a cycle would keep the file until garbage is collected
    technique = proxy(state.technique)
    return StateTiers(
        state.optimizer, placed_groups, lambda: technique.wide_masters() if rounds else [], params, rounds=rounds,
        shards=state.shards, undo=partial(Undo, rank=state.mesh.rank) if _may_take_back(state) else None,
        draws=_draws(state) if state.plan.optimizer_state != "full" else None,
    )  # fmt: skip


def _op_by_op(state: RankState) -> list[str]:
    """Returns [a notice] if the CPU updates weights op by op though the optimizer has a fused kernel, else []."""
    if not weights_on_host(state.plan.offload) or getattr(state.optimizer, "defaults", {}).get("fused", True):
        return []
    return [
        f"{type(state.optimizer).__name__} updates weights on the host's processor op by op: with fused=True it does "
        "so in one kernel, in about a third of the time, and rounds the last digit otherwise"
    ]


def _moving(state: RankState) -> tuple[Placement, ...]:
    """Returns the plan's placements of optimizer state, but those to the host if weights lie on the host already."""
    beside = weights_on_host(state.plan.offload)
    placed = placements(state.plan.offload, "optimizer")
    return tuple(placement for placement in placed if not (beside and placement.tier == "host"))


def _narrow(state: RankState) -> str:
    """Returns the plan's options that code state between steps, as "optimizer_state=8bit,masters=split"; else ""."""
    keys = ("optimizer_state", "masters")
    return ",".join(f"{key}={getattr(state.plan, key)}" for key in keys if getattr(state.plan, key) != "full")


def _staying(unit: Unit) -> Unit:
    """Returns a copy of a unit that stays on the device, with only those tensors that are coded between steps."""
    states = [{path: spec for path, spec in state.items() if spec.codec is not None} for state in unit.states]
    coded = unit.master is not None and unit.master.codec is not None
    return replace(unit, states=states, master=unit.master if coded else None, wide=unit.wide if coded else None)


def _draws(state: RankState) -> Callable[[nn.Parameter, Path], Draw]:
    """Returns a function from (parameter, path of a state tensor) to random bits for that tensor's elements.

    The bits round the tensor's values in this step (`tiers.narrow.Draw`). They depend on each element's place in the
    unsharded parameter, so that all ranks and shards round alike.
    """
    state = proxy(state)
    index_of = {name: index for index, name in enumerate(state.names)}
    select = getattr(state.technique, "select", None)
    held = [(slot.name, slot.master, slot.shape) for slot in state.technique.slots]
    # owners update unsharded tensors, of which there is no piece to select
    if state.owners is not None:
        held = [(state.names[index], master, master.shape) for index, master in state.owners.masters.items()]
        select = None
    where: dict[int, tuple[str, torch.Tensor]] = {}
    for name, master, shape in held:
        whole = torch.empty(shape, device="meta")
        # `piece` is a meta view of `whole`, whose offset and strides say where each element lies in it
        where[id(master)] = name, whole if select is None else select(index_of[name], whole, state.mesh.shard.index)

    def draws(param: nn.Parameter, path: Path) -> Draw:
        name, piece = where[id(param)]
        key = element_draws.key_of(state.seed, f"{name}/{path}", state.steps_done)
        return lambda first, last: element_draws.draws(key, piece, first, last, param.device)

    return draws


def _refuse(state: RankState, placed: Sequence[Placement], makes: Sequence[OptimizerFn]) -> None:
    """Raises `RefusedPlan` for an optimizer or a device with which state cannot be moved or coded.

    placed  where state moves;  makes  as of `make_tier`
    """
    offload = f"offload={state.plan.offload}" if placed or state.shards else ""
    as_made = "gradients=as_made" if state.plan.gradients == "as_made" else ""
    text = ",".join(filter(None, [offload, _narrow(state), as_made]))
    # on a CPU the host's memory is the device's: nothing would be spared
    if not places.has_own_memory(state.device) and any(one.tier == "host" for one in placed):
        raise RefusedPlan(f"{text}: {places.IN_MEMORY.format('optimizer')}")
    # a schedule-free optimizer needs its state on a switch to evaluation, outside of a step
    if has_mode(state.optimizer) and not on_host(state.device):
        raise RefusedPlan(
            f"{text}: {type(state.optimizer).__name__} is switched between training and evaluation, which changes "
            "weights by state that would lie elsewhere: leave optimizer out of offload"
        )
    # codes were tried with state on the device only
    if _narrow(state) and weights_on_host(state.plan.offload):
        raise RefusedPlan(
            f"{text}: state lies beside weights on the host, where codes were not tried: leave {_narrow(state)} out"
        )
    if state.plan.masters == "split":
        _refuse_split(state, placed)
    slots = state.technique.slots
    shapes, numbers = [slot.shape for slot in slots], [slot.master.is_complex() for slot in slots]
    # the optimizer must give the same bits if it steps over sub-groups one after another
    alike = not state.needs_closure and all(same_by_subgroups(make, shapes, numbers) for make in makes)
    if not alike:
        raise RefusedPlan(
            f"{text}: the optimizer would step by sub-groups of parameters, and on a trial "
            f"{type(state.optimizer).__name__} does not give the same bits so (the update of one tensor depends on "
            f"others, or it counts its own calls): leave {text.split('=')[0]} out, or use an optimizer that treats "
            "tensors one by one"
        )


def _may_take_back(state: RankState) -> bool:
    """Whether a step may have to be undone, since gradients are used before their norm is known (clip, skip)."""
    return state.plan.gradients == "as_made" and (state.clip_norm is not None or state.on_nonfinite == "skip")


def _refuse_as_made(state: RankState) -> None:
    """Raise `RefusedPlan` if `gradients=as_made` (weights are updated within backward) is not possible here."""
    if _may_take_back(state) and placements(state.plan.offload, "optimizer") != (Placement("optimizer", "disk"),):
        late = "clip_norm" if state.clip_norm is not None else 'on_nonfinite="skip"'
        raise RefusedPlan(
            f"gradients=as_made: {late} looks at the norm of all gradients, known when weights have moved, and a step "
            "is taken back from the half of a disk's file that it only read: use offload=optimizer:disk, or leave "
            "gradients out"
        )
    if state.owners is not None:
        why = f"{type(state.optimizer).__name__} updates whole tensors on their owners, to which all gradients go first"
    elif state.written:
        why = "the forward writes into weights, which masters follow after backward"
    elif state.plan.sharded.weights and not on_host(state.device):
        why = "FSDP2 reduces gradients in a stream of its own there, in which an update was not tried: use zero=2"
    else:
        return
    raise RefusedPlan(f"gradients=as_made: {why}: leave gradients out")


def _refuse_split(state: RankState, placed: Sequence[Placement]) -> None:
    """Raise `RefusedPlan` if masters cannot be split into the bf16 weight and the bits that it lacks."""
    if state.owners is not None:
        why = f"{type(state.optimizer).__name__} updates whole tensors on their owners, beside all ranks' pieces"
    elif state.written:
        why = "the forward writes into weights, each of which would be half of a master"
    elif has_mode(state.optimizer):
        why = f"{type(state.optimizer).__name__} has weights of its own for evaluation, written past its steps"
    elif placed and not on_host(state.device):
        why = "with offload=optimizer masters lie on this device and the rest of the state does not, one sub-group each"
    else:
        return
    raise RefusedPlan(f"masters=split: {why}: leave masters out")


def _refuse_nothing(state: RankState, units: Sequence[Unit]) -> None:
    """Raise `RefusedPlan` if an option (offload, optimizer_state, masters) has no effect on any rank. Collective."""
    name, plan = type(state.optimizer).__name__, state.plan
    codecs = [spec.codec for unit in units for spec in unit.specs]
    mine = [bool(codecs), any(codec not in (None, HALVES) for codec in codecs), HALVES in codecs]
    # a rank that owns matrices alone may have nothing to be coded, where another has
    moves, coded, split = map(any, zip(*gather_json(mine, state.mesh.world, state.device), strict=True))
    if placements(plan.offload, "optimizer") and not moves:
        raise RefusedPlan(
            f"offload={plan.offload}: {name} keeps no state beside the weights that could lie elsewhere (SGD without "
            "momentum): leave optimizer out of offload"
        )
    if plan.optimizer_state != "full" and not coded:
        raise RefusedPlan(
            f"optimizer_state={plan.optimizer_state}: {name} keeps no real tensor of a weight's shape, wider than "
            "that, beside it (SGD without momentum): leave optimizer_state out"
        )
    if plan.masters == "split" and not split:
        raise RefusedPlan("masters=split: no weight has a master in float32 beside it in bf16: leave masters out")


def _check_host(state: RankState, dealt: Sequence[tuple[Placement, Sequence[Unit]]]) -> None:
    """Raise `RefusedPlan` if the ranks of a host will allocate more of its memory than is free. Collective.

    dealt  (placement, units that move there), for each placement
    """
    needed = sum(unit.size for placement, part in dealt if placement.tier == "host" for unit in part)
    beside = weights_on_host(state.plan.offload)
    # the state of an optimizer with a closure is unknown, since a trial step on zeros needs the closure
    if beside and not state.needs_closure:
        # gradients and state will be allocated on the host, where the weights are
        with torch.random.fork_rng(devices=[]):
            units = _units(state, kept=True)
        needed += sum(param.numel() * param.element_size() for unit in units for param in unit.params)
        needed += sum(unit.size for unit in units) - sum(unit.size for _, part in dealt for unit in part)
    if beside or any(placement.tier == "host" for placement, _ in dealt):
        check_host(needed, state.plan, state.mesh)


def _nothing_moves(placement: Placement, units: Sequence[Unit], state: RankState) -> str:
    """Returns the notice that a placement moves no state, with the unit sizes that explain it."""
    largest, total = max(unit.size for unit in units), sum(unit.size for unit in units)
    return (
        f"offload={state.plan.offload}: nothing moves for {placement}: what moves together (a parameter's state, or "
        f"all of a bucket's) is up to {largest:,} of {total:,} bytes, and lies where more than half of it would: give "
        "another fraction"
    )


def _place(placement: Placement, groups: list[Subgroup], state: RankState) -> Place:
    """Allocates room for sub-groups of state, in the host's memory or a file, and returns its `Place`."""
    if placement.tier == "host":
        return HostMemory(groups, state.device)
    disk = StateFile(groups, state.mesh.rank)
    state.notices.extend(disk.notices)
    return disk


def _units(state: RankState, *, kept: bool) -> list[Unit]:
    """Returns `Unit`s of parameters whose state moves together, in the optimizer's order.

    A unit is one parameter, or all pieces of one bucket's master. kept: whether units have the optimizer's state, too
    """
    split = state.plan.masters == "split"
    # masters on an accelerator stay, since a gradient must be on its parameter's device; split ones are coded there
    moves = state.owners is None and (on_host(state.device) or split)
    masters = state.technique.wide_masters() if moves else []
    specs = [_spec_of_master(weight, master, split) for weight, master in masters]
    states_by_kind: dict[tuple, dict] = {}
    units: list[Unit] = []
    of_master: dict[int, Unit] = {}
    for number, group in enumerate(state.optimizer.param_groups):
        for param in (param for param in group["params"] if param.requires_grad):  # a script's group may list others
            kind = (number, param.shape, param.stride(), param.dtype, *sorted(map(str, vars(param).items())))
            if kind not in states_by_kind:
                specs_of_kind = kept_for(state.optimizer, number, param) if kept and param.numel() else {}
                states_by_kind[kind] = {path: _coded(state, spec, param) for path, spec in specs_of_kind.items()}
            wide = _master_of(param, masters)
            if wide is None or wide not in of_master:
                units.append(Unit([], [], wide, None if wide is None else specs[wide]))
                # a master of one element, or not dense, has no spec and stays where it is
                units[-1].wide = wide if units[-1].master is not None else None
                if wide is not None:
                    of_master[wide] = units[-1]
            unit = units[-1] if wide is None else of_master[wide]
            unit.params.append(param)
            unit.states.append(states_by_kind[kind])
            lies_beside = state.shards is not None and state.shards.holds(param)
            # such weights or gradients are in memory only during their sub-group's step, so their bytes count in it
            if lies_beside or state.plan.gradients == "as_made":
                unit.weights += param.numel() * param.element_size()
    return units


def _coded(state: RankState, spec: Spec, param: nn.Parameter) -> Spec:
    """Returns `spec`, with the plan's codec if it is of a real tensor of the parameter's shape and gets smaller."""
    codec = CODECS.get(state.plan.optimizer_state)
    if codec is None or spec.shape != param.shape or not spec.dtype.is_floating_point:
        return spec
    return spec.narrowed(codec) if codec.size(2**20) < spec.dtype.itemsize * 2**20 else spec


def _spec_of_master(weight: torch.Tensor, master: torch.Tensor, split: bool) -> Spec | None:
    """Returns a master's `Spec`, or None if it stays; coded by `HALVES` if `split` and it is float32 beside bf16."""
    spec = rules.spec_of(master)
    fits = weight.dtype == torch.bfloat16 and master.dtype == torch.float32 and weight.stride() == master.stride()
    return spec.narrowed(HALVES) if spec is not None and split and fits else spec


def _master_of(param: nn.Parameter, masters: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int | None:
    """Returns the index, among (weight, master) pairs, of the master that `param` is or views; None without one."""
    for number, (_, master) in enumerate(masters):
        start = master.data_ptr()
        if param.numel() and start <= param.data_ptr() < start + master.numel() * master.element_size():
            return number
    return None
