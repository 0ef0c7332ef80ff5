"""Keep what a forward may change in a module (buffers, attributes, hooks) or its arguments, to put it back.

A forward that runs more often than one process would run it (a look at a few samples, recompute in backward) must
leave counters, running statistics and lists as if it had not. Hooks that it adds go with the attribute that says so:
otherwise the next forward, which finds no such attribute, would add them a second time. So do children that it makes.

What containers and objects of a class of one's own hold is kept to any depth, tensors that are written to among it.

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
    """Returns (module, table) for each module's buffers, children, parameters and attributes."""
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
    if table is not vars(child):
        return list(table)
    return [key for key, value in table.items() if key not in _OWN and (isinstance(value, _PLAIN) or is_own(value))]


def _kept_in(child: nn.Module, table: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Returns (table, key) of each entry that a forward may change; of children and parameters those that are None.

    Others are not a forward's to exchange: FSDP2 does so, and what it put there has to stay.
    """
    empty = table is child._modules or table is child._parameters
    return [(table, key) for key in _keys(child, table) if not empty or table[key] is None]


def kept_in(child: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Returns (table, key) of each entry of one module, its children's left out, that a forward may change."""
    tables = (child._buffers, child._modules, child._parameters, vars(child))
    return [place for table in tables for place in _kept_in(child, table)]


class ModuleState:
    """A module's buffers and plain attributes as they are now, to compare with and to put back.

    only       limits it to what `changed` returned earlier
    by_value   compare the values of tensors too: torch's batch norm writes running statistics without a note of it
    functions  of the user's, that run with the module and may change what lies outside it (a loss)
    reached    what they and the module's code reach, where it was looked up in this very state before
    """

    def __init__(
        self, module: nn.Module, only: list[tuple[dict[str, Any], str]] | None = None, by_value: bool = False,
        functions: tuple[Callable, ...] = (), reached: Reached | None = None,
    ):  # fmt: skip
        self._caches = CacheState(module) if only is None else None
        self.outside = None if only is not None else outside_now(reached or Reached(module, functions))
        # `only` is what a first forward changed, batch norm's statistics among it, of which no version tells: all of it
        # counts as changed from then on
        self._by_value, self._all = by_value, by_value and only is not None
        self.tables = _tables(module) if only is None else []
        places = [place for child, table in self.tables for place in _kept_in(child, table)] if only is None else only
        self._keys = [set(table) for _, table in self.tables]
        self._kept = [(table, key, table[key], _copied(table[key])) for table, key in places if key in table]
        self._absent = [(table, key) for table, key in places if key not in table]
        self._hooks = [(hooks, set(hooks)) for hooks in (_hooks(module) if only is None else ())]

    def changed(self) -> list[tuple[dict[str, Any], str]]:
        """Returns (table, key) of everything that differs from the state noted."""
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
        """Context: what has changed has its old values inside, tensors in other memory; afterwards it is put back."""
        # what was absent and is there now is taken out inside: a forward may ask whether it is there
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
        """Put everything back: the same objects, with the values they had."""
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
                if value._version != copied[1] or _written(value, copied):  # by `.data` nothing is noted
                    value.copy_(copied[0])
            elif isinstance(copied, PassedState):
                copied.restore()
            elif isinstance(value, KINDS) and copied is not None and state_of(value) != copied:
                put_back(value, copied)


def outside_now(reached: Reached) -> OutsideState:
    """Returns what lies outside a module and its code may change, as it is now, to be put back."""
    return OutsideState(reached, partial(PassedState, written=True, outside=set()))


class PassedState:
    """Plain objects and containers that a call is given (a cache, a list of results) as they are now, to any depth.

    written   notice tensors among them that are written to in place too, and no objects of torch's classes
    outside   of what lies outside the module, ids of what is kept already. Large tensors and containers are data, left
              as they are (`MOST`), and so is what lies behind the first `DEEP` objects: a logger holds half a program
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
        known = self._outside
        if known is None:
            return False
        return id(value) in known or len(self._seen) >= DEEP or len(known) >= ALL or _size(value) > MOST

    def _keep(self, value: Any) -> None:
        """Notes a value's contents, and those of all that it holds, but for large data and objects of other kinds."""
        if self._is_data(value):
            return
        # one tensor once, whatever holds it
        if self._written and id(value) not in self._seen and _is_plain(value):
            self._seen.add(id(value))
            self._tensors.append((value, *_copied(value)))
        # modules, classes and functions are code, and tensors were noted above
        if isinstance(value, torch.Tensor | nn.Module | type) or callable(value) or id(value) in self._seen:
            return
        # an object of torch's is not a forward's to take apart
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
        """Context: the objects have their recorded contents inside, and their present ones again afterwards."""
        now = [(table, _copy_of(table)) for table, _ in self._tables]
        # only tensors that were written since: the others are the same objects still
        old = {id(tensor): clone for tensor, clone, version in self._tensors if tensor._version != version}
        for table, contents in self._tables:
            # a tensor that was written keeps its new values, and its copy stands in its place meanwhile
            _refill(table, _replaced(contents, old) if old else contents)
        try:
            yield
        finally:
            for table, contents in now:
                _refill(table, contents)

    def changed(self) -> bool:
        """Whether any object or container differs from its recorded contents."""
        tables = any(_differs(table, table, contents) for table, contents in self._tables)
        return tables or any(tensor._version != version for tensor, _, version in self._tensors)

    def restore(self) -> None:
        """Put everything back: the same objects, with the values they had."""
        for table, contents in self._tables:
            _refill(table, contents)
        for tensor, clone, version in self._tensors:
            if tensor._version != version or _written(tensor, (clone, version)):
                tensor.copy_(clone)


def _size(value: Any) -> int:
    """Returns how many elements a tensor has, or entries a container; 0 of anything else."""
    return value.numel() if isinstance(value, torch.Tensor) else entries(value) if isinstance(value, _CONTAINERS) else 0


def _is_plain(value: Any) -> bool:
    """Whether `value` is a tensor with memory for each element, and no weight (recurrent layers list theirs)."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return False
    return value.layout is not torch.strided or 0 not in value.stride()


def _replaced(contents: Any, old: dict[int, torch.Tensor]) -> Any:
    """Returns a copy of a container with clones of `old` values in the place of tensors, by their ids."""
    made = _copy_of(contents)
    if isinstance(made, dict):
        made.update({key: old[id(item)].clone() for key, item in contents.items() if id(item) in old})
    elif isinstance(made, list | deque):
        for place, item in enumerate(contents):
            if id(item) in old:
                made[place] = old[id(item)].clone()
    return made


def _refill(table: Any, contents: Any) -> None:
    """Refills a container by the methods of list, dict, set or deque: its own class may refuse (a frozen config)."""
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
    """Returns which of Python's containers a value is an instance of."""
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
    """Returns what a value is compared with and restored by: of a tensor (copy, version), else its contents."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(), value._version
    if isinstance(value, KINDS):
        return state_of(value)
    kept = isinstance(value, (tuple, *_CONTAINERS)) or is_own(value)
    return PassedState(value, written=True) if kept else None


def _written(value: Any, copied: Any) -> bool:
    """Whether a tensor has other values than its copy; True of tensors without values, False of sparse ones."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:  # torch compares no sparse ones
        return False
    # without values there is nothing to compare, and to copy them back costs nothing
    return isinstance(value, FakeTensor) or value.is_meta or not torch.equal(value, copied[0])


def _standing_in(value: Any, copied: Any, always: bool = False) -> Any:
    """Returns what stands in for an entry: a copy of a tensor that was written to, else the value itself."""
    if isinstance(value, torch.Tensor):
        if value._version == copied[1] and not always:
            return value
        with _disable_current_modes():  # selective recompute counts ops, and this is none of the module's
            return copied[0].clone()
    return value


def _differs(now: Any, value: Any, copied: Any) -> bool:
    """Whether an entry is another object than `value`, or `value` has other contents than when it was `copied`."""
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
        # by the methods of dict: a class of its own may make something new at each access (transformers' ACT2FN)
        kept = list(dict.items(copied))
        return list(value) != [key for key, _ in kept] or any(dict.get(value, key) is not item for key, item in kept)
    if isinstance(value, list | deque):
        return len(value) != len(copied) or any(a is not b for a, b in zip(value, copied, strict=True))
    return isinstance(value, set) and value != copied
