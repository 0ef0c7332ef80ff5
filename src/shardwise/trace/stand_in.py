"""Replace a module's tensors for a while, by ones without values or by small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.trace.deferred import named_tensors
from shardwise.trace.own_class import is_own

DEEP = 4  # containers within containers
_OWN = frozenset(vars(nn.Module()))
Make = Callable[[str, torch.Tensor], torch.Tensor]  # (name, tensor) -> what stands in for it


@contextmanager
def standing_in(module: nn.Module, make: Make) -> Iterator[dict[str, torch.Tensor]]:
    """The module's tensors replaced for a while; yields the parameters by name."""
    names = {id(tensor): name for name, tensor in named_tensors(module)}
    made: dict[int, torch.Tensor] = {}
    kept: list[tuple[dict, str, Any]] = []

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            value = make(names[id(tensor)], tensor)
            made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        return made[id(tensor)]

    for child in module.modules():
        plain = {k: v for k, v in vars(child).items() if isinstance(v, torch.Tensor)}
        for table in (child._parameters, child._buffers, plain):
            for leaf, tensor in list(table.items()):
                if tensor is not None:
                    home = child.__dict__ if table is plain else table
                    kept.append((home, leaf, tensor))
                    home[leaf] = other(tensor)
    exchange(module, made)
    try:
        yield dict(module.named_parameters())
    finally:
        for home, leaf, tensor in kept:
            home[leaf] = tensor
        exchange(module, {id(made[id(tensor)]): tensor for _, _, tensor in kept})


def exchange(module: nn.Module, made: Mapping[int, torch.Tensor], deep: int = DEEP) -> None:
    """Put tensors, known by the ids of others, in the places of these in what modules keep beside their tables.

    Recurrent layers keep a list of their weights, other modules a dict or an object of a class of their own.
    """
    for child in module.modules():
        for key, held in list(vars(child).items()):
            if key not in _OWN and not isinstance(held, torch.Tensor):
                new = _exchanged(held, made, deep)
                if new is not held:
                    child.__dict__[key] = new


class _Met(dict):
    """Exchanges nothing, and notes the ids that it is asked for."""

    def get(self, key: int, default: Any = None) -> Any:
        self[key] = default
        return default


def held_beside(module: nn.Module) -> set[str]:
    """Returns the names of parameters that a module keeps a second time, beside its tables; not recurrent layers'."""
    met = _Met()
    recurrent = [vars(child).pop("_flat_weights", None) for child in module.modules()]
    try:
        exchange(module, met)
    finally:
        for child, held in zip(module.modules(), recurrent, strict=True):
            if held is not None:
                child.__dict__["_flat_weights"] = held
    return {name for name, param in module.named_parameters() if id(param) in met}


def _exchanged(held: Any, made: Mapping[int, torch.Tensor], deep: int) -> Any:
    """The same object, with what it holds exchanged; a tuple anew."""
    if isinstance(held, torch.Tensor):
        return made.get(id(held), held)
    if not deep or isinstance(held, nn.Module | type):
        return held
    table = vars(held) if is_own(held) else held
    if isinstance(table, tuple):
        new = [_exchanged(each, made, deep - 1) for each in table]
        same = all(a is b for a, b in zip(new, table, strict=True))
        return held if same else getattr(type(held), "_make", tuple)(new)
    if isinstance(table, dict | list):
        for key, each in list(table.items() if isinstance(table, dict) else enumerate(table)):
            new = _exchanged(each, made, deep - 1)
            if new is not each:
                table[key] = new
    return held
