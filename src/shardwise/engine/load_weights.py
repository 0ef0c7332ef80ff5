"""Load unsharded weights into a running engine: each rank copies its shard of every tensor, into masters too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from shardwise.errors import InputError
from shardwise.parallel.fsdp import put_shard
from shardwise.parallel.slots import ValueOf
from shardwise.part.pairs import as_pairs
from shardwise.step.state import RankState


@torch.no_grad()
def load_state_dict(state: RankState, weights: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
    """Loads unsharded weights and buffers; returns torch's (missing_keys, unexpected_keys). Nothing is sent.

    weights  name, as in the module's `state_dict`, -> unsharded tensor
    strict   whether missing and unexpected names are errors
    Every rank must be given the same weights. Raises `InputError` for such names, and for another shape.
    """
    module = state.module
    own = module.state_dict(keep_vars=True)
    missing, unknown = [name for name in own if name not in weights], [name for name in weights if name not in own]
    if strict and (missing or unknown):
        listed = [f"{verb} {', '.join(names[:3])}" for verb, names in (("lacks", missing), ("has", unknown)) if names]
        before = _before_names(list(own), list(weights))
        why = f"its names have {before!r} before them, to be taken off" if before else "it is another model's"
        raise InputError(f"load_state_dict: the state {' and '.join(listed)}: {why}")
    params = dict(module.named_parameters())
    names = {id(param): name for name, param in params.items()}
    wholes = {names[id(value)]: weights[key] for key, value in own.items() if id(value) in names and key in weights}
    value_of = _shares(state, wholes)
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in own and name in weights]
    for name, buffer in buffers:
        _check_shape(name, weights[name], buffer.shape)  # `copy_` below would broadcast another shape silently
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()  # else the next forward would use unsharded weights that were gathered before
    for index, name in enumerate(state.names):
        if name not in wholes:
            continue
        value = value_of(name)
        _put(params[name], value)
        state.technique.load_masters(index, value)
        # An optimizer over whole tensors has its own masters, on the owner's rank only.
        if state.owners is not None and index in state.owners.masters:
            state.owners.masters[index].copy_(wholes[name])
    for name in wholes.keys() - set(state.names):  # frozen: no technique has masters of them
        _put(params[name], value_of(name))
    for name, buffer in buffers:
        buffer.copy_(weights[name])
    return _IncompatibleKeys(missing, unknown)


def _before_names(own: list[str], loaded: list[str]) -> str:
    """Returns the prefix ("module.") that all `loaded` names have before the module's `own` ones; "" without one."""
    last = max(loaded, key=len, default="")
    befores = {last.removesuffix(name) for name in own if last.endswith(f".{name}")}
    return next((before for before in befores if {before + name for name in own} == set(loaded)), "")


def _shares(state: RankState, wholes: Mapping[str, torch.Tensor]) -> ValueOf:
    """Returns a function from a name to this rank's share, over tp and ep, of the unsharded value in `wholes`.

    It raises `InputError` for a value of another shape.
    """
    shapes = state.shapes()

    def whole(name: str) -> torch.Tensor:
        value, shape = wholes[name], shapes[name]
        for spread in (state.experts, state.tensor):
            shape = shape if spread is None else spread.full_shape(name, shape)
        _check_shape(name, value, shape)
        return value

    value_of: ValueOf = whole
    value_of = value_of if state.tensor is None else state.tensor.local_values(value_of)
    return value_of if state.experts is None else state.experts.local_values(value_of)


def _check_shape(name: str, value: torch.Tensor, shape: torch.Size) -> None:
    if value.shape != shape:
        raise InputError(f"load_state_dict: '{name}' has shape {tuple(value.shape)}, the model's {tuple(shape)}")


def _put(param: torch.Tensor, value: torch.Tensor) -> None:
    """Copies `value` into a parameter; into FSDP2's `DTensor` only this rank's shard of it."""
    # A complex weight may be held as pairs of real numbers.
    value = value if param.is_complex() else as_pairs(value)
    if isinstance(param, DTensor):
        put_shard(param, value)
    else:
        param.detach().copy_(value)
