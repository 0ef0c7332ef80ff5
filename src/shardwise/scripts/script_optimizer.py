"""Points a script's optimizer at this rank's pieces, in the same object, which schedulers hold. Its `step`: stepping.

Schedulers and logging hold the object and its groups, so both stay; the groups then list the pieces that the plan gives
this rank. Which pieces the optimizer can run on is found by trial, as for a task (`engine/optimizer`).

If every rank holds whole tensors, frozen ones stay in their groups, so that numbers in a saved state mean the same
parameters as in one process.

State of earlier steps goes with the parameters: as it is, or cut into pieces (`adopt`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engine.engine import Engine
from shardwise.engine.optimizer import Nature, refuse, try_out
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.parallel.slots import DataParallel
from shardwise.scripts.joint_optimizer import members_of, refuse_several, stepping_over
from shardwise.scripts.script_lines import names_line
from shardwise.step.owners import OwnedMasters, PieceSlots
from shardwise.step.task_optimizer import OptimizerFn

THAWS = (
    "what is trained later is in the plan from the start by prepare(..., thaws=True), or where the script freezes it "
    "after prepare instead of before"
)
_OWN = ("param_groups", "state", "defaults")


def names_in_groups(held: Sequence[dict[str, Any]], module: nn.Module) -> list[list[str]]:
    """Returns the parameter names of each group `held`; `InputError` for a tensor that is no parameter of `module`."""
    names = {id(param): name for name, param in module.named_parameters()}
    groups = []
    for group in held:
        unknown = [param for param in group["params"] if id(param) not in names]
        if unknown:
            raise InputError(
                f"prepare: the optimizer is given a tensor of shape {tuple(unknown[0].shape)} that is no parameter of "
                "the model: make the optimizer from this model's parameters, or prepare what holds them all (learned "
                "weights of a loss: prepare((model, nn.ParameterList([weights])), ...))"
            )
        groups.append([names[id(param)] for param in group["params"]])
    return groups


def refuse_lost(optimizer: Optimizer, plan: Plan) -> None:
    """Raises `InputError` if an optimizer made anew from its class and groups would lack a setting of this one.

    That is a setting which the constructor took and neither groups nor defaults keep. `RefusedPlan` as
    `refuse_several`.
    """
    refuse_several(optimizer, plan)
    plain = (bool, int, float, str, tuple, type(None))
    for one in members_of(optimizer):
        fresh = _made(one, [{**_settings(group), "params": group["params"]} for group in one.param_groups])
        for name, value in vars(one).items():
            other = vars(fresh).get(name)
            if name not in _OWN and isinstance(value, plain) and isinstance(other, plain) and value != other:
                raise InputError(
                    f"prepare: {type(one).__name__} cannot be made anew from its class and groups: its '{name}' is "
                    f"{value!r}, and would be {other!r}; keep the setting in the optimizer's defaults"
                )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's settings, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _made(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Returns a new optimizer of the same class and settings over these groups; `InputError` if none can be made."""
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    try:
        return kind(groups, **settings)
    except TypeError as error:
        raise InputError(
            f"prepare: {kind.__name__} cannot be made anew from its class and groups ({error}): keep every setting in "
            "the optimizer's defaults"
        ) from error


Kind = tuple[torch.Size, bool]  # of a parameter: its shape, and whether it is complex


def nature_of(optimizer: Optimizer, groups: Sequence[dict[str, Any]], kinds: Sequence[Sequence[Kind]]) -> Nature:
    """Returns the `Nature` of the group whose update needs most (elements, tensors or all), by a trial of each.

    kinds  (shape, whether complex) of the trained parameters of each group
    Raises `InputError` if no group has a trained parameter, or the class cannot be made anew.
    """
    found = []
    for group, of_group in zip(groups, kinds, strict=True):
        if of_group:
            shapes, numbers = zip(*of_group, strict=True)
            found.append(try_out(_flat(stepping_over(optimizer, group), _settings(group)), shapes, numbers))
    if not found:
        raise InputError("prepare: the optimizer holds no parameter of the model that requires a gradient")
    return max(found, key=lambda nature: nature.needs)


def _flat(optimizer: Optimizer, settings: dict[str, Any]) -> OptimizerFn:
    """Returns a function from param groups to an optimizer over all their parameters, as one group of `settings`."""

    def make(groups: list[dict]) -> Optimizer:
        return _made(optimizer, [{**settings, "params": [param for group in groups for param in group["params"]]}])

    return make


def makes_of(optimizer: Optimizer) -> list[OptimizerFn]:
    """Returns for each group a function that makes an optimizer of its class and settings over other parameters."""
    return [_flat(stepping_over(optimizer, group), _settings(group)) for group in optimizer.param_groups]


