"""Find what an operation does with positions, by running it on tensors without values, cut as chunks are.

    "waits"    results in which positions are apart
    "ends"     results that are no larger than the rows that came in, or a sum over positions
    "tells"    no tensor, but something about one
    "whole"    it needs the tensor whole
    "writes"   it writes into a tensor

What was found is remembered by what the arguments look like: shapes, strides, dtypes, and which operations led to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardwise.memory.chunk_runs import turn
from shardwise.part import Owners, Part, Sum
from shardwise.trace.elementwise import is_random
from shardwise.trace.leaves import replaced, tensors_in

_MOST_TRIED = 1 << 14


class Unmade(torch.Tensor):
    """A tensor that is not computed yet; `place`: among the results of its call, None for the only one."""

    place: int | None

    @property
    def like(self) -> torch.Tensor:
        """Returns the tensor without values, as a part over turns."""
        raise NotImplementedError

    @property
    def number(self) -> int:
        """Returns the number of the call that makes it (`Tried.number`): it is the same for equal calls."""
        raise NotImplementedError


class Tried(NamedTuple):
    """Outcome of a call on tensors without values: a verdict, its results, and a number, the same for equal calls."""

    what: str  # "waits", "ends", "tells"; "whole" or "writes": it is not chunked
    like: Any = None  # results without values, as the call gives them
    number: int = 0


_tried: dict[Any, Tried] = {}
_numbers = itertools.count(1)
_TELLS = (torch.Size, int, bool, torch.dtype, torch.device, torch.layout)


class _Watch(TorchDispatchMode):
    """Mode that notes whether anything but views was computed, and whether anything was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.computes = self.draws = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func._schema.returns
        self.computes |= not returned or returned[0].alias_info is None
        self.draws |= is_random(func)
        return func(*args, **(kwargs or {}))


def look(func: Callable, args: tuple, kwargs: dict, least: int) -> Tried:
    """Returns the `Tried` of a call, from tensors without values; cached by its arguments' shapes and cuts.

    least  elements, beyond which a result waits
    """
    key = (func, _key_of(args), _key_of(kwargs), least)
    try:
        tried = _tried.get(key)
    except TypeError:  # an argument that cannot be a key
        return _look_now(func, args, kwargs, least)
    if tried is None:
        if len(_tried) >= _MOST_TRIED:
            _tried.clear()
        tried = _tried[key] = _look_now(func, args, kwargs, least)
    return tried


def look_of_rows(like: torch.Tensor, dim: int, count: int) -> Tried:
    """Returns the outcome "waits" whose result describes rows like `like`, cut into `count` chunks along `dim`."""
    key = ("rows", tuple(like.shape), like.stride(), like.dtype, dim, count)
    if key not in _tried:
        owners = Owners.blocks(like.shape[dim], count)
        with _disable_current_modes():
            _tried[key] = Tried("waits", Part(owners.take(like, dim, 0), dim, owners, turn(count, 0)), next(_numbers))
    return _tried[key]


def _key_of(tree: Any) -> Any:
    """Returns what of a call's arguments decides the outcome of a trial, hashable: shapes, strides, dtypes, values."""
    if isinstance(tree, Unmade):
        # not by shape alone: two of one shape may be cut in other ways
        return "waits", tree.number, tree.place
    # values of a tensor given whole do not matter: a trial runs on shapes
    if isinstance(tree, torch.Tensor):
        return "given", tuple(tree.shape), tree.stride(), tree.dtype
    if isinstance(tree, dict):
        return tuple((key, _key_of(leaf)) for key, leaf in tree.items())
    if isinstance(tree, tuple | list):
        return type(tree), tuple(map(_key_of, tree))
    if isinstance(tree, slice):  # without a hash before Python 3.12
        return "slice", tree.start, tree.stop, tree.step
    return type(tree), tree  # the type too: True == 1 == 1.0


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _look_now(func: Callable, args: tuple, kwargs: dict, least: int) -> Tried:
    """Returns the `Tried` of a call, run once on chunks without values."""

    def like(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.like if isinstance(leaf, Unmade) else without_values(leaf)

    trial_args = replaced(torch.Tensor, like, (args, kwargs))
    tensors = tensors_in(trial_args)
    # functions of torch, as Python calls them, have no schema that says what they write; versions tell
    versions = [tensor._version for tensor in tensors]
    watch, meta = _Watch(), torch.device("meta")
    args, kwargs = (_elsewhere(tree, meta) for tree in trial_args)
    with _disable_current_modes(), torch.no_grad(), watch:
        try:
            output = func(*args, **kwargs)
        except Exception:  # whatever it says of cut tensors, or of such without values; the whole one is given next
            return Tried("whole")
    if any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True)):
        return Tried("writes")
    leaves = [output] if isinstance(output, torch.Tensor) else output
    several = isinstance(leaves, tuple | list) and bool(leaves)
    if not several or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return Tried("tells" if _only_tells(func, output) else "whole")
    kinds = {type(leaf) for leaf in leaves if isinstance(leaf, Part | Sum)}
    # what is drawn by chunk is not what is drawn at once
    if watch.draws or not all(isinstance(leaf, Part | Sum) for leaf in leaves):
        return Tried("whole")
    # a sum over turns is complete after the last one alone, so nothing may wait for it
    if Sum not in kinds and any(leaf.numel() > least for leaf in leaves):
        return Tried("waits", output, next(_numbers))
    # views alone leave as much as came in: what waits is made whole for them
    return Tried("ends", output, next(_numbers)) if watch.computes else Tried("whole")


def _elsewhere(tree: Any, device: torch.device) -> Any:
    """Returns the arguments with `device` in the place of every device, a keyword `device=` of any type included."""
    if isinstance(tree, torch.device):
        return device
    # device="cuda" is a keyword of text in some operations, and an object in others
    if isinstance(tree, dict):
        return {key: device if key == "device" else _elsewhere(leaf, device) for key, leaf in tree.items()}
    # torch.Size is a tuple, but its elements are numbers
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        leaves = [_elsewhere(leaf, device) for leaf in tree]
        return leaves if isinstance(tree, list) else tuple(leaves)
    return tree


def _only_tells(func: Callable, output: Any) -> bool:
    """Whether a call only read metadata, which a tensor without values has too: its shape, dtype, device."""
    # an attribute that is no tensor (x.shape, x.is_cuda): torch passes its getter as the function
    if getattr(func, "__name__", "") == "__get__":
        return True
    numbers = isinstance(output, tuple) and all(isinstance(number, int) for number in output)
    # data_ptr() is a number too, but 0 of every tensor without values
    return (isinstance(output, _TELLS) or numbers) and not getattr(func, "__name__", "").endswith("data_ptr")
