"""Find weights that get a gradient and that no optimizer sees, since no module of the model has registered them.

    self.layers = [nn.Linear(8, 8)]      a plain list: `parameters()` does not look into it, and the forward uses it
    self.scale = torch.ones(8, requires_grad=True)
    HEAD = nn.Linear(8, 8)               called by the loss

One process trains none of these either. What this does not do: look behind names that code makes itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from shardwise.trace.outside_state import CONTAINERS, MOST, entries, is_own

_OF_TORCH = frozenset(vars(nn.Module()))
_DEEP = 4  # containers and objects within each other


def not_trained(module: nn.Module, functions: Iterable[Callable] = ()) -> list[str]:
    """Returns the notice on weights that have a gradient and are none of the module's parameters; [] without any.

    functions   of the task, which may use some too
    """
    own = {id(param) for param in module.parameters()}
    lost = [name for name, tensor in _held(module, functions) if id(tensor) not in own and _has_gradient(tensor)]
    if not lost:
        return []
    return [
        f"'{lost[0]}'{f' and {len(lost) - 1} more' if len(lost) > 1 else ''} got a gradient and is no parameter of the "
        "model, so no optimizer trains it and no checkpoint has it: register it (nn.ModuleList, nn.Parameter, an "
        "attribute of the model), or freeze it (requires_grad_(False))"
    ]


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad and tensor.grad is not None


def _held(module: nn.Module, functions: Iterable[Callable]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of tensors in modules' plain attributes, and of those that functions use by a name."""
    seen: set[int] = set()
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            # what every module has is torch's own
            if name not in _OF_TORCH:
                yield from _tensors(f"{path}.{name}" if path else name, value, seen, _DEEP)
    for function in functions:
        if isinstance(function, FunctionType):
            # a function's globals and closure: `HEAD` above; any other callable holds its tensors in attributes
            names = inspect.getclosurevars(function)
            for name, value in {**names.globals, **names.nonlocals}.items():
                yield from _tensors(name, value, seen, _DEEP)
        else:
            yield from _tensors(type(function).__name__, function, seen, _DEEP)


def _tensors(name: str, value: Any, seen: set[int], deep: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of tensors in a value: modules, small containers, own objects, `deep` levels down."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{key}", param) for key, param in value.named_parameters())
    # deep nests and circles: what code makes itself is not followed
    elif not deep or id(value) in seen:
        return
    # large containers are data
    elif isinstance(value, CONTAINERS) and entries(value) <= MOST:
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(f"{name}[{key!r}]", item, seen, deep - 1)
    elif is_own(value):
        seen.add(id(value))
        for key, item in vars(value).items():
            yield from _tensors(f"{name}.{key}", item, seen, deep - 1)
