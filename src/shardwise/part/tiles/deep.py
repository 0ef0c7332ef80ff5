"""Deep halos (`domain_depth`): one halo exchange serves several convolutions; border rows are computed on two ranks.

    domain_depth=3, kernel 3        tile
    fetched                     3 | 8 | 3      one exchange in place of three
    convolution, ReLU           2 | 8 | 2      beyond the field's edge: the zeros that each convolution pads
    convolution, ReLU           1 | 8 | 1
    convolution                     8          the next one fetches again

A part stays what it is, with one owner for each index, and norms, masks, losses and other operations read that alone.
Beside a part lies its `Margin`, the window of the field out of which the part was cut. A convolution that finds enough
there sends nothing. An elementwise operation runs on the window, and the part is cut out of the result. Any other
operation reads the part, and its result has no margin. Backward is autograd's; gradients of other ranks' cells go back
to them in one exchange.

Bytes of an exchange: those of all convolutions that it serves, if these are alike, plus the corners. Computed twice:
(depth - 1) times what a convolution reads on each side, in the first one, less in each that follows.

What this does not do: know what follows a convolution. It fetches for as many convolutions with its own kernel as the
plan says, for nothing if a norm follows. Boundaries other than zeros are made by `F.pad`, which reads the part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.part.cuts import REMEMBERED, Owners
from shardwise.part.levels import Distributed
from shardwise.part.tensor import MARGINS, Part
from shardwise.part.tiles.maps import Sliding, reads
from shardwise.part.tiles.saved_halos import CutDim, kept_apart
from shardwise.part.tiles.windows import alone, fetched, opened, placed, used
from shardwise.trace.elementwise import is_elementwise, is_random

Ranges = tuple[tuple[int, int], ...]  # of each rank, the indices (start, stop) of a dim that it has


@dataclass(frozen=True)
class Margin:
    """The window of the field out of which a part was cut.

    window    this rank's window, a plain tensor that contains the part's share
    cut_dims  the part's cuts, the outermost first
    ranges    for each of these cuts, the range (start, stop) of the dim that each rank's window has
    left      number of convolutions that it may still serve
    version   `_version` of the part when it was cut out, since later writes into the part are not in the window
    """

    window: torch.Tensor
    cut_dims: tuple[CutDim, ...]
    ranges: tuple[Ranges, ...]
    left: int
    version: int


def margin_of(tensor: Any) -> Margin | None:
    """Returns the `Margin` of a tensor; None if it has none, or was written since it was cut out."""
    # autograd counts each write in place in `_version`, and none of them reaches the window
    margin = tensor.margin if isinstance(tensor, Part) else None
    return margin if margin is not None and margin.version == tensor._version else None


def deepened(
    input: torch.Tensor, along: Mapping[int, Sliding], cut_dims: list[CutDim],
    operation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:  # fmt: skip
    """Returns a convolution's result as a part with a margin; None if it cannot have one.

    Collective, if the input's margin does not suffice.

    along      cut dim -> its `Sliding`; along a cut dim that is missing each output reads its own input
    cut_dims   the input's cuts, the outermost first
    operation  window -> result, which pads nothing along cut dims
    """
    depth = min(cut.axis.halo_depth for cut in cut_dims)
    # other cuts beside these (of weights, say) leave no plain tile, and a margin is a plain window
    if depth == 1 or not alone(input, cut_dims):
        return None
    maps = [along.get(cut.dim, Sliding(cut.owners.size, 1)) for cut in cut_dims]
    # a convolution that reads neighbours uses up one of those that the margin may serve; a pointwise one uses none
    moves = any(sliding.extent > 1 or sliding.stride > 1 for sliding in maps)
    margin = margin_of(input)
    if margin is not None and margin.left >= moves and margin.cut_dims == tuple(cut_dims):
        # decided from every rank's ranges, which all know: either all ranks find enough, or all exchange
        own = zip(cut_dims, maps, margin.ranges, strict=True)
        ranges = _all_or_none([_computable(cut.owners, m, have) for cut, m, have in own])
        if ranges is not None:
            window = _inside(margin, maps, ranges)
            return _with_margin(operation(window), cut_dims, maps, ranges, margin.left - moves)
    if not moves:  # it reads its own cells alone: there is no exchange that could bring more
        return None
    ranges = _all_or_none([_widened(cut.owners, m, depth - 1) for cut, m in zip(cut_dims, maps, strict=True)])
    if ranges is None:
        return None
    window, afar = input, []
    for cut, sliding, outputs in zip(cut_dims, maps, ranges, strict=True):
        if sliding.extent == sliding.stride == 1:  # each output reads its own cell alone
            window = opened(window, [cut])
        else:
            wanted = tuple((sliding.reach(*span),) for span in outputs)
            window = fetched(window, cut, wanted)
            afar.append((cut, wanted))
    with kept_apart(window, input, afar):  # backward keeps the halo's strips beside the tile, not a second copy of it
        output = operation(window)
    return _with_margin(output, cut_dims, maps, ranges, depth - 1)


def _all_or_none(ranges: list[Ranges | None]) -> list[Ranges] | None:
    """Returns the list unchanged; None if any of its entries is None."""
    there = [by_rank for by_rank in ranges if by_rank is not None]
    return there if len(there) == len(ranges) else None


@lru_cache(REMEMBERED)
def _widened(owners: Owners, along: Sliding, more: int) -> Ranges | None:
    """Returns each rank's range of outputs, widened by what `more` further convolutions of the same kind read.

    owners, along  those of the inputs, and the convolution
    None if a rank has no inputs or no outputs, tiles are not in rank order, or padding is wider than the kernel.
    """
    after = reads(owners, along).owners
    front, behind = more * along.before, more * (along.extent - 1 - along.before)
    # behind < 0: padding is wider than the kernel, and the window would end before the tile's own outputs
    if not owners.in_rank_order or not all(owners.counts) or not all(after.counts) or behind < 0:
        return None
    spans = [after.span(rank) or (0, 0) for rank in range(after.ranks)]
    # outputs beyond the field do not exist: there `_inside` gives the next convolution the zeros that it pads
    return tuple((max(0, start - front), min(after.size, start + count + behind)) for start, count in spans)


@lru_cache(REMEMBERED)
def _computable(owners: Owners, along: Sliding, have: Ranges) -> Ranges | None:
    """Returns each rank's range of outputs that it can compute from its window; None if a rank lacks its own outputs.

    owners, along  those of the inputs, and the convolution;  have  each rank's range of inputs in its window
    """
    after, ranges = reads(owners, along).owners, []
    for rank, (low, high) in enumerate(have):
        start, count = after.span(rank) or (0, 0)
        # beyond an edge of the field the rank knows what is read, zeros; beyond its window it knows nothing
        first = 0 if low <= 0 else -(-(low + along.before) // along.stride)
        last = after.size if high >= owners.size else (high + along.before - along.extent) // along.stride + 1
        # a rank that lacks an input of one of its own outputs cannot go on alone
        if not count or first > start or last < start + count:
            return None
        ranges.append((first, last))
    return tuple(ranges)


def _inside(margin: Margin, maps: list[Sliding], ranges: list[Ranges]) -> torch.Tensor:
    """Returns the inputs of this rank's outputs, cut out of the margin's window, with zeros beyond the field's edges.

    maps, ranges  for each cut dim the convolution, and each rank's range of outputs
    """
    window = margin.window
    for cut, sliding, have, outputs in zip(margin.cut_dims, maps, margin.ranges, ranges, strict=True):
        low, high = sliding.reach(*outputs[cut.axis.index])
        start, stop = have[cut.axis.index]
        first = min(max(low, start), stop)
        available = max(0, min(high, stop) - first)  # none where all lies in the padding
        window = window.narrow(cut.dim, first - start, available)
        if available < high - low:
            front = min(max(0, -low), high - low)
            pads = [0, 0] * (window.dim() - 1 - cut.dim) + [front, high - low - available - front]
            window = torch.constant_pad_nd(window, pads)
    return window


def _with_margin(
    window: torch.Tensor, cut_dims: list[CutDim], maps: list[Sliding], ranges: list[Ranges], left: int
) -> torch.Tensor:  # fmt: skip
    """Returns a convolution's result `window` as a part with a margin (`_cut_out`); `cut_dims` are its input's cuts."""
    after = [CutDim(cut.axis, cut.dim, reads(cut.owners, m).owners) for cut, m in zip(cut_dims, maps, strict=True)]
    return _cut_out(window, after, ranges, left)


def _cut_out(window: torch.Tensor, cut_dims: list[CutDim], ranges: list[Ranges], left: int) -> torch.Tensor:
    """Returns the part whose share lies inside `window`, with the window as its margin for `left` more convolutions.

    cut_dims, ranges  the part's cuts, and for each the range of every rank's window
    """
    own = window
    for cut, by_rank in zip(cut_dims, ranges, strict=True):
        start, count = cut.owners.span(cut.axis.index) or (0, 0)
        own = own.narrow(cut.dim, start - by_rank[cut.axis.index][0], count)
    part = placed(own, cut_dims)
    # a tensor made under `inference_mode` counts no versions, so a write into it would go unseen
    if left and isinstance(part, Part) and not part.is_inference():
        part.margin = Margin(window, tuple(cut_dims), tuple(ranges), left, part._version)
    return part


class _NotAlone(Exception):
    """Raised before an operation that is not elementwise, draws random numbers, or writes."""


class _ElementsAlone(TorchDispatchMode):
    """Mode that raises `_NotAlone` before an operation that is not elementwise. `ran`: number of those that were."""

    ran = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        # `prim::device` and the like read a tensor's attributes, on which an exception would be wrong
        if func in _KEPT or func.namespace != "aten":
            return func(*args, **kwargs)
        # the tag says it of most; of others it is tried out on small tensors
        mixes = torch.Tag.pointwise not in func.tags and not is_elementwise(func, args, kwargs)
        if mixes or func._schema.is_mutable or is_random(func):
            raise _NotAlone(f"{func} treats elements together, draws or writes")
        self.ran += 1
        return func(*args, **kwargs)


_KEPT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # by which autograd keeps what it has computed
_DUNDER = {"radd": "add", "rmul": "mul", "truediv": "div"}


@cache
def _may_be_alone(func: Callable) -> bool:
    """Whether a function of torch, by its name, may be an elementwise operation that writes nothing.

    A quick check before windows are cut; `_ElementsAlone` then checks the operations that run.
    """
    name = getattr(func, "__name__", "")
    # what is written in Python calls other functions, which come here one by one; `relu_` writes, `__add__` does not
    if isinstance(func, FunctionType) or (name.endswith("_") and not name.endswith("__")):
        return False
    name = name.strip("_")
    # a name that ATen does not have may do anything
    packet = getattr(torch.ops.aten, _DUNDER.get(name, name), None) if name else None
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def widened(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Returns an elementwise function's result as a part with a margin, computed on its inputs' windows.

    None if it is not elementwise, or its distributed inputs have no margins, or margins of different cuts.
    """
    parts = [arg for arg in args if isinstance(arg, Distributed)]
    margins = [margin for part in parts if (margin := margin_of(part)) is not None]
    if not margins or len(margins) < len(parts) or not _may_be_alone(func):
        return None
    cut_dims = list(margins[0].cut_dims)
    if any(margin.cut_dims != margins[0].cut_dims for margin in margins):
        return None
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()):  # only positional ones are narrowed below
        return None
    if any(part.dim() != parts[0].dim() for part in parts):  # broadcast: a cut dim would be another one in each
        return None
    others = [arg for arg in args if isinstance(arg, torch.Tensor) and not isinstance(arg, Distributed)]
    # a plain tensor with a number for each cell (area weights) would have to be taken at the window's cells
    if any(_spreads(tensor, cut.dim - parts[0].dim()) for tensor in others for cut in cut_dims):
        return None
    ranges = [_common(tuple(margin.ranges[place] for margin in margins)) for place in range(len(cut_dims))]
    windows = iter([_narrowed(margin, ranges) for margin in margins])
    local_args = [
        next(windows) if isinstance(arg, Distributed) else used(arg, cut_dims) if isinstance(arg, torch.Tensor) else arg
        for arg in args
    ]
    try:
        with _ElementsAlone() as mode:
            result = func(*local_args, **kwargs)
    except _NotAlone:
        return None
    spans = [(cut.dim, by_rank[cut.axis.index]) for cut, by_rank in zip(cut_dims, ranges, strict=True)]
    # nothing ran (the function asks for a shape, or hands on what it was given), or the result is no field of windows
    if not mode.ran or not isinstance(result, torch.Tensor) or result.dim() != parts[0].dim():
        return None
    if any(result.shape[dim] != high - low for dim, (low, high) in spans):
        return None
    return _cut_out(result, cut_dims, ranges, min(margin.left for margin in margins))


def _spreads(tensor: torch.Tensor, place: int) -> bool:
    """Whether a plain tensor has size other than one along dim `place`, a negative number."""
    return tensor.dim() >= -place and tensor.shape[place] != 1


@lru_cache(REMEMBERED)
def _common(ranges: tuple[Ranges, ...]) -> Ranges:
    """Returns, for each rank, the range (start, stop) that lies in its windows of all margins.

    ranges  for each margin, every rank's range along one dim
    """
    return tuple((max(low for low, _ in rank), min(high for _, high in rank)) for rank in zip(*ranges, strict=True))


def _narrowed(margin: Margin, ranges: list[Ranges]) -> torch.Tensor:
    """Returns the slice of a margin's window that has this rank's ranges; `ranges`: for each cut dim every rank's."""
    window = margin.window
    for cut, have, wanted in zip(margin.cut_dims, margin.ranges, ranges, strict=True):
        (start, _), (low, high) = have[cut.axis.index], wanted[cut.axis.index]
        window = window.narrow(cut.dim, low - start, high - low)
    return window


MARGINS.append(widened)
