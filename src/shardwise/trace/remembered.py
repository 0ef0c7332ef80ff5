"""Detect state that forwards leave in plain attributes of their modules for later ones: states, counters, caches.

    self.memory[i] = h.detach()        tensors of this batch that the next one reads
    self.calls += 1                    a number that the next one reads
    self.store.tables[length] = table  the same in a container or an object of the user's class

`ForwardState` tells which places a forward changed, and `AttributeWatch` inside which calls it changed them.

What this does not do: look into closures, or into objects of torch's classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.trace.flow import Attribute, Change, ModuleCall
from shardwise.trace.generators import KINDS, shared_states, state_of
from shardwise.trace.outside_state import CONTAINERS, is_own

OWN_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_WORDS = (bool, int, str, bytes)
_FEW = 64  # values of a container that tell whether it is a long list of words
DEEP = 6  # levels of containers within containers


def contents(value: Any, *, tensors: bool = True, deep: int = DEEP) -> Any:
    """Returns a value's contents, for comparison with `==`; torch's own objects, modules and functions give None.

    tensors   whether tensors count, by identity and version; False: each gives None, leaving structure and numbers
    deep      levels of nesting that are followed
    """
    if isinstance(value, torch.Tensor):
        return (id(value), value._version) if tensors else None
    # numbers and text are compared as they are
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, KINDS):
        return state_of(value)
    # code is not compared, nor what lies deeper than `deep`
    if not deep or isinstance(value, nn.Module | type) or callable(value):
        return None
    below = [contents(item, tensors=tensors, deep=deep - 1) for item in _items_of(value)]
    if isinstance(value, dict):
        return [*map(str, value)], below
    return below if isinstance(value, CONTAINERS) or is_own(value) else None


def _items_of(value: Any) -> list[Any]:
    """Returns what a container or an object of the user's class holds; [] for anything else."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, CONTAINERS):
        return list(iter(value))  # `list` would ask a class of the user's for its length, which may be none
    return [list(vars(value)), *vars(value).values()] if is_own(value) else []


def leaves(value: Any, deep: int = DEEP) -> Iterator[Any]:
    """Yields the tensors and floats that a plain attribute holds, `deep` levels of containers and objects down."""
    if isinstance(value, torch.Tensor | float):
        yield value
    elif not isinstance(value, _ATOMS) and deep and not isinstance(value, nn.Module | type) and not callable(value):
        items = _items_of(value)
        # a long list of words or integers is a vocabulary, which holds neither tensors nor floats
        few = len(items) <= _FEW or any(type(item) not in _WORDS for item in items[:_FEW])
        for item in items if few else ():
            yield from leaves(item, deep - 1)


def structure(child: nn.Module) -> list[Any]:
    """Returns the numbers and the structure that a module's own plain attributes hold, without tensors, to compare.

    The states of Python's and numpy's global generators are included: a stage must not leave out a call that advances
    them, or what comes after it would get other random numbers.
    """
    values = [(key, contents(value, tensors=False)) for key, value in vars(child).items() if key not in OWN_OF_TORCH]
    return [*values, shared_states()]


class ForwardState:
    """The contents of a module's plain attributes and the identities of its buffers, as they are now."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._before = self._now()

    def _now(self) -> dict[Attribute, Any]:
        """Returns (module path, name) -> contents of each plain attribute, and the id of each buffer."""
        places: dict[Attribute, Any] = {}
        for path, child in self.module.named_modules():
            places |= {(path, key): contents(value) for key, value in vars(child).items() if key not in OWN_OF_TORCH}
            # writes into buffers are in the flow; here only an exchange by another tensor counts, hence `id`
            places |= {(path, key): id(value) for key, value in child._buffers.items()}
        return places

    def changed(self) -> list[Attribute]:
        """Returns (module path, attribute or buffer) of all that differ from the recorded state."""
        now = self._now()
        return [place for place in self._before | now if self._before.get(place) != now.get(place)]


class AttributeWatch:
    """Records in `changes` inside which calls `places` change; call `moment` at each call's begin and end."""

    def __init__(self, module: nn.Module, places: list[Attribute]):
        self._children = {path: module.get_submodule(path) for path, _ in places}
        self._places = places
        self.changes: list[Change] = []
        self._last = self._now()

    def _now(self) -> list[Any]:
        return [self._contents(path, key) for path, key in self._places]

    def _contents(self, path: str, key: str) -> Any:
        child = self._children[path]
        return id(child._buffers[key]) if key in child._buffers else contents(vars(child).get(key))

    def structure(self) -> list[Any]:
        """Returns, for each place, the numbers and the structure that it holds now, without tensors, to compare."""
        owners = [(self._children[path], key) for path, key in self._places]
        return [contents(vars(child).get(key), tensors=False) for child, key in owners]

    def moment(self, time: int, stack: list[ModuleCall]) -> None:
        """Records each place that changed since the last moment as changed by the innermost call.

        time   of the flow
        stack  the calls that run, outermost first; all of them are marked as `moves`
        """
        now = self._now()
        for place, before, after in zip(self._places, self._last, now, strict=True):
            if before != after:
                self.changes.append(Change(time, stack[-1], place))
                # a stage that leaves out a call around it would leave it out too
                for call in stack:
                    call.moves = True
        self._last = now
