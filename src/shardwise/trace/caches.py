"""Empty caches (`functools.lru_cache`) of a module's functions after a forward that was none of the run's.

A table of positions that a forward on tensors without values has made, or on shares, would be handed to the run's own
forward, on the rank alone that tried.

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
    """Returns the cached functions of a module's classes, of the files of these, and in submodules' attributes."""
    # a cache may be made in __init__ and kept as an attribute
    caches = {id(value): value for child in module.modules() for value in vars(child).values() if _is_cache(value)}
    for kind in {type(child) for child in module.modules()}:
        # and of base classes, with the functions of their files, which methods call
        caches |= {id(cache): cache for base in kind.__mro__ for cache in _of_class(base)}
    return list(caches.values())


def _is_cache(value: Any) -> bool:
    return type(value) is _lru_cache_wrapper


def _of_class(kind: type) -> Iterator[Any]:
    """Yields the caches among a class's attributes and in its file."""
    if kind.__module__.partition(".")[0] in _OURS:
        return
    file = sys.modules.get(kind.__module__)
    for value in (*vars(kind).values(), *(vars(file).values() if file is not None else ())):
        yield from _within(value)


def _within(value: Any) -> Iterator[Any]:
    """Yields the function, if it is a cache, and the caches in its closure, as a wrapper has."""
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
    """Empty a module's caches that hold tensors, which may be another module's or have no values."""
    for cache in caches_of(module):
        # a cache of functools has no way to read its entries, but for what the collector sees
        if any(_has_tensor(entry) for entry in gc.get_referents(cache)):
            cache.cache_clear()


def _has_tensor(referent: Any) -> bool:
    """Whether an object that a cache refers to is an entry, or its table of entries, with a tensor."""
    # `isinstance` asks an object for its `__class__`, which stand-ins of libraries that are not installed refuse
    if issubclass(type(referent), dict):
        return any(_has_tensor(entry) for entry in referent.values())
    entries = referent if issubclass(type(referent), (tuple, list)) else (referent,)
    return any(issubclass(type(entry), torch.Tensor) for entry in entries)


class CacheState:
    """The counts of a module's caches as they are now, to tell later which were written to."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(cache, cache.cache_info()) for cache in caches_of(module)]

    def restore(self) -> None:
        """Empty the caches in which something was entered since this state was noted."""
        for cache, before in self._before:
            # not by its size: a full cache exchanges entries
            if cache.cache_info().misses != before.misses:
                cache.cache_clear()
