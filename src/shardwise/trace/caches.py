"""Empty `functools.lru_cache` caches of a module's functions after a forward that is not part of the run.

Such a forward runs on fake tensors or on shares, on one rank alone. A table of positions that it cached would be
returned to the run's own forward, on that rank only.

What this does not do: find caches in dicts of a file's own, or functions in other files than the classes'.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from types import FunctionType
from typing import Any

import torch
from torch import nn

_OURS = ("torch", "shardwise", "functools", "builtins")


def caches_of(module: nn.Module) -> list[Any]:
    """Returns the cached functions in submodules' attributes, in their classes and bases, and in the files of these."""
    # a cache may be made in __init__ and kept as an attribute
    caches = {id(value): value for child in module.modules() for value in vars(child).values() if _is_cache(value)}
    for kind in {type(child) for child in module.modules()}:
        # and of base classes, with the functions of their files, which methods call
        caches |= {id(cache): cache for base in kind.__mro__ for cache in _of_class(base)}
    return list(caches.values())


def _is_cache(value: Any) -> bool:
    return type(value) is _lru_cache_wrapper


def _of_class(kind: type) -> Iterator[Any]:
    """Yields the caches among a class's attributes and in its file; none for classes of torch or shardwise."""
    if kind.__module__.partition(".")[0] in _OURS:
        return
    file = sys.modules.get(kind.__module__)
    for value in (*vars(kind).values(), *(vars(file).values() if file is not None else ())):
        yield from _within(value)


def _within(value: Any) -> Iterator[Any]:
    """Yields `value` itself if it is a cached function, and the cached functions in its closure if it is a wrapper."""
    value = value.__func__ if type(value) in (staticmethod, classmethod) else value
    if _is_cache(value):
        yield value
    for cell in (value.__closure__ or ()) if type(value) is FunctionType else ():  # others may raise when asked
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if _is_cache(content):
            yield content


def forget_tables(module: nn.Module) -> None:
    """Empties a module's caches that hold tensors, since these may be another module's or have no values."""
    for cache in caches_of(module):
        # a cache of functools offers no way to read its entries; only the garbage collector sees them
        if any(_has_tensor(entry) for entry in gc.get_referents(cache)):
            cache.cache_clear()


def _has_tensor(referent: Any) -> bool:
    """Whether `referent`, to which a cache refers, is a tensor, an entry with one, or a table of such entries."""
    # not `isinstance`, which reads `__class__`: placeholders of libraries that are not installed raise on that
    if issubclass(type(referent), dict):
        return any(_has_tensor(entry) for entry in referent.values())
    entries = referent if issubclass(type(referent), (tuple, list)) else (referent,)
    return any(issubclass(type(entry), torch.Tensor) for entry in entries)


class CacheState:
    """Miss counts of a module's caches at construction; `restore` tells by them which caches got entries since."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(cache, cache.cache_info()) for cache in caches_of(module)]

    def restore(self) -> None:
        """Empties the caches that got an entry since this state was taken."""
        for cache, before in self._before:
            # misses, not the size, which stays the same when a full cache replaces an entry
            if cache.cache_info().misses != before.misses:
                cache.cache_clear()
