"""The tensors among an operation's arguments, found faster than by torch's tree functions.

Torch's own tree functions do the same for any registered class, at twenty times the cost, which would be most of the
cost of an operation that a mode looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_ATOMS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))  # most of what is met
_NESTS = frozenset((tuple, list, dict))


def tensors_in(tree: Any, kind: type | tuple[type, ...] = torch.Tensor) -> list[Any]:
    """Returns the leaves of class (or classes) `kind` in nested tuples, lists and dicts, in order."""
    if isinstance(tree, kind):
        return [tree]
    tensors: list[Any] = []
    _gather(tree, kind, tensors)
    return tensors


def _gather(nest: Any, kind: type | tuple[type, ...], tensors: list[Any]) -> None:
    """Appends the leaves of class `kind` in a nested container to `tensors`."""
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, tuple | list):
        return
    for leaf in nest:
        kind_of_leaf = type(leaf)
        # empty nests are passed by: a call for each would cost more than the walk
        if kind_of_leaf in _ATOMS or (kind_of_leaf in _NESTS and not leaf):
            continue
        if isinstance(leaf, kind):
            tensors.append(leaf)
        # a tensor of another kind is passed by: some can be iterated over
        elif not isinstance(leaf, torch.Tensor):
            _gather(leaf, kind, tensors)


def replaced(kind: type | tuple[type, ...], make: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the same nested tuples, lists and dicts, with `make(leaf)` in place of each leaf of class `kind`."""
    if isinstance(tree, kind):
        return make(tree)
    # a tensor of another kind is a leaf; some could be iterated over
    if isinstance(tree, torch.Tensor):
        return tree
    if isinstance(tree, dict):
        return {key: replaced(kind, make, leaf) for key, leaf in tree.items()}
    # a leaf of any other class
    if not isinstance(tree, tuple | list):
        return tree
    # most leaves are atoms: asked by type, which is faster than a call for each
    leaves = [leaf if type(leaf) in _ATOMS else replaced(kind, make, leaf) for leaf in tree]
    if isinstance(tree, list):
        return leaves
    if type(tree) is tuple:
        return tuple(leaves)
    return _with_names(tree, leaves)


def _with_names(original: tuple, leaves: list) -> tuple:
    """Returns a tuple of the class of `original`, named or not (`torch.max(x, 0).values`), with these leaves."""
    # a named tuple has `_make`; those that torch returns take one sequence instead
    made: Any = getattr(original, "_make", type(original) if hasattr(original, "n_fields") else tuple)
    return made(leaves)


def written_tensors(func, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Returns the tensors among the arguments into which the op writes, by its schema."""
    written: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written.extend(tensors_in(value))
    return written


@cache
def written(func: Any) -> list[int]:
    """Returns the positions of the arguments into which an op writes; cached, since schemas are slow to read."""
    alias_infos = [argument.alias_info for argument in func._schema.arguments]
    return [place for place, alias in enumerate(alias_infos) if alias is not None and alias.is_write]


def unsaid_writes(func, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Returns the running statistics that an op writes although its schema does not say so (batch norm); else []."""
    names, statistics = _statistics(func)
    if not statistics:
        return []
    arguments = dict(zip(names, args, strict=False)) | kwargs
    return tensors_in([arguments[name] for name in statistics]) if arguments["training"] else []


@cache
def _statistics(func) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns (all argument names, names of running statistics that the op writes without its schema saying so)."""
    names = tuple(argument.name for argument in func._schema.arguments)
    silent = "training" in names and not func._schema.is_mutable
    return names, tuple(name for name in names if silent and name.startswith("running_"))
