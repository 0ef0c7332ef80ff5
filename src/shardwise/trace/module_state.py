"""Save what a forward may change in a module (buffers, attributes, hooks) or its arguments, and restore it.

A forward that runs more often than in one process (on a few samples before the first step, or again in backward for
recompute) must leave counters, running statistics and lists as if it had not run. Hooks and children that it adds are
removed too, since the attribute that records them is restored, and the next forward would add them a second time.

Containers and objects of the user's classes are saved to any depth, in-place writes to tensors in them included.

What lies outside the module and is reached by its code is kept by `trace/outside_state`.

What this does not do: follow state in objects of torch's classes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.trace.caches import CacheState
from shardwise.trace.generators import KINDS, put_back, standing_at, state_of
from shardwise.trace.outside_state import ALL, DEEP, HOOKS, MOST, OutsideState, Reached, entries, is_own

_OWN = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (type(None), bool, int, float, complex, str, tuple, torch.Tensor, *_CONTAINERS, *KINDS)


def _tables(module: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Returns (module, dict) for each module's dicts of buffers, children, parameters and attributes."""
    tables: list[tuple[nn.Module, dict[str, Any]]] = []
    for child in module.modules():
        tables += [(child, table) for table in (child._buffers, child._modules, child._parameters, vars(child))]
    return tables


def _hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    """Yields each module's tables of hooks."""
    for child in module.modules():
        for name in HOOKS:  # not those of state dicts, which FSDP2 adds in its first forward and keeps
            table = getattr(child, name)
            if isinstance(table, dict):
                yield table


def _keys(child: nn.Module, table: dict[str, Any]) -> list[str]:
    """Returns the keys of a table that are state; of attributes those of plain values and of the user's objects."""
    if table is not vars(child):
        return list(table)
    return [key for key, value in table.items() if key not in _OWN and (isinstance(value, _PLAIN) or is_own(value))]


