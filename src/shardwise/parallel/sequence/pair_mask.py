"""`PairMask`: a mask (B, 1, S, T) given as a function of indices, of which blocks are made when they are read.

    function(sample, head, query, key) -> bool, on tensors of indices that broadcast
    block((0, 4), (8, 12))             the function on rows 0..3 and columns 8..11, made when a kernel asks for rows

Attention of cut positions reads it block by block, and no rank holds (S, T). Any other operation is given the mask as
a tensor, as it would have been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.host import has_values, read, to_device
from shardwise.part.levels import Distributed
from shardwise.part.plain_shares import APART
from shardwise.part.sums import plain
from shardwise.trace.leaves import replaced, tensors_in

Range = tuple[int, int]
At = Range | np.ndarray  # global indices of queries and keys that attention takes together: a range, or each of them
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_CPU = torch.device("cpu")


class PairMask(torch.Tensor):
    """A mask of every pair of a query and a key, by a function of their indices.

    looks_back  its last query may read the first key, and the first query not the last key
    fixed       it follows from lengths alone: the function reads no tensor
    """

    function: Function
    looks_back: bool
    fixed: bool

    @staticmethod
    def __new__(cls, function: Function, shape: tuple[int, int, int, int], device: torch.device, looks_back: bool):
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.function, mask.looks_back, mask.fixed = function, looks_back, not _tensors_of(function)
        mask._kinds = {}
        return mask

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PairMask(shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _LEAVES_IT and args and isinstance(args[0], PairMask) and _as_it_is(name, args, kwargs):
            return args[0]
        if name not in _ASKS:  # whatever reads elements is given the tensor, as if no function had stood for it
            args, kwargs = replaced(PairMask, whole_mask, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # below autograd, past the function above: what asks for memory is given the tensor
        args, kwargs = replaced(PairMask, whole_mask, (args, kwargs or {}))
        return func(*args, **kwargs)

    def values(self, rows: At, columns: At, device: torch.device | None = None) -> torch.Tensor:
        """Returns the mask there: (B or 1, 1, rows, columns)."""
        device = self.device if device is None else device
        sample = torch.arange(self.shape[0], device=device).view(-1, 1, 1, 1)
        query, key = (indices_at(at, device) for at in (rows, columns))
        allowed = self.function(sample, torch.zeros_like(sample[:1]), query.view(1, 1, -1, 1), key.view(1, 1, 1, -1))
        return allowed.expand(-1, -1, len(query), len(key))

    def block(self, rows: At, columns: At) -> MaskBlock:
        """Returns the mask of some rows and columns, not made yet."""
        return MaskBlock(self, rows, columns)

    def kinds(self, pairs: tuple[tuple[Range, Range], ...]) -> Mapping[tuple[Range, Range], str] | None:
        """Returns by (rows, columns) "empty", "full", "diagonal" or "masked": what may be read there.

        None where it depends on tensors without values.
        """
        if pairs in self._kinds:  # all layers are given one mask
            return self._kinds[pairs]
        if self.fixed:  # in a rehearsal without values too; on the CPU, so that no device is waited for
            with _disable_current_modes():
                table = torch.stack([self._look(q, k, _CPU) for q, k in pairs]).tolist()
        elif all(map(has_values, _tensors_of(self.function))):
            table = read(torch.stack([self._look(q, k, self.device) for q, k in pairs]), "which blocks a mask leaves")
        else:
            return None
        self._kinds[pairs] = kinds_by_pair(pairs, table)
        return self._kinds[pairs]

    def _look(self, rows: Range, columns: Range, device: torch.device) -> torch.Tensor:
        return look_at(self.values(rows, columns, device), rows == columns)


def look_at(block: torch.Tensor, alike: bool, full: bool = True) -> torch.Tensor:
    """Returns (3,) of bool: whether a block lets any pair be read, all pairs, exactly the lower triangle.

    alike  its rows and columns are the same positions; else the third is False
    full   whether to look for all pairs; else the second is False
    """
    none = block.new_zeros(())
    diagonal = (block == torch.ones_like(block[0, 0]).tril()).all() if alike else none
    return torch.stack([block.any(), block.all() if full else none, diagonal])


def kinds_by_pair(pairs: Sequence[tuple[Range, Range]], table: Any) -> dict[tuple[Range, Range], str]:
    """Returns pair -> "empty", "full", "diagonal" or "masked"; `table`: the row that `look_at` gave of each pair."""
    names = ["empty" if not some else "full" if every else "diagonal" if diagonal else "masked"
             for some, every, diagonal in table]  # fmt: skip
    return dict(zip(pairs, names, strict=True))


class MaskBlock:
    """Some rows and columns of a mask, made a few rows at a time."""

    dtype = torch.bool

    def __init__(self, mask: PairMask, rows: At, columns: At):
        self.mask, self.rows, self.columns = mask, rows, columns

    def of_rows(self, rows: slice) -> torch.Tensor:
        """Returns (B or 1, 1, rows, columns) of some of the block's rows, which `rows` counts from its first."""
        at = self.rows
        some = (at[0] + rows.start, at[0] + rows.stop) if isinstance(at, tuple) else at[rows]
        return self.mask.values(some, self.columns)