def adopt(
    optimizer: Optimizer, groups: list[list[str]], all_names: list[list[str]], engine: Engine,
    shapes: dict[str, torch.Size], nature: Nature, *, whole: bool,
) -> OwnedMasters | None:  # fmt: skip
    """Points the optimizer at this rank's pieces, in place; returns the `OwnedMasters`, or None.

    groups     names of the trained parameters, by group;  all_names  those of frozen ones too
    shapes     name -> whole shape of each trained parameter
    nature     what the update needs; if whole tensors, each is owned by one rank, and these are returned
    whole      Whether every piece is a whole parameter, so that frozen ones stay in the groups
    Raises `RefusedPlan` for an optimizer that cannot run on pieces.
    """
    owners, technique, names, shard = None, engine.technique, engine.state.names, engine.mesh.shard
    zero = engine.plan.sharded
    refuse(nature, zero, named=type(optimizer).__name__)
    if nature.whole and (zero.state or engine.plan.tp > 1):
        # `axis` None: data ranks hold all elements, and ranks of tp shares
        axis, wholes = shard if zero.state else None, [shapes[name] for name in names]
        owners = OwnedMasters(cast(PieceSlots, technique), names, wholes, axis, engine.state.tensor)
    held = held_pieces(technique, owners, names)
    pieces = [[piece for name in group for piece in held.get(name, [])] for group in groups]
    in_plan = [[name in shapes for name in group] for group in all_names]
    state: dict[Any, Any] = {}
    if whole:  # frozen parameters stay in their groups, and the state so far with its parameter
        triples = zip(optimizer.param_groups, pieces, in_plan, strict=True)
        pieces = [_with_frozen(group["params"], of_group, mine) for group, of_group, mine in triples]
        olds = [param for group in optimizer.param_groups for param in group["params"]]
        news = [param for group in pieces for param in group]
        state = {new: optimizer.state[old] for old, new in zip(olds, news, strict=True) if old in optimizer.state}
    for group, params in zip(optimizer.param_groups, pieces, strict=True):
        group["params"] = params
        group.pop("param_names", None)
    optimizer.state.clear()
    for one in members_of(optimizer):
        # a rank may have no piece of a group, or of any: no optimizer is made of nothing
        filled = [{**_settings(group), "params": group["params"]} for group in one.param_groups if group["params"]]
        if not filled:
            continue
        made = _made(one, filled)
        # a constructor may make state (Adagrad's sums) and attributes: those over the pieces replace the script's
        one.state.update(made.state)
        kept = {key: value for key, value in vars(made).items() if key not in _OWN and "hook" not in key}
        vars(one).update(kept)
    optimizer.state.update(state)
    return owners


def held_pieces(
    technique: DataParallel, owners: OwnedMasters | None, names: list[str]
) -> dict[str, list[nn.Parameter]]:  # fmt: skip
    """Returns {name: this rank's pieces of a parameter}; with `owners` {name: [whole master]} of those it owns."""
    if owners is not None:
        return {names[index]: [master] for index, master in owners.masters.items()}
    held: dict[str, list[nn.Parameter]] = {}
    for slot in technique.slots:
        if slot.master.numel() or slot.whole:
            held.setdefault(slot.name, []).append(slot.master)
    return held


def retire(optimizer: Optimizer) -> None:
    """Makes an optimizer's `step` raise `InputError`, since another one took its place."""

    @names_line
    def step(self: Optimizer, closure: Any = None) -> None:
        raise InputError("optimizer.step() of an optimizer that prepared.replace_optimizer took the place of")

    for one in members_of(optimizer):
        vars(one)["step"] = types.MethodType(step, one)


def _with_frozen(given: list[nn.Parameter], pieces: list[nn.Parameter], in_plan: list[bool]) -> list[nn.Parameter]:
    """Returns a group's parameters in their order, with those that are in the plan (`in_plan`) replaced by pieces."""
    masters = iter(pieces)
    return [next(masters) if mine else param for param, mine in zip(given, in_plan, strict=True)]


def refuse_thawed(
    groups: Sequence[dict[str, Any]], all_names: list[list[str]], shapes: dict[str, torch.Size]
) -> None:  # fmt: skip
    """Raises `InputError` for a parameter that requires a gradient and was frozen at `prepare`."""
    for group, names in zip(groups, all_names, strict=True):
        for param, name in zip(group["params"], names, strict=True):
            if param.requires_grad and name not in shapes:
                raise InputError(f"the optimizer is given '{name}', which was frozen at prepare: {THAWS}")
