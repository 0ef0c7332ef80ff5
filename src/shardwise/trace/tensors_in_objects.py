"""Find tensors in objects that torch's tree functions do not look into, such as a distribution.

    return Normal(mean, deviation)      a leaf to a tree function; two tensors to this one

Attributes are searched, and lists, tuples and dicts among them. A module is not searched, since it has parameters and
no results; nor is what a closure or a property makes anew.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_CLOSED = (
    torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
    str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size,
)  # fmt: skip
DEEP = 6  # levels of objects within objects

Change = Callable[[torch.Tensor], torch.Tensor]


def hidden(output: Any) -> list[torch.Tensor]:
    """Returns the tensors in attributes of objects in `output`, which torch's tree functions do not see."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    change_hidden(output, note)
    return tensors


def change_hidden(output: Any, change: Change) -> None:
    """Replaces each tensor in an attribute of an object in `output` by `change(tensor)`, in the object itself."""
    seen: set[int] = set()
    for leaf in tree_leaves(output):
        if not isinstance(leaf, _CLOSED):
            _change_in(leaf, change, seen, DEEP)


def _change_in(holder: Any, change: Change, seen: set[int], deep: int) -> None:
    """Changes the tensors in an object or container in place. `seen`: ids of those done; `deep`: levels to go."""
    if id(holder) in seen or not deep:  # objects may hold each other
        return
    seen.add(id(holder))
    fields = holder if isinstance(holder, dict | list) else getattr(holder, "__dict__", None)
    # an object without a `__dict__` (slots), or a set, is not searched
    if fields is None:
        return
    for key, value in list(enumerate(fields) if isinstance(fields, list) else fields.items()):
        changed = _changed(value, change, seen, deep - 1)
        if changed is not value:
            fields[key] = changed


def _changed(value: Any, change: Change, seen: set[int], deep: int) -> Any:
    """Returns `value` if nothing in it is replaced by another object, else the changed tensor or a new tuple."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and not isinstance(value, _CLOSED) and deep:
        items = [_changed(item, change, seen, deep - 1) for item in value]
        if all(item is old for item, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, _CLOSED):
        _change_in(value, change, seen, deep)
    return value