def _kept_in(child: nn.Module, table: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Returns (table, key) of each entry that a forward may change; of children and parameters those that are None.

    Others are exchanged by FSDP2 alone, and what it puts there has to stay.
    """
    empty = table is child._modules or table is child._parameters
    return [(table, key) for key in _keys(child, table) if not empty or table[key] is None]


def kept_in(child: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Returns (table, key) of each entry of `child` itself, without its submodules, that a forward may change."""
    tables = (child._buffers, child._modules, child._parameters, vars(child))
    return [place for table in tables for place in _kept_in(child, table)]


class ModuleState:
    """A module's buffers, plain attributes and hooks as they are now, to compare with and to restore.

    only       the (table, key) places that `changed` returned earlier, to save these alone; None: all
    by_value   whether tensors' values are compared too: torch's batch norm does not advance `_version`
    functions  the user's functions that run with the module (a loss) and may change what lies outside it
    reached    what these and the module's code reach, if that is known already
    """

    def __init__(
        self, module: nn.Module, only: list[tuple[dict[str, Any], str]] | None = None, by_value: bool = False,
        functions: tuple[Callable, ...] = (), reached: Reached | None = None,
    ):  # fmt: skip
        self._caches = CacheState(module) if only is None else None
        self.outside = None if only is not None else outside_now(reached or Reached(module, functions))
        # `only` has what a first forward changed, perhaps batch norm's statistics, whose version does not tell: so all
        # of it counts as changed
        self._by_value, self._all = by_value, by_value and only is not None
        self.tables = _tables(module) if only is None else []
        places = [place for child, table in self.tables for place in _kept_in(child, table)] if only is None else only
        self._keys = [set(table) for _, table in self.tables]
        self._kept = [(table, key, table[key], _copied(table[key])) for table, key in places if key in table]
        self._absent = [(table, key) for table, key in places if key not in table]
        self._hooks = [(hooks, set(hooks)) for hooks in (_hooks(module) if only is None else ())]

    def changed(self) -> list[tuple[dict[str, Any], str]]:
        """Returns (table, key) of each entry that differs from the saved state or is new."""
        places = [
            (table, key)
            for table, key, value, copied in self._kept
            if self._all or _differs(table.get(key), value, copied) or (self._by_value and _written(value, copied))
        ]
        for (child, table), before in zip(self.tables, self._keys, strict=True):
            places += [(table, key) for key in _keys(child, table) if key not in before]
        return places

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Context in which changed entries have their saved values (tensors as clones); afterwards the present ones."""
        # entries that are new are taken out inside, since a forward may ask whether they are there
        places = self.changed() + [(table, key) for table, key in self._absent if key in table]
        now = [(table, key, table[key]) for table, key in places if key in table]
        kept = {(id(table), key): (value, copied) for table, key, value, copied in self._kept}
        with ExitStack() as below:
            for table, key in places:
                if (id(table), key) in kept:
                    value, copied = kept[id(table), key]
                    # objects and containers by their contents, to any depth
                    if isinstance(copied, PassedState):
                        below.enter_context(copied.standing_in())
                    # generators (Python's, numpy's, torch's) by their state
                    elif isinstance(value, KINDS):
                        below.enter_context(standing_at(value, copied))
                    table[key] = _standing_in(value, copied, self._by_value)
                else:
                    # new since then: taken out while the old state stands in
                    del table[key]
            try:
                yield
            finally:
                for table, key in places:
                    table.pop(key, None)
                for table, key, value in now:
                    table[key] = value

    @torch.no_grad()
    def restore(self) -> None:
        """Restores everything: the same objects, with the values that they had."""
        if self._caches is not None:
            self._caches.restore()
        if self.outside is not None:
            self.outside.restore()
        for (child, table), before in zip(self.tables, self._keys, strict=True):
            for key in _keys(child, table):
                if key not in before:  # the forward has added it
                    del table[key]
        for table, key in self._absent:
            table.pop(key, None)
        for hooks, hooks_before in self._hooks:
            # else the next forward would add them a second time (test_hooks_that_a_forward_adds_go_with_what_says_so)
            for added in set(hooks) - hooks_before:
                del hooks[added]
        for table, key, value, copied in self._kept:
            table[key] = value
            if isinstance(value, torch.Tensor) and copied is not None:
                if value._version != copied[1] or _written(value, copied):  # a write by `.data` advances no version
                    value.copy_(copied[0])
            elif isinstance(copied, PassedState):
                copied.restore()
            elif isinstance(value, KINDS) and copied is not None and state_of(value) != copied:
                put_back(value, copied)


def outside_now(reached: Reached) -> OutsideState:
    """Returns the present state of what a module's code may change outside the module, with `restore()`."""
    return OutsideState(reached, partial(PassedState, written=True, outside=set()))


class PassedState:
    """Plain objects and containers that a call is given (a cache, a list of results) as they are now, to any depth.

    written   whether in-place writes to tensors in them are noticed too; objects of torch's classes are then left out
    outside   for state outside a module: ids of what is saved already, extended by what this one saves. Left as they
              are, as data, are then tensors and containers above `MOST`, and all beyond the first `DEEP` objects, since
              a logger holds half a program. None: no limits
    """

    def __init__(self, *values: Any, written: bool = False, outside: set[int] | None = None):
        self._tables: list[tuple[Any, Any]] = []  # (container, its copy)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # (tensor, its copy, its version then)
        self._written, self._outside = written, outside
        self._seen: set[int] = set()
        for value in values:
            self._keep(value)
        if outside is not None:
            outside |= self._seen

    def _is_data(self, value: Any) -> bool:
        """Whether `value` is left as it is: outside a module, if it is large, saved already, or beyond a limit."""
        known = self._outside
        if known is None:
            return False
        return id(value) in known or len(self._seen) >= DEEP or len(known) >= ALL or _size(value) > MOST

    def _keep(self, value: Any) -> None:
        """Saves the contents of `value` and of all that it holds, except large data and objects of other kinds."""
        if self._is_data(value):
            return
        # one tensor once, whatever holds it
        if self._written and id(value) not in self._seen and _is_plain(value):
            self._seen.add(id(value))
            self._tensors.append((value, *_copied(value)))
        # modules, classes and functions are code, and tensors were noted above
        if isinstance(value, torch.Tensor | nn.Module | type) or callable(value) or id(value) in self._seen:
            return
        # an object of torch's classes may hold internals that must not be put back
        if self._written and not isinstance(value, (tuple, *_CONTAINERS)) and not is_own(value):
            return
        self._seen.add(id(value))
        table = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
        if isinstance(table, _CONTAINERS):
            self._tables.append((table, _copy_of(table)))
        inside = value if table is None and isinstance(value, tuple) else table
        for leaf in list(dict.values(inside) if isinstance(inside, dict) else inside or ()):
            self._keep(leaf)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Context in which the objects have their saved contents; afterwards they have their present ones again."""
        now = [(table, _copy_of(table)) for table, _ in self._tables]
        # only tensors that were written since: the others are the same objects still
        old = {id(tensor): clone for tensor, clone, version in self._tensors if tensor._version != version}
        for table, contents in self._tables:
            # a written tensor keeps its new values; its container holds a clone of the saved ones meanwhile
            _refill(table, _replaced(contents, old) if old else contents)
        try:
            yield
        finally:
            for table, contents in now:
                _refill(table, contents)

    def changed(self) -> bool:
        """Whether any object, container or tensor differs from what was saved."""
        tables = any(_differs(table, table, contents) for table, contents in self._tables)
        return tables or any(tensor._version != version for tensor, _, version in self._tensors)

    def restore(self) -> None:
        """Restores everything: the same objects, with the values that they had."""
        for table, contents in self._tables:
            _refill(table, contents)
        for tensor, clone, version in self._tensors:
            if tensor._version != version or _written(tensor, (clone, version)):
                tensor.copy_(clone)


def _size(value: Any) -> int:
    """Returns the number of a tensor's elements or a container's entries; 0 for anything else."""
    return value.numel() if isinstance(value, torch.Tensor) else entries(value) if isinstance(value, _CONTAINERS) else 0


def _is_plain(value: Any) -> bool:
    """Whether `value` is a tensor, no parameter, each of whose elements has memory of its own (no expanded view)."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return False
    return value.layout is not torch.strided or 0 not in value.stride()


def _replaced(contents: Any, old: dict[int, torch.Tensor]) -> Any:
    """Returns a copy of a container in which each tensor whose id is in `old` is a clone of `old[id]`."""
    made = _copy_of(contents)
    if isinstance(made, dict):
        made.update({key: old[id(item)].clone() for key, item in contents.items() if id(item) in old})
    elif isinstance(made, list | deque):
        for place, item in enumerate(contents):
            if id(item) in old:
                made[place] = old[id(item)].clone()
    return made


def _refill(table: Any, contents: Any) -> None:
    """Gives a container these contents by methods of list, dict, set or deque; its own may refuse (frozen)."""
    if not _differs(table, table, contents):
        return
    kind: Any = _kind(table)
    kind.clear(table)
    if issubclass(kind, dict):
        for key, value in list(dict.items(contents)):
            kind.__setitem__(table, key, value)
    else:
        (kind.extend if issubclass(kind, list | deque) else kind.update)(table, contents)


def _kind(value: Any) -> type:
    """Returns which of OrderedDict, list, dict, set and deque a value is an instance of."""
    return next(kind for kind in (OrderedDict, *_CONTAINERS) if isinstance(value, kind))


def _copy_of(value: Any) -> Any:
    """Returns a copy of a container, of its own class, made without methods that the class overrides."""
    kind: Any = _kind(value)
    # a class with methods of its own may refuse to be filled (test_state_of_a_container_that_refuses_changes_is_kept)
    if type(value).__setattr__ is object.__setattr__ and (
        issubclass(kind, set | deque)
        or (type(value).__setitem__ is kind.__setitem__ and type(value).__getitem__ is kind.__getitem__)
    ):
        return copy.copy(value)
    made = kind.__new__(type(value))
    kind.__init__(made)
    vars(made).update(vars(value))
    _refill(made, value)
    return made


def _copied(value: Any) -> Any:
    """Returns what `value` is compared with and restored from.

    A tensor: (clone, version); a generator: its state; a container or a user's object: a `PassedState`; else None.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone(), value._version
    if isinstance(value, KINDS):
        return state_of(value)
    kept = isinstance(value, (tuple, *_CONTAINERS)) or is_own(value)
    return PassedState(value, written=True) if kept else None


def _written(value: Any, copied: Any) -> bool:
    """Whether a tensor's values differ from its copy. True for fake and meta tensors; False for sparse ones."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:  # torch compares no sparse ones
        return False
    # without values there is nothing to compare, and to copy them back costs nothing
    return isinstance(value, FakeTensor) or value.is_meta or not torch.equal(value, copied[0])


def _standing_in(value: Any, copied: Any, always: bool = False) -> Any:
    """Returns what an entry holds meanwhile: a clone of a tensor that was written to (or `always`), else `value`."""
    if isinstance(value, torch.Tensor):
        if value._version == copied[1] and not always:
            return value
        with _disable_current_modes():  # selective recompute counts the module's ops, of which this is none
            return copied[0].clone()
    return value


def _differs(now: Any, value: Any, copied: Any) -> bool:
    """Whether an entry is now another object than `value`, or `value` has other contents than in `copied`."""
    # another object is another value, whatever it holds
    if now is not value:
        return True
    # tensors by their version: comparing every element would take as long as the forward
    if isinstance(value, torch.Tensor):
        return value._version != copied[1]
    if isinstance(copied, PassedState):
        return copied.changed()
    # generators: their own state
    if isinstance(value, KINDS):
        return state_of(value) != copied
    if isinstance(value, dict):
        # by the methods of dict, since a subclass may make a new object at each access (transformers' ACT2FN)
        kept = list(dict.items(copied))
        return list(value) != [key for key, _ in kept] or any(dict.get(value, key) is not item for key, item in kept)
    if isinstance(value, list | deque):
        return len(value) != len(copied) or any(a is not b for a, b in zip(value, copied, strict=True))
    return isinstance(value, set) and value != copied