_ASKS = {"__get__", "dim", "size", "numel", "element_size", "__len__", "stride", "is_floating_point"}
_LEAVES_IT = {"detach", "contiguous", "to", "__getitem__"}


def _as_it_is(name: str, args: tuple, kwargs: dict) -> bool:
    """Returns whether a function leaves the mask as it is: not moved, not cast, no part of it taken.

    Else `mask.to(device)`, or a slice that takes all, would make the tensor.
    """
    mask, *rest = args
    options = [*rest, *kwargs.values()]
    # "to" a device or dtype that it has already makes no tensor
    if name == "to":
        same = (torch.bool, mask.device, str(mask.device))
        return all(option in same for option in options if not isinstance(option, bool))
    # detach and contiguous leave it alone; with options they would make one
    if name != "__getitem__":
        return not options
    taken = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
    # a slice that takes less than all would have to be made
    return len(taken) <= mask.dim() and all(
        isinstance(part, slice) and part.indices(n) == (0, n, 1) for part, n in zip(taken, mask.shape, strict=False)
    )


def whole_mask(mask: PairMask) -> torch.Tensor:
    """Returns the mask as a tensor (B, 1, S, T)."""
    b, _, s, t = mask.shape
    return mask.values((0, s), (0, t)).expand(b, 1, s, t)


def indices_at(at: At, device: torch.device) -> torch.Tensor:
    """Returns (n,) the indices of a range, or these single ones, on a device."""
    return torch.arange(*at, device=device) if isinstance(at, tuple) else to_device(at, device)


def whole_function(function: Any) -> Any:
    """Returns the function with the cut tensors that it closes over gathered, so that each rank can call it alone.

    Collective. `ValueError` where what it closes over is not followed: it is no function, number or tensor.
    """
    return _remade(function, lambda tensor: plain(tensor) if isinstance(tensor, Distributed) else tensor)


def _remade(function: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the function with `of_tensor` applied to each tensor that it closes over; `ValueError` as above."""
    if isinstance(function, torch.Tensor):
        return of_tensor(function)
    if isinstance(function, tuple | list):
        return type(function)(_remade(item, of_tensor) for item in function)
    if function is None or isinstance(function, int | float | str | torch.dtype | torch.device):
        return function
    # an object may hold tensors anywhere: it cannot be rebuilt with others in their places
    if not isinstance(function, FunctionType):
        raise ValueError(f"a mask that closes over {type(function).__name__}")
    if not function.__closure__:
        return function
    cells = tuple(CellType(_remade(cell.cell_contents, of_tensor)) for cell in function.__closure__)
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _tensors_of(function: Any) -> list[torch.Tensor]:
    """Returns the tensors that a function closes over, in the order in which `_remade` comes to them."""
    # in the order of `_remade`, which puts others in their places
    if isinstance(function, FunctionType):
        return [t for cell in function.__closure__ or () for t in _tensors_of(cell.cell_contents)]
    if isinstance(function, tuple | list):
        return [t for item in function for t in _tensors_of(item)]
    return tensors_in(function) if isinstance(function, torch.Tensor) else []


def _identity(function: Any) -> Any:
    """Returns a hashable key of a function, equal for functions that differ only in tensors that they close over."""
    if isinstance(function, FunctionType):
        cells = tuple(_identity(cell.cell_contents) for cell in function.__closure__ or ())
        return function.__code__, _identity(function.__defaults__), str(function.__kwdefaults__), cells
    if isinstance(function, tuple | list):
        return tuple(map(_identity, function))
    return torch.Tensor if isinstance(function, torch.Tensor) else (type(function), function)


@dataclass(frozen=True)
class Bare:
    """A `PairMask` without the tensors of its function, which a program that is written for it takes as inputs."""

    identity: Any  # equal where functions give the same of the same tensors
    shape: tuple[int, ...]
    device: torch.device
    looks_back: bool
    mask: PairMask = field(compare=False, repr=False)

    @classmethod
    def of(cls, mask: PairMask) -> tuple[Bare, list[torch.Tensor]]:
        """Returns (the mask without its tensors, its tensors)."""
        # empty ones in their places, so that what a program names keeps no memory of a batch
        none = [t.new_empty(0) for t in _tensors_of(mask.function)]
        bare = mask if mask.fixed else _with_tensors(mask, none)
        identity = _identity(mask.function)
        return cls(identity, tuple(mask.shape), mask.device, mask.looks_back, bare), _tensors_of(mask.function)

    def filled(self, tensors: Sequence[torch.Tensor]) -> PairMask:
        """Returns the mask whose function closes over these tensors."""
        return _with_tensors(self.mask, tensors) if tensors else self.mask


def _with_tensors(mask: PairMask, tensors: Sequence[torch.Tensor]) -> PairMask:
    others = iter(tensors)
    function = _remade(mask.function, lambda _: next(others))
    return PairMask(function, tuple(mask.shape), mask.device, mask.looks_back)


APART[PairMask] = Bare.of

__all__ = ["Bare", "MaskBlock", "PairMask", "whole_function", "whole_mask"]
