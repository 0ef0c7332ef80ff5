"""Find tensors that get a gradient but belong to no optimizer, since no module of the model has registered them.

    self.layers = [nn.Linear(8, 8)]      a plain list, which `parameters()` does not search, though the forward uses it
    self.scale = torch.ones(8, requires_grad=True)
    HEAD = nn.Linear(8, 8)               called by the loss

One process does not train these either. What this does not do: find what code reaches by computed names.
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
_DEEP = 4  # levels of containers and objects


def not_trained(module: nn.Module, functions: Iterable[Callable] = ()) -> list[str]:
    """Returns [the notice] on tensors that have a gradient and are no parameters of the module; [] without any.

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
    """Yields (name, tensor) of tensors in modules' plain attributes, and in globals and closures of `functions`."""
    seen: set[int] = set()
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            # attributes that every module has hold torch's own state
            if name not in _OF_TORCH:
                yield from _tensors(f"{path}.{name}" if path else name, value, seen, _DEEP)
    for function in functions:
        if isinstance(function, FunctionType):
            # a function has globals and a closure (`HEAD` above), any other callable has attributes
            names = inspect.getclosurevars(function)
            for name, value in {**names.globals, **names.nonlocals}.items():
                yield from _tensors(name, value, seen, _DEEP)
        else:
            yield from _tensors(type(function).__name__, function, seen, _DEEP)


def _tensors(name: str, value: Any, seen: set[int], deep: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of tensors in modules, small containers and the user's objects, `deep` levels down.

    seen  ids of containers and objects that were searched
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{key}", param) for key, param in value.named_parameters())
    # too deep, or searched before (a reference cycle)
    elif not deep or id(value) in seen:
        return
    # only small containers, since large ones are data
    elif isinstance(value, CONTAINERS) and entries(value) <= MOST:
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(f"{name}[{key!r}]", item, seen, deep - 1)
    elif is_own(value):
        seen.add(id(value))
        for key, item in vars(value).items():
            yield from _tensors(f"{name}.{key}", item, seen, deep - 1)
