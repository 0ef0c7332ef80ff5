"""`PairMask`, an attention mask (B, 1, S, T) given as a function of indices and evaluated block by block.

    function(sample, head, query, key) -> bool, on tensors of indices that broadcast
    block((0, 4), (8, 12))             the function on rows 0..3 and columns 8..11, evaluated when a kernel needs rows

Attention on cut positions reads it block by block, so no rank holds (S, T). Any other operation gets the mask as a
tensor.
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
At = Range | np.ndarray  # global indices of queries or keys that attention takes together, as (start, stop) or (n,)
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_CPU = torch.device("cpu")


class PairMask(torch.Tensor):
    """A bool mask of every pair of a query and a key (True: may be read), as a function of their indices.

    function    (sample, head, query, key), index tensors that broadcast -> bool tensor
    looks_back  whether the last query may read the first key, but the first query not the last key
    fixed       whether the mask depends on lengths alone, since the function closes over no tensor
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
        """Returns the mask itself if the function leaves it unchanged; else the function's result on the tensor."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _LEAVES_IT and args and isinstance(args[0], PairMask) and _as_it_is(name, args, kwargs):
            return args[0]
        if name not in _ASKS:  # it reads elements
            args, kwargs = replaced(PairMask, whole_mask, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Returns the result on the mask as a tensor, for calls below torch's functions."""
        args, kwargs = replaced(PairMask, whole_mask, (args, kwargs or {}))
        return func(*args, **kwargs)

    def values(self, rows: At, columns: At, device: torch.device | None = None) -> torch.Tensor:
        """Returns the mask's values (B or 1, 1, rows, columns) at these indices. `device`: None for the mask's own."""
        device = self.device if device is None else device
        sample = torch.arange(self.shape[0], device=device).view(-1, 1, 1, 1)
        query, key = (indices_at(at, device) for at in (rows, columns))
        allowed = self.function(sample, torch.zeros_like(sample[:1]), query.view(1, 1, -1, 1), key.view(1, 1, 1, -1))
        return allowed.expand(-1, -1, len(query), len(key))

    def block(self, rows: At, columns: At) -> MaskBlock:
        """Returns some rows and columns of the mask, which are evaluated when they are read."""
        return MaskBlock(self, rows, columns)

    def kinds(self, pairs: tuple[tuple[Range, Range], ...]) -> Mapping[tuple[Range, Range], str] | None:
        """Returns (rows, columns) of each of `pairs` -> what may be read there, or None if tensors have no values.

        The kinds are "empty" (nothing), "full" (all), "diagonal" (the lower triangle) and "masked" (something else).
        """
        if pairs in self._kinds:  # most models give all layers one mask
            return self._kinds[pairs]
        if self.fixed:  # also in a rehearsal without values; on the CPU, so that the host waits for no device
            with _disable_current_modes():
                table = torch.stack([self._look(q, k, _CPU) for q, k in pairs]).tolist()
        elif all(map(has_values, _tensors_of(self.function))):
            table = read(torch.stack([self._look(q, k, self.device) for q, k in pairs]), "which blocks a mask leaves")
        else:
            return None
        self._kinds[pairs] = kinds_by_pair(pairs, table)
        return self._kinds[pairs]

    def _look(self, rows: Range, columns: Range, device: torch.device) -> torch.Tensor:
        """Returns `look_at` of a block of the mask."""
        return look_at(self.values(rows, columns, device), rows == columns)


def look_at(block: torch.Tensor, alike: bool, full: bool = True) -> torch.Tensor:
    """Returns a bool tensor (3,): whether a block allows any pair, all pairs, exactly the lower triangle.

    alike  whether its rows and columns are the same positions; if not, the third is False
    full   whether to compute the second; if not, it is False
    """
    none = block.new_zeros(())
    diagonal = (block == torch.ones_like(block[0, 0]).tril()).all() if alike else none
    return torch.stack([block.any(), block.all() if full else none, diagonal])


def kinds_by_pair(pairs: Sequence[tuple[Range, Range]], table: Any) -> dict[tuple[Range, Range], str]:
    """Returns pair -> "empty", "full", "diagonal" or "masked". `table`: for each pair the result of `look_at`."""
    names = ["empty" if not some else "full" if every else "diagonal" if diagonal else "masked"
             for some, every, diagonal in table]  # fmt: skip
    return dict(zip(pairs, names, strict=True))


