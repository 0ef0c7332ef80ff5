"""`state_dict` and `load_state_dict` of a script's optimizer under a plan: whole state, as one process has it.

    optimizer.state_dict()        pieces of all ranks, put together: whole tensors, on the CPU of every rank
    optimizer.load_state_dict()   whole tensors, from any plan or one process; each rank takes its pieces

Parameters have the numbers of the script's own groups. If every rank holds whole tensors (replicas), and before the
model is spread, the optimizer's own methods run.

What this does not do: cut a tensor of the state that is neither like its parameter nor one number; it is refused.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.scripts.joint_optimizer import members_of, refuse_added
from shardwise.scripts.script_lines import names_line
from shardwise.step.optimizer_modes import has_mode, switch
from shardwise.step.state import RankState

States = dict[str, dict[str, Any]]  # parameter's name -> its whole optimizer state


def open_doors(prepared: Any) -> None:
    """Replaces methods of the script's optimizer, and the model's `zero_grad`, by those of a plan."""
    for optimizer in members_of(prepared.optimizer):
        _open_doors_of(optimizer, prepared)
    vars(prepared.model)["zero_grad"] = types.MethodType(
        lambda module, set_to_none=True: prepared._discard(), prepared.model
    )


def _open_doors_of(optimizer: Optimizer, prepared: Any) -> None:
    """Replaces the methods of one optimizer: step, zero_grad, add_param_group, state_dict, load_state_dict, modes."""
    kind, inner = type(optimizer), optimizer.step

    def own_names() -> list[list[str]]:
        """Returns the names of the parameters in this optimizer's groups, by group."""
        groups = zip(prepared.optimizer.param_groups, prepared.all_names, strict=True)
        return [names for group, names in groups if any(group is own for own in optimizer.param_groups)]

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return prepared._step(inner, closure, self)

    if hasattr(inner, "_wrapped_by_lr_sched"):  # a scheduler warns if its mark is gone
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        prepared._discard(own_names())

    def add_param_group(self: Optimizer, group: dict[str, Any]) -> None:
        _refuse_in_whole(prepared, "optimizer.add_param_group(...)")
        refuse_added(prepared.optimizer)
        prepared._add_group(group)

    @names_line
    def state_dict(self: Optimizer) -> dict[str, Any]:
        engine = prepared.held_in_pieces
        # every rank holds whole state: the optimizer's own method
        if engine is None:
            return kind.state_dict(self)
        _refuse_in_whole(prepared, "optimizer.state_dict()")
        prepared.meet("optimizer.state_dict()")
        with prepared.plainly():
            return _numbered(self, own_names(), engine)

    @names_line
    def load_state_dict(self: Optimizer, state: Mapping[str, Any]) -> None:
        """Stands for the optimizer's own: each rank takes its pieces of whole state."""
        _refuse_in_whole(prepared, "optimizer.load_state_dict(...)")
        prepared.meet_with("optimizer.load_state_dict(...)", dict(state))
        engine = prepared.held_in_pieces
        if engine is None:
            kind.load_state_dict(self, dict(state))
            return prepared.settle_state()
        with prepared.plainly():
            return put(engine.state, self, *_named(state, own_names()))

    # schedule-free optimizers have other weights in each mode
    for name in ("train", "eval") if has_mode(optimizer) else ():
        vars(optimizer)[name] = _switching(prepared, optimizer, getattr(kind, name))
    for door in (step, zero_grad, add_param_group, state_dict, load_state_dict):
        vars(optimizer)[door.__name__] = types.MethodType(door, optimizer)


def _switching(prepared: Any, optimizer: Optimizer, change: Callable[[Optimizer], Any]) -> Callable[[], Any]:
    """Returns a function that switches the optimizer's mode by `change`, on this rank's pieces, and publishes."""

    @names_line
    def switched() -> Any:
        engine = prepared.held_in_pieces
        if engine is None:
            return change(optimizer)
        _refuse_in_whole(prepared, f"optimizer.{change.__name__}()")
        prepared.meet(f"optimizer.{change.__name__}()")
        prepared.settle()
        prepared._take_written()
        with prepared.plainly():
            return switch(engine.state, lambda: change(optimizer))

    return switched


def _refuse_in_whole(prepared: Any, what: str) -> None:
    """Raises `InputError` for the call `what` within `prepared.whole()`."""
    if prepared.whole_is_open:
        raise InputError(f"{what} within prepared.whole(): call it before, or after the end of the with block")


def holds_pieces(plan: Plan) -> bool:
    """Whether a rank's optimizer holds less than whole parameters under this plan."""
    return plan.tp > 1 or plan.ep > 1 or plan.sharded.state


