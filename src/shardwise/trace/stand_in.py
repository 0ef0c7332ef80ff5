"""Replace a module's tensors for a while, for example by fake ones or by small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.trace.deferred import named_tensors
from shardwise.trace.outside_state import Reached, is_own

DEEP = 4  # levels of containers within containers
_OWN = frozenset(vars(nn.Module()))
Make = Callable[[str, torch.Tensor], torch.Tensor]  # (name, tensor) -> what stands in for it


@contextmanager
def standing_in(module: nn.Module, make: Make) -> Iterator[dict[str, torch.Tensor]]:
    """Context in which each tensor of the module is `make(name, tensor)`; yields name -> parameter inside."""
    names = {id(tensor): name for name, tensor in named_tensors(module)}
    made: dict[int, torch.Tensor] = {}  # by id of the original: a tied weight stays one
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
                    home = child.__dict__ if table is plain else table  # `plain` is a copy
                    kept.append((home, leaf, tensor))
                    home[leaf] = other(tensor)
    exchange(module, made)
    try:
        yield dict(module.named_parameters())
    finally:
        for home, leaf, tensor in kept:
            home[leaf] = tensor
        exchange(module, {id(made[id(tensor)]): tensor for _, _, tensor in kept})  # the way back


def exchange(module: nn.Module, made: Mapping[int, torch.Tensor], deep: int = DEEP) -> None:
    """Replaces tensors in lists, dicts and objects that attributes of the module and its submodules hold.

    Recurrent layers keep a list of their weights, other modules a dict or an object of a class of their own. Tables of
    parameters and buffers, and attributes that are tensors themselves, are left alone.
    made  id of the old tensor -> the new one
    deep  levels of nesting that are searched
    """
    for child in module.modules():
        for key, value in list(vars(child).items()):
            if key not in _OWN and not isinstance(value, torch.Tensor):
                new = _exchanged(value, made, deep)
                if new is not value:
                    child.__dict__[key] = new


class _Met(dict):
    """Mapping for `exchange` that replaces nothing and records (id -> tensor) what was looked up."""

    def get(self, key: int, default: Any = None) -> Any:
        self[key] = default
        return default


def held_beside(module: nn.Module) -> set[str]:
    """Returns names of parameters that attributes of a module hold too; not counting recurrent layers' lists."""
    met = _Met()
    # every recurrent layer lists its weights there, so these lists are taken out meanwhile
    flat_weights = [vars(child).pop("_flat_weights", None) for child in module.modules()]
    try:
        exchange(module, met)
    finally:
        for child, weights in zip(module.modules(), flat_weights, strict=True):
            if weights is not None:
                child.__dict__["_flat_weights"] = weights
    return {name for name, param in module.named_parameters() if id(param) in met}


def tensors_beside(module: nn.Module) -> Iterator[tuple[str, str, nn.Module | None, torch.Tensor]]:
    """Yields (path or name, attribute, its module, tensor) for tensors that lie beside the tables of weights.

    They lie in attributes, in lists, dicts and objects there, and, with None for the module, in closures, globals and
    classes that the module's code reaches.
    """

    def held(value: Any) -> list[torch.Tensor]:
        met = _Met()
        _exchanged(value, met, DEEP)
        return list(met.values())

    for path, child in module.named_modules():
        for key, value in list(vars(child).items()):
            if key not in _OWN:
                where = f"{path}.{key}" if path else key
                yield from ((where, key, child, tensor) for tensor in held(value))
    for name, value in Reached(module).values():
        yield from ((name, name, None, tensor) for tensor in held(value))


def _exchanged(value: Any, made: Mapping[int, torch.Tensor], deep: int) -> Any:
    """Returns `value` with its contents exchanged in place; a tensor or tuple is returned anew if it changes.

    made, deep  as in `exchange`
    """
    if isinstance(value, torch.Tensor):
        return made.get(id(value), value)
    if not deep or isinstance(value, nn.Module | type):
        return value
    table = vars(value) if is_own(value) else value
    # a tuple cannot be changed in place; an unchanged one stays itself, so that identities hold
    if isinstance(table, tuple):
        new = [_exchanged(item, made, deep - 1) for item in table]
        same = all(a is b for a, b in zip(new, table, strict=True))
        return value if same else getattr(type(value), "_make", tuple)(new)
    if isinstance(table, dict | list):
        for key, item in list(table.items() if isinstance(table, dict) else enumerate(table)):
            new = _exchanged(item, made, deep - 1)
            # only what changed is written back, so that an object that is the same stays itself
            if new is not item:
                table[key] = new
    return value
