"""Load whole weights into a running engine: each rank takes its part of every tensor, masters included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import _IncompatibleKeys

from shardwise.errors import InputError
from shardwise.parallel.slots import ValueOf
from shardwise.part.pairs import as_pairs
from shardwise.step.state import RankState


@torch.no_grad()
def load_state_dict(state: RankState, given: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
    """Put whole weights and buffers, under the module's own names, in place. Nothing is sent between ranks.

    Returns torch's (missing_keys, unexpected_keys). Raises `InputError` where there are any and `strict`, or where a
    shape differs.
    """
    module = state.module
    own = module.state_dict(keep_vars=True)
    missing, unknown = [name for name in own if name not in given], [name for name in given if name not in own]
    if strict and (missing or unknown):
        told = [f"{what} {', '.join(found[:3])}" for what, found in (("lacks", missing), ("has", unknown)) if found]
        before = _before_names(list(own), list(given))
        why = f"its names have {before!r} before them, to be taken off" if before else "it is another model's"
        raise InputError(f"load_state_dict: the state {' and '.join(told)}: {why}")
    held = dict(module.named_parameters())
    names = {id(param): name for name, param in held.items()}
    wholes = {names[id(value)]: given[key] for key, value in own.items() if id(value) in names and key in given}
    value_of = _shares(state, wholes, held)
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()  # else the next forward would use what was gathered before
    for index, name in enumerate(state.names):
        if name not in wholes:
            continue
        value = value_of(name).to(state.device)
        _put(held[name], value)
        state.technique.load_masters(index, value)
        if state.owners is not None and index in state.owners.masters:
            state.owners.masters[index].copy_(value)
    for name in wholes.keys() - set(state.names):
        _put(held[name], value_of(name).to(state.device))
    for name, buffer in module.named_buffers():
        if name in given:
            buffer.copy_(given[name])
    return _IncompatibleKeys(missing, unknown)


def _before_names(own: list[str], given: list[str]) -> str:
    """What stands before every name of a state (a wrapper's, such as "module."); "" where that is not all."""
    last = max(given, key=len, default="")
    befores = {last.removesuffix(name) for name in own if last.endswith(f".{name}")}
    return next((before for before in befores if {before + name for name in own} == set(given)), "")


def _shares(state: RankState, wholes: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> ValueOf:
    """Name -> what this rank holds of the whole value, tp's cuts and ep's experts taken."""

    shapes = state.shapes()

    def whole(name: str) -> torch.Tensor:
        value, shape = wholes[name], shapes[name]
        for spread in (state.experts, state.tensor):
            shape = shape if spread is None else spread.full_shape(name, shape)
        if value.shape != shape:
            raise InputError(f"load_state_dict: '{name}' has shape {tuple(value.shape)}, the model's {tuple(shape)}")
        return value

    value_of: ValueOf = whole
    value_of = value_of if state.tensor is None else state.tensor.local_values(value_of)
    return value_of if state.experts is None else state.experts.local_values(value_of)


def _put(param: torch.Tensor, value: torch.Tensor) -> None:
    value = value if param.is_complex() else as_pairs(value)
    if isinstance(param, DTensor):
        value = value.to(param.dtype)
        param = param.detach()
        mine = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        param.to_local().copy_(mine.to_local())
    else:
        param.detach().copy_(value)
