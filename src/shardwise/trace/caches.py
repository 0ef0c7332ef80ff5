"""Empty caches (`functools.lru_cache`) of a module's functions after a forward that was none of the run's.

A table of positions that a forward on tensors without values has made, or on shares, would be handed to the run's own
forward, on the rank alone that tried.

What this does not do: find caches in dicts of a file's own, or functions in other files than the classes'.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from types import FunctionType
from typing import Any

import torch
from torch import nn

_OURS = ("torch", "shardwise", "functools", "builtins")
_known: weakref.WeakKeyDictionary[type, list[Any]] = weakref.WeakKeyDictionary()


def caches_of(module: nn.Module) -> list[Any]:
    """Returns the caches of functions that a module's classes, their files and its submodules themselves have."""
    found = {id(one): one for child in module.modules() for one in vars(child).values() if _is_cache(one)}
    for kind in {type(child) for child in module.modules()}:
        if kind not in _known:
            _known[kind] = [one for each in kind.__mro__ for one in _of_class(each)]
        found |= {id(one): one for one in _known[kind]}
    return list(found.values())


def _is_cache(value: Any) -> bool:
    return type(value) is _lru_cache_wrapper


def _of_class(kind: type) -> Iterator[Any]:
    if kind.__module__.partition(".")[0] in _OURS:
        return
    file = sys.modules.get(kind.__module__)
    for value in (*vars(kind).values(), *(vars(file).values() if file is not None else ())):
        yield from _within(value)


def _within(value: Any) -> Iterator[Any]:
    """The cache that a function is, or that a function around it has in a variable of its own."""
    value = value.__func__ if type(value) in (staticmethod, classmethod) else value
    if _is_cache(value):
        yield value
    for cell in (value.__closure__ or ()) if type(value) is FunctionType else ():  # others may raise when asked
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if _is_cache(held):
            yield held


def forget_tables(module: nn.Module) -> None:
    """Empty a module's caches that hold tensors, which may be another module's or have no values."""
    for cache in caches_of(module):
        if any(_has_tensor(held) for held in gc.get_referents(cache)):
            cache.cache_clear()


def _has_tensor(held: Any) -> bool:
    """Whether what a cache refers to is an entry of it, or the table of them, that holds a tensor."""
    if issubclass(type(held), dict):
        return any(_has_tensor(entry) for entry in held.values())
    entries = held if issubclass(type(held), (tuple, list)) else (held,)
    return any(issubclass(type(entry), torch.Tensor) for entry in entries)


class CacheState:
    """What the caches of a module's functions hold now."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(cache, cache.cache_info()) for cache in caches_of(module)]

    def restore(self) -> None:
        """Empty the caches in which something was entered since this state was noted."""
        for cache, before in self._before:
            if cache.cache_info().misses != before.misses:
                cache.cache_clear()