def states_of(optimizer: Optimizer, names: list[list[str]]) -> States:
    """Returns {name: state} of an optimizer over whole parameters; `names`: those of each group."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    of_groups = [name for group in names for name in group]
    return {
        name: dict(optimizer.state[param])
        for name, param in zip(of_groups, params, strict=True)
        if param in optimizer.state
    }


def _numbered(optimizer: Optimizer, names: list[list[str]], engine: Engine) -> dict[str, Any]:
    """Returns {"state", "param_groups"} as one process's `state_dict` has them: whole tensors by number. Collective."""
    number_of = {name: number for number, name in enumerate(name for group in names for name in group)}
    state: dict[Any, Any] = {}
    for name, found in engine.full_optimizer_state():
        # a frozen parameter has no state; one that is in no group of the script has no number
        if found and name in number_of:
            state[number_of[name]] = tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), found)
    # what an optimizer keeps beside its parameters (under a name) is alike on all ranks
    state |= {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    groups = []
    for group, own in zip(optimizer.param_groups, names, strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": [number_of[name] for name in own]})
    return {"state": state, "param_groups": groups}


def _named(whole: Mapping[str, Any], names: list[list[str]]) -> tuple[States, list[dict[str, Any]], dict[Any, Any]]:
    """Returns (state by parameter's name, each group's settings, state of no parameter); `InputError` for other groups.

    whole  a `state_dict` of one process;  names  of this optimizer's parameters, by group
    """
    groups, of_groups = whole["param_groups"], [len(group) for group in names]
    saved = [len(group["params"]) for group in groups]
    # torch's own check, whose message would be of pieces
    if saved != of_groups:
        raise InputError(
            f"optimizer.load_state_dict: the state has groups of {saved} parameters, this optimizer {of_groups}: it is "
            "another one's"
        )
    numbers = [number for group in groups for number in group["params"]]
    name_of = dict(zip(numbers, (name for group in names for name in group), strict=True))
    states = {name_of[key]: value for key, value in whole["state"].items() if key in name_of}
    # some optimizers keep state under keys of no parameter, such as a count of all steps
    rest = {key: value for key, value in whole["state"].items() if key not in name_of}
    return states, [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups], rest


def put(
    state: RankState, optimizer: Optimizer, states: States, options: list[dict[str, Any]] | None = None,
    rest: Mapping[Any, Any] | None = None,
) -> None:  # fmt: skip
    """Puts whole state, given by parameter's name, into an optimizer that holds this rank's pieces. Nothing is sent.

    options     settings of each group; None: as they are
    rest        state that belongs to no parameter, by its key
    Raises `RefusedPlan` for a tensor that is neither like its parameter nor one number.
    """
    members = members_of(optimizer)
    if len(members) > 1:
        rest = rest or {}
        for one in members:  # state of no parameter goes to the member that had it
            put(state, one, states, options, {key: value for key, value in rest.items() if key in one.state})
        return
    names = {id(slot.master): (slot.name, slot.whole) for slot in state.technique.slots}
    # owners hold whole masters, which the optimizer's groups list in place of the slots' pieces
    if state.owners is not None:
        names = {id(master): (state.names[index], True) for index, master in state.owners.masters.items()}
    local: dict[Any, Any] = dict(rest or {})
    groups, number = [], 0
    for place, group in enumerate(optimizer.param_groups):
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        for each, param in zip(numbers, group["params"], strict=True):
            name, whole = names[id(param)]
            if name in states:
                local[each] = _piece_of(state, name, param, states[name], whole)
        own = {key: value for key, value in group.items() if key != "params"}
        groups.append({**(options[place] if options is not None else own), "params": numbers})
    held = optimizer.param_groups
    type(optimizer).load_state_dict(optimizer, {"state": local, "param_groups": groups})
    for group, loaded in zip(held, optimizer.param_groups, strict=True):
        group.update(loaded)
    optimizer.param_groups = held  # torch makes others, and a wrapper of the script's may hold these
    # what was loaded lies in memory: back to the tier in which the plan keeps it
    if state.tier is not None:
        state.tier.settle_all()


def _piece_of(
    state: RankState, name: str, master: torch.Tensor, param_state: dict[str, Any], whole: bool
) -> dict[str, Any]:  # fmt: skip
    """Returns one parameter's state {key: value}, tensors cut to this rank's piece `master`.

    whole  Whether `master` is the whole parameter, or tp's or ep's whole share, which data ranks do not cut
    """
    index = state.names.index(name)
    shape = state.shapes()[name]
    for spread in (state.experts, state.tensor):
        shape = shape if spread is None else spread.full_shape(name, shape)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece of a tensor shaped as the parameter; a copy of one number, or for an owner."""
        # like the parameter: cut as it is
        if tensor.shape == shape and state.owners is None:
            share = share_of(state, name, tensor)
            if not whole:
                technique: Any = state.technique
                share = technique.select(index, share.contiguous(), state.mesh.shard.index)
            return share.detach().reshape(master.shape).clone()
        # an owner holds whole state of its parameters; a counter is the same for all
        if state.owners is not None or tensor.numel() == 1:
            return tensor.clone()
        raise RefusedPlan(
            f"optimizer.load_state_dict: the state of '{name}' holds a tensor of shape {tuple(tensor.shape)}, which is "
            f"neither one number nor like the parameter's {tuple(shape)}, so that nothing tells which part of it "
            f"belongs to a rank's piece under plan {state.plan}"
        )

    return tree_map_only(torch.Tensor, cut, param_state)


def share_of(state: RankState, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Returns this rank's share, over tp and ep, of a whole tensor shaped as the parameter `name`."""
    value_of: Any = lambda _: whole  # noqa: E731
    value_of = value_of if state.tensor is None else state.tensor.local_values(value_of)
    value_of = value_of if state.experts is None else state.experts.local_values(value_of)
    return value_of(name)
