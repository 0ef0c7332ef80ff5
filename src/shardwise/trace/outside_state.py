"""Save and restore what a forward may change outside its module: globals, closures, defaults, class attributes.

    COUNT = [0]                                        a list of the file's own
    class Net(nn.Module):
        seen = 0
        def forward(self, x):
            COUNT[0] += 1; type(self).seen += 1        neither is in the module

The names in the code of a module's classes and hooks are looked up, and so are those in functions found there. A
name that code assigns is saved with its value; of containers and objects of the user's classes, what they hold.

What this does not do: follow code that is named by a string, files of torch, Python and shardwise, state in C code,
containers and tensors of more than `MOST` entries, which are data, and more than `DEEP` objects behind one name
(`ALL` behind all names).
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from threading import Thread
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

CONTAINERS = (list, dict, set, frozenset, deque, tuple)
_OTHERS = ("torch", "shardwise", "numpy", "builtins", "functools", "threading", "logging")


def is_own(value: Any) -> bool:
    """Whether a value is an object with attributes, of a class of the user's; no module, thread or callable."""
    kind = type(value)
    # a thread changes its own state at any time, which no forward did and which differs between ranks
    if isinstance(value, nn.Module | type | Thread) or kind.__module__.partition(".")[0] in _OTHERS or callable(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


MOST = 10_000  # entries of a container, elements of a tensor
DEEP = 1_000  # objects behind one name
ALL = 20_000  # objects behind all of them
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FOREIGN = frozenset({"torch", "shardwise", "numpy", *sys.stdlib_module_names}) - {"__main__"}
_ASSIGN = frozenset(dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"))
_ABSENT = object()
_VALUES = (type(None), bool, int, float, complex, str, torch.Tensor, *CONTAINERS)

Place = tuple[Any, str]  # (a file's names, a class or a closure's cell; the name in it)


@lru_cache(maxsize=4096)
def _own(module_name: Any) -> bool:
    """Whether a module of this name is the user's: not of torch, shardwise, numpy or the standard library."""
    return str(module_name).partition(".")[0] not in _FOREIGN


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns (names that code uses, names that it assigns or deletes), functions defined in it included."""
    used, assigned = set(code.co_names), set(_assigned(code))
    for inner in (const for const in code.co_consts if isinstance(const, CodeType)):
        used_inside, assigned_inside = _names(inner)
        used |= used_inside
        assigned |= assigned_inside
    return frozenset(used), frozenset(assigned)


def assigned_names(code: CodeType) -> frozenset[str]:
    """Returns the names that code, and functions defined in it, assign or delete as globals or attributes."""
    return _names(code)[1]


def _assigned(code: CodeType) -> Iterator[str]:
    """Yields the names that code assigns or deletes, as globals or attributes.

    `dis.get_instructions` would make an object of each instruction: half a second for a model of transformers.
    """
    more = 0  # the higher bits of an argument, which come before it
    for op, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = more | low
        more = argument << 8 if op == dis.EXTENDED_ARG else 0
        if op in _ASSIGN:
            yield code.co_names[argument]


def _read(owner: Any, name: str) -> Any:
    """Returns the value of `name` at its owner (globals, a class or a closure cell); `_ABSENT` if it has none."""
    if isinstance(owner, CellType):
        try:
            return owner.cell_contents
        except ValueError:  # not filled yet
            return _ABSENT
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, _ABSENT)


def _write(owner: Any, name: str, value: Any) -> None:
    """Sets the value of `name` at an owner: a dict of globals, a class, a closure cell."""
    if isinstance(owner, CellType):
        owner.cell_contents = value
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _remove(owner: Any, name: str) -> None:
    if isinstance(owner, dict):
        owner.pop(name, None)
    elif isinstance(owner, type) and name in vars(owner):
        delattr(owner, name)


class Reached:
    """What the code of a module, and `functions` beside it, reaches outside the module.

    places         globals, class attributes and closure cells that may get another value
    objects        containers and objects whose contents may change, each with the name by which it was first found
    classes        the user's classes, which may get new attributes
    own_backwards  texts that name custom backwards, which may mix samples
    """

    def __init__(self, module: nn.Module, functions: Iterable[Callable] = ()) -> None:
        self.places: dict[tuple[int, str], Place] = {}  # (id of a place's owner, name) -> the place
        self.objects: dict[int, tuple[str, Any]] = {}  # id of an object -> (name, object)
        self.classes: dict[type, None] = {}
        self.own_backwards = _own_backwards(module)
        self._seen: set[int] = set()
        self._followed: set[tuple[type, frozenset | None]] = set()  # (class, names followed in it; None: all)
        for kind in {type(child): None for child in module.modules()}:
            for base in kind.__mro__:
                self._of_class(base, None)
            if any(base in self.classes for base in kind.__mro__):
                self.classes[kind] = None  # FSDP2's subclass of a user's class: `type(self).seen += 1` writes there
        for function in (*_hooks_of(module), *functions):
            self._of_function(function)

    def values(self) -> list[tuple[str, Any]]:
        """Returns (name, present value) of all places and objects."""
        return [*self.objects.values(), *((name, _read(owner, name)) for owner, name in self.places.values())]

    def _of_function(self, function: Any) -> None:
        """Follows what a callable reaches through its code, and the objects that it is bound to or holds."""
        function = (
            getattr(function, "__func__", function) if isinstance(function, staticmethod | classmethod) else function
        )
        # a partial is no function: what it holds is followed
        if isinstance(function, partial):
            self._of_values("partial", [function.func, *function.args, *function.keywords.values()])
        # a method's own object may change too, through `self`
        elif isinstance(function, MethodType):
            self._of_values("self", [function.__self__, function.__func__])
        # functions of libraries are not followed: they keep no state of a user's model
        elif type(function) is FunctionType and id(function) not in self._seen and _own(function.__module__):
            self._seen.add(id(function))
            self._of_code(function)
        # an object with __call__, such as a hook
        elif _is_object(function):
            self._of_values(type(function).__name__, [function])

    def _of_code(self, function: FunctionType) -> None:
        """Follows the globals, closure cells and default arguments that the code of a user's function names."""
        used, assigned = _names(function.__code__)
        # a gradient hook may compute anything of a whole batch, which shows in no output
        if "register_hook" in used:
            self.own_backwards.append(f"a hook on a gradient that '{function.__qualname__}' sets")
        # what is assigned need not exist yet (`global count` that the first call sets)
        for name in used & function.__globals__.keys() | assigned:
            self._of_name(function.__globals__, name, used, assigned)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # a cell is a place: `nonlocal` may give it another value
            self.places[id(cell), name] = (cell, name)
            self._of_values(name, [_read(cell, name)], used)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._of_values(f"a default of {function.__name__}", defaults, used)

    def _of_name(self, names: dict[str, Any], name: str, used: frozenset, assigned: frozenset) -> None:
        """Records a global as a place if code assigns it, and follows its value.

        names           the globals of the file that has it, by name
        used, assigned  names that the code uses and assigns
        """
        value = names.get(name, _ABSENT)
        # only what is plain or the user's own can be put back as it was
        if name in assigned and (value is _ABSENT or isinstance(value, _VALUES) or is_own(value)):
            self.places[id(names), name] = (names, name)
        # a module of the user's: its names are globals too, and only those that the code names are followed
        if isinstance(value, ModuleType) and _own(value.__name__) and id(value) not in self._seen:
            self._seen.add(id(value))
            for inner in used & vars(value).keys():
                self._of_name(vars(value), inner, used, assigned)
        self._of_values(name, [value], used)

    def _of_values(self, name: str, values: Iterable[Any], used: frozenset | None = None) -> None:
        """Records containers and objects, whose contents may change, and follows functions and classes.

        name  by which the values were found
        used  names in the code that reaches them, which limit the functions followed in classes; None: all
        """
        for value in values:
            # a class: its own functions may be reached through it
            if isinstance(value, type):
                for base in value.__mro__:
                    self._of_class(base, used)
            # functions, methods and partials reach more
            elif isinstance(value, FunctionType | MethodType | partial):
                self._of_function(value)
            # a container; larger ones are data, not state of a forward, and would take too long to compare
            elif isinstance(value, CONTAINERS) and entries(value) <= MOST:
                self.objects[id(value)] = (name, value)
            # its attributes may change, and its methods may reach more: those named in the code alone, and `__call__`
            elif _is_object(value) and id(value) not in self._seen:
                self._seen.add(id(value))
                # a comparison takes what can be called for code (`PassedState`): its attributes are noted in its place
                self.objects[id(value)] = (name, vars(value) if callable(value) else value)
                for base in type(value).__mro__:
                    self._of_class(base, None if used is None else used | {"__call__"})

    def _of_class(self, kind: type, used: frozenset | None) -> None:
        """Records a class's attributes and follows its functions: those named in `used`, or all if it is None."""
        # followed once for the names that are used, and not again for all of them
        if (kind, used) in self._followed or (kind, None) in self._followed or not _own(kind.__module__):
            return
        self._followed.add((kind, used))
        self.classes[kind] = None
        if issubclass(kind, torch.autograd.Function):  # its backward may mix samples, which no output shows
            self.own_backwards.append(f"the backward of '{kind.__name__}'")
        for name, value in list(vars(kind).items()):
            if isinstance(value, FunctionType | staticmethod | classmethod | property):
                # a property's getter is a function too
                if used is None or name in used:
                    self._of_function(value.fget if isinstance(value, property) else value)
            # dunders are Python's own; of other values those count that can be put back
            elif not name.startswith("__") and (isinstance(value, _VALUES) or is_own(value)):
                self.places[id(kind), name] = (kind, name)
                self._of_values(name, [value], used)


def _own_backwards(module: nn.Module) -> list[str]:
    """Returns a text for each submodule with a backward hook, or whose gradient counts indices over the batch."""
    hooked = [f"a backward hook on '{path}'" for path, child in module.named_modules()
              if child._backward_hooks or child._backward_pre_hooks]  # fmt: skip
    counting = [path for path, child in module.named_modules() if getattr(child, "scale_grad_by_freq", False)]
    return [*hooked, *(f"scale_grad_by_freq of '{path}'" for path in counting)]


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a user's class, one with `__call__` (a hook) included."""
    kind = type(value)
    plain = isinstance(value, nn.Module | type | FunctionType | MethodType | ModuleType | torch.Tensor)
    return not plain and _own(kind.__module__) and isinstance(getattr(value, "__dict__", None), dict)


def _hooks_of(module: nn.Module) -> Iterator[Callable]:
    """Yields the hooks of a module and its submodules, torch's global hooks, and functions that are attributes."""
    for child in module.modules():
        for name in HOOKS:
            yield from list(getattr(child, name).values())
        yield from [value for value in vars(child).values() if isinstance(value, FunctionType | MethodType | partial)]
    for name in HOOKS:
        yield from list(getattr(torch_module, f"_global{name}").values())


class OutsideState:
    """What a module's code may change outside the module, as it is now, to restore it.

    reached  the places, objects and classes
    keep     value -> snapshot of its contents, with `changed()` and `restore()`
    """

    def __init__(self, reached: Reached, keep: Callable[..., Any]) -> None:
        self._kept = [(owner, name, _read(owner, name)) for owner, name in reached.places.values()]
        self._classes = [(kind, set(vars(kind))) for kind in reached.classes]
        values = [(name, value) for _, name, value in self._kept if _bounded(value)]
        self._contents = [(name, keep(value)) for name, value in (*reached.objects.values(), *values)]

    def changed(self) -> list[str]:
        """Returns the names of places and objects whose value or contents differ from the saved ones."""
        names = [name for owner, name, value in self._kept if _read(owner, name) is not value]
        names += [name for _, name in self._new()]
        return [*names, *(name for name, contents in self._contents if contents.changed())]

    def restore(self) -> None:
        """Restores everything: the same objects, with the values that they had."""
        for owner, name, value in self._kept:
            # the same object again, not a copy: others may hold it
            if _read(owner, name) is not value:
                _remove(owner, name) if value is _ABSENT else _write(owner, name, value)
        for kind, name in self._new():
            delattr(kind, name)
        for _, contents in self._contents:
            contents.restore()

    def _new(self) -> list[tuple[type, str]]:
        """Returns (class, name) of attributes that classes got since, without functions and dunders, which are code."""
        return [
            (kind, name) for kind, before in self._classes for name in vars(kind).keys() - before
            if (isinstance(vars(kind)[name], _VALUES) or is_own(vars(kind)[name])) and not name.startswith("__")
        ]  # fmt: skip


def _bounded(value: Any) -> bool:
    return not isinstance(value, CONTAINERS) or entries(value) <= MOST


def entries(container: Any) -> int:
    """Returns the number of entries of one of `CONTAINERS`, by its base class, since a subclass may override `len`."""
    return next(kind for kind in CONTAINERS if isinstance(container, kind)).__len__(container)
