"""Decide whether an operation is deferred, by running it on meta tensors that are chunked by positions.

    "waits"    defer it: it treats positions by themselves, and its results are wide
    "ends"     run all deferred calls now: its results are no larger than the input rows, or a sum over positions
    "tells"    it returns metadata of a tensor (a shape, a dtype)
    "whole"    it needs its arguments computed whole
    "writes"   it writes into a tensor

Verdicts are cached by the arguments' shapes, strides and dtypes, and by the calls that deferred arguments come from.
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

_MOST_TRIED = 1 << 14  # verdicts in the cache


class Unmade(torch.Tensor):
    """A tensor that is not computed yet; `place`: its index among its call's results, None if it is the only one."""

    place: int | None

    @property
    def like(self) -> torch.Tensor:
        """Returns the tensor without values, as a `Part` over turns."""
        raise NotImplementedError

    @property
    def number(self) -> int:
        """Returns the id of the call that makes it (`Tried.number`), which is the same for equal calls."""
        raise NotImplementedError


class Tried(NamedTuple):
    """Outcome of a trial.

    what    the verdict: "waits", "ends", "tells", "whole" or "writes" (see the module's docstring)
    like    for "waits" and "ends", the results without values, nested as the call gives them
    number  id of the outcome, equal for equal calls
    """

    what: str
    like: Any = None
    number: int = 0


_tried: dict[Any, Tried] = {}
_numbers = itertools.count(1)
_TELLS = (torch.Size, int, bool, torch.dtype, torch.device, torch.layout)


class _Watch(TorchDispatchMode):
    """Mode that notes whether an op other than a view ran (`computes`), and whether a random one did (`draws`)."""

    def __init__(self) -> None:
        super().__init__()
        self.computes = self.draws = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func._schema.returns
        self.computes |= not returned or returned[0].alias_info is None
        self.draws |= is_random(func)
        return func(*args, **(kwargs or {}))


def look(func: Callable, args: tuple, kwargs: dict, least: int) -> Tried:
    """Returns the cached outcome of a trial of `func(*args, **kwargs)`.

    least  elements of the input rows; a result with more is wide
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
    """Returns the outcome "waits" for input rows like `like`, a meta tensor, in `count` chunks along `dim`."""
    key = ("rows", tuple(like.shape), like.stride(), like.dtype, dim, count)
    if key not in _tried:
        owners = Owners.blocks(like.shape[dim], count)
        with _disable_current_modes():
            _tried[key] = Tried("waits", Part(owners.take(like, dim, 0), dim, owners, turn(count, 0)), next(_numbers))
    return _tried[key]


def _key_of(tree: Any) -> Any:
    """Returns a hashable key of nested arguments: shape, stride, dtype of tensors, type and value of other leaves."""
    if isinstance(tree, Unmade):
        # not by shape, since tensors of one shape may be chunked along different dims
        return "waits", tree.number, tree.place
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
    """Returns a meta tensor with the shape, strides and dtype of `tensor`."""
    with _disable_current_modes():
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _look_now(func: Callable, args: tuple, kwargs: dict, least: int) -> Tried:
    """Returns the outcome of a call, run once on meta tensors, of which deferred ones are the first turn's chunks."""

    def like(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.like if isinstance(leaf, Unmade) else without_values(leaf)

    trial_args = replaced(torch.Tensor, like, (args, kwargs))
    tensors = tensors_in(trial_args)
    # Python functions of torch have no schema that says what they write, so versions are compared
    versions = [tensor._version for tensor in tensors]
    watch, meta = _Watch(), torch.device("meta")
    args, kwargs = (_elsewhere(tree, meta) for tree in trial_args)
    with _disable_current_modes(), torch.no_grad(), watch:
        try:
            output = func(*args, **kwargs)
        except Exception:  # it cannot run on chunks, or on meta tensors
            return Tried("whole")
    if any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True)):
        return Tried("writes")
    leaves = [output] if isinstance(output, torch.Tensor) else output
    several = isinstance(leaves, tuple | list) and bool(leaves)
    if not several or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return Tried("tells" if _only_tells(func, output) else "whole")
    kinds = {type(leaf) for leaf in leaves if isinstance(leaf, Part | Sum)}
    # random numbers drawn chunk by chunk would differ from those drawn at once
    if watch.draws or not all(isinstance(leaf, Part | Sum) for leaf in leaves):
        return Tried("whole")
    # a sum over turns is complete only after the last one, so operations on it cannot be deferred
    if Sum not in kinds and any(leaf.numel() > least for leaf in leaves):
        return Tried("waits", output, next(_numbers))
    # a view alone does not narrow, so its argument is computed whole
    return Tried("ends", output, next(_numbers)) if watch.computes else Tried("whole")


def _elsewhere(tree: Any, device: torch.device) -> Any:
    """Returns nested arguments with every device, and every value of a key "device", replaced by `device`."""
    if isinstance(tree, torch.device):
        return device
    # `device=` may be a str
    if isinstance(tree, dict):
        return {key: device if key == "device" else _elsewhere(leaf, device) for key, leaf in tree.items()}
    # torch.Size is a tuple that must stay one
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        leaves = [_elsewhere(leaf, device) for leaf in tree]
        return leaves if isinstance(tree, list) else tuple(leaves)
    return tree


def _only_tells(func: Callable, output: Any) -> bool:
    """Whether a call only read metadata (shape, dtype, device), which a meta tensor has too. `output`: no tensor."""
    # for an attribute (x.shape, x.is_cuda) torch passes its getter as the function
    if getattr(func, "__name__", "") == "__get__":
        return True
    numbers = isinstance(output, tuple) and all(isinstance(number, int) for number in output)
    # data_ptr() returns an int too, but 0 for every meta tensor
    return (isinstance(output, _TELLS) or numbers) and not getattr(func, "__name__", "").endswith("data_ptr")