class MaskBlock:
    """Some rows and columns of a mask, evaluated a few rows at a time."""

    dtype = torch.bool

    def __init__(self, mask: PairMask, rows: At, columns: At):
        self.mask, self.rows, self.columns = mask, rows, columns

    def of_rows(self, rows: slice) -> torch.Tensor:
        """Returns the values (B or 1, 1, rows, columns) of the block's rows in the slice `rows`, from its first."""
        at = self.rows
        some = (at[0] + rows.start, at[0] + rows.stop) if isinstance(at, tuple) else at[rows]
        return self.mask.values(some, self.columns)


_ASKS = {"__get__", "dim", "size", "numel", "element_size", "__len__", "stride", "is_floating_point"}  # read no element
_LEAVES_IT = {"detach", "contiguous", "to", "__getitem__"}  # may leave the mask unchanged


def _as_it_is(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether a call of a function in `_LEAVES_IT` leaves the mask unchanged, so that it need not become a tensor.

    For example `mask.to(device)` with its own device, or a slice of everything.
    """
    mask, *rest = args
    options = [*rest, *kwargs.values()]
    if name == "to":
        same = (torch.bool, mask.device, str(mask.device))
        return all(option in same for option in options if not isinstance(option, bool))
    if name != "__getitem__":
        return not options
    taken = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
    return len(taken) <= mask.dim() and all(
        isinstance(part, slice) and part.indices(n) == (0, n, 1) for part, n in zip(taken, mask.shape, strict=False)
    )


def whole_mask(mask: PairMask) -> torch.Tensor:
    """Returns the mask as a tensor (B, 1, S, T)."""
    b, _, s, t = mask.shape
    return mask.values((0, s), (0, t)).expand(b, 1, s, t)


def indices_at(at: At, device: torch.device) -> torch.Tensor:
    """Returns the indices (n,) that `at` stands for, as a tensor on a device."""
    return torch.arange(*at, device=device) if isinstance(at, tuple) else to_device(at, device)


def whole_function(function: Any) -> Any:
    """Returns a copy of the function that closes over gathered tensors in place of cut ones. Collective.

    Each rank can then call it alone. Raises `ValueError` if it closes over anything but functions, plain values,
    tensors, and tuples and lists of these.
    """
    return _remade(function, lambda tensor: plain(tensor) if isinstance(tensor, Distributed) else tensor)


def _remade(function: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a copy of the function that closes over `of_tensor(t)` in place of each tensor t; raises as above."""
    if isinstance(function, torch.Tensor):
        return of_tensor(function)
    if isinstance(function, tuple | list):
        return type(function)(_remade(item, of_tensor) for item in function)
    if function is None or isinstance(function, int | float | str | torch.dtype | torch.device):
        return function
    # an object may hold tensors anywhere, and cannot be copied with other ones
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
    """Returns the tensors that a function closes over, in the order in which `_remade` replaces them."""
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
    """A `PairMask` without its function's tensors, which are inputs of a compiled program. Equal ones share a program.

    identity  key of the function, from `_identity`
    mask      a mask with empty tensors (the mask itself if it is `fixed`); other fields are those of the mask
    """

    identity: Any
    shape: tuple[int, ...]
    device: torch.device
    looks_back: bool
    mask: PairMask = field(compare=False, repr=False)

    @classmethod
    def of(cls, mask: PairMask) -> tuple[Bare, list[torch.Tensor]]:
        """Returns (the mask without its tensors, its tensors)."""
        # empty tensors in place of the mask's, so that a program keeps no memory of a batch
        none = [t.new_empty(0) for t in _tensors_of(mask.function)]
        bare = mask if mask.fixed else _with_tensors(mask, none)
        identity = _identity(mask.function)
        return cls(identity, tuple(mask.shape), mask.device, mask.looks_back, bare), _tensors_of(mask.function)

    def filled(self, tensors: Sequence[torch.Tensor]) -> PairMask:
        """Returns the mask with these tensors in its function."""
        return _with_tensors(self.mask, tensors) if tensors else self.mask


def _with_tensors(mask: PairMask, tensors: Sequence[torch.Tensor]) -> PairMask:
    """Returns a copy of the mask whose function closes over `tensors`, in the order of `_tensors_of`."""
    others = iter(tensors)
    function = _remade(mask.function, lambda _: next(others))
    return PairMask(function, tuple(mask.shape), mask.device, mask.looks_back)


APART[PairMask] = Bare.of

__all__ = ["Bare", "MaskBlock", "PairMask", "whole_function", "whole_mask"]
