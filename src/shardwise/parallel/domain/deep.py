"""Deep halos (`domain_depth`): one exchange serves several convolutions; rows at borders are computed on two ranks.

    domain_depth=3, kernel 3        tile
    fetched                     3 | 8 | 3      one exchange in place of three
    convolution, ReLU           2 | 8 | 2      beyond the field's edge: the zeros that each convolution pads
    convolution, ReLU           1 | 8 | 1
    convolution                     8          the next one fetches again

A part stays what it is: each index has one owner, and norms, masks, losses and every other operation read that alone.
Beside a part lies its `Margin`: the window out of which the part was cut, and which indices of the field it has. A
convolution that finds enough there sends nothing; an operation that treats each element alone is done on the window,
and the part cut out again; what does anything else reads the part, and ends the chain. Backward is autograd's: the
gradient of a cell of the window comes from what was computed of it, and those of other ranks' cells go back in one
exchange.

Bytes of an exchange: those of all convolutions that it serves, if these are alike; the corners more. Computed twice:
(depth - 1) times what a convolution reads on each side, in the first one, less in each behind it.

What this does not do: know what comes behind a convolution. It fetches for as many of its own kernel as the plan says,
for nothing where a norm follows. Boundaries other than zeros are made by `F.pad`, which reads the part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.parallel.domain.kept import CutDim, kept_apart
from shardwise.parallel.domain.maps import Sliding, reads
from shardwise.parallel.domain.tiles import fetched, opened, placed, used
from shardwise.part import Part
from shardwise.part.cuts import REMEMBERED, Owners
from shardwise.part.levels import Distributed
from shardwise.part.tensor import MARGINS
from shardwise.trace.drawn import is_random
from shardwise.trace.elementwise import is_elementwise

Ranges = tuple[tuple[int, int], ...]  # of each rank, the indices (start, stop) of a dim that it has


@dataclass(frozen=True)
class Margin:
    """The window out of which a part was cut.

    window   this rank's, plain
    found    how the part is cut, the outermost first
    ranges   for each of these cuts: what every rank's window has along the dim
    left     convolutions that it may still serve
    version  of the part, when it was cut out: what is written into the part is not in the window
    """

    window: torch.Tensor
    found: tuple[CutDim, ...]
    ranges: tuple[Ranges, ...]
    left: int
    version: int


def margin_of(tensor: Any) -> Margin | None:
    """Returns a part's margin; None where it has none, or was written into since."""
    margin = tensor.margin if isinstance(tensor, Part) else None
    return margin if margin is not None and margin.version == tensor._version else None


def deepened(
    input: torch.Tensor, along: Mapping[int, Sliding], found: list[CutDim],
    operation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:  # fmt: skip
    """Returns this rank's tile of the operation's result, with a margin; None where none can be had.

    along   by dim: its outputs and what they read; of dims that are missing each output reads its own
    operation  the local one, which pads nothing along the dims that are cut
    """
    depth = min(cut.axis.halo_depth for cut in found)
    if depth == 1 or not _alone(input, found):
        return None
    maps = [along.get(cut.dim, Sliding(cut.owners.size, 1)) for cut in found]
    moves = any(each.extent > 1 or each.stride > 1 for each in maps)
    margin = margin_of(input)
    if margin is not None and margin.left >= moves and margin.found == tuple(found):
        own = zip(found, maps, margin.ranges, strict=True)
        ranges = _each([_computable(cut.owners, m, have) for cut, m, have in own])
        if ranges is not None:
            window = _inside(margin, maps, ranges)
            return _with_margin(operation(window), found, maps, ranges, margin.left - moves)
    ranges = _each([_widened(cut.owners, m, depth - 1) for cut, m in zip(found, maps, strict=True)]) if moves else None
    if ranges is None:
        return None
    window, afar = input, []
    for cut, each, outputs in zip(found, maps, ranges, strict=True):
        if each.extent == each.stride == 1:
            window = opened(window, [cut])
        else:
            wanted = tuple((each.reach(*rank),) for rank in outputs)
            window = fetched(window, cut, wanted)
            afar.append((cut, wanted))
    with kept_apart(window, input, afar):
        output = operation(window)
    return _with_margin(output, found, maps, ranges, depth - 1)


def _each(ranges: list[Ranges | None]) -> list[Ranges] | None:
    """All of them, or None where one is missing."""
    there = [each for each in ranges if each is not None]
    return there if len(there) == len(ranges) else None


def _alone(input: torch.Tensor, found: list[CutDim]) -> bool:
    """Whether a tile is cut in these ways alone."""
    for cut in found:
        if not isinstance(input, Part) or input.axis is not cut.axis:
            return False
        input = input.local
    return not isinstance(input, Distributed)


@lru_cache(REMEMBERED)
def _widened(owners: Owners, along: Sliding, more: int) -> Ranges | None:
    """The outputs of each rank and those around them that `more` convolutions alike read; None with an empty tile."""
    after = reads(owners, along).owners
    front, behind = more * along.before, more * (along.extent - 1 - along.before)
    if not owners.in_rank_order or not all(owners.counts) or not all(after.counts) or behind < 0:
        return None
    spans = [after.span(rank) or (0, 0) for rank in range(after.ranks)]
    return tuple((max(0, start - front), min(after.size, start + count + behind)) for start, count in spans)


@lru_cache(REMEMBERED)
def _computable(owners: Owners, along: Sliding, have: Ranges) -> Ranges | None:
    """The outputs that each rank can compute of the inputs it has; None where some rank's own are not among them."""
    after, found = reads(owners, along).owners, []
    for rank, (low, high) in enumerate(have):
        start, count = after.span(rank) or (0, 0)
        first = 0 if low <= 0 else -(-(low + along.before) // along.stride)
        last = after.size if high >= owners.size else (high + along.before - along.extent) // along.stride + 1
        if not count or first > start or last < start + count:
            return None
        found.append((first, last))
    return tuple(found)


def _inside(margin: Margin, maps: list[Sliding], ranges: list[Ranges]) -> torch.Tensor:
    """What these outputs read, out of the margin's window; zeros beyond the field's edges."""
    window = margin.window
    for cut, each, have, outputs in zip(margin.found, maps, margin.ranges, ranges, strict=True):
        low, high = each.reach(*outputs[cut.axis.index])
        start, stop = have[cut.axis.index]
        first = min(max(low, start), stop)
        held = max(0, min(high, stop) - first)  # none where all lies in the padding
        window = window.narrow(cut.dim, first - start, held)
        if held < high - low:
            front = min(max(0, -low), high - low)
            pads = [0, 0] * (window.dim() - 1 - cut.dim) + [front, high - low - held - front]
            window = torch.constant_pad_nd(window, pads)
    return window


def _with_margin(
    window: torch.Tensor, found: list[CutDim], maps: list[Sliding], ranges: list[Ranges], left: int
) -> torch.Tensor:  # fmt: skip
    """The part of an operation's outputs, cut out of those that were computed."""
    after = [CutDim(cut.axis, cut.dim, reads(cut.owners, m).owners) for cut, m in zip(found, maps, strict=True)]
    return _cut_out(window, after, ranges, left)


def _cut_out(window: torch.Tensor, found: list[CutDim], ranges: list[Ranges], left: int) -> torch.Tensor:
    own = window
    for cut, each in zip(found, ranges, strict=True):
        start, count = cut.owners.span(cut.axis.index) or (0, 0)
        own = own.narrow(cut.dim, start - each[cut.axis.index][0], count)
    part = placed(own, found)
    if left and isinstance(part, Part) and not part.is_inference():  # such a tensor does not tell that it was written
        part.margin = Margin(window, tuple(found), tuple(ranges), left, part._version)
    return part


class _NotAlone(Exception):
    """An operation treats elements together, draws or writes."""


class _ElementsAlone(TorchDispatchMode):
    """Raises `_NotAlone` before an operation that does not treat each element alone. `ran`: how many did."""

    ran = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _KEPT or func.namespace != "aten":  # questions, to which an error would be no answer
            return func(*args, **kwargs)
        mixes = torch.Tag.pointwise not in func.tags and not is_elementwise(func, args, kwargs)
        if mixes or func._schema.is_mutable or is_random(func):
            raise _NotAlone
        self.ran += 1
        return func(*args, **kwargs)


_KEPT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # by which autograd keeps what it has computed
_DUNDER = {"radd": "add", "rmul": "mul", "truediv": "div"}


@cache
def _may_be_alone(func: Callable) -> bool:
    """Whether a function of torch has the name of an operation that treats each element alone, and writes nowhere."""
    name = getattr(func, "__name__", "")
    if isinstance(func, FunctionType) or (name.endswith("_") and not name.endswith("__")):
        return False
    name = name.strip("_")
    packet = getattr(torch.ops.aten, _DUNDER.get(name, name), None) if name else None
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    return any(torch.Tag.pointwise in each.tags for each in overloads)


def widened(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a function of single elements on parts with their margins; None where it is none, or margins differ."""
    parts = [each for each in args if isinstance(each, Distributed)]
    margins = [margin_of(part) for part in parts]
    first = margins[0] if margins else None
    if first is None or not _may_be_alone(func) or any(isinstance(each, torch.Tensor) for each in kwargs.values()):
        return None
    if any(each is None or each.found != first.found for each in margins):
        return None
    if any(part.dim() != parts[0].dim() for part in parts):
        return None
    others = [each for each in args if isinstance(each, torch.Tensor) and not isinstance(each, Distributed)]
    if any(_spreads(each, cut.dim - parts[0].dim()) for each in others for cut in first.found):
        return None
    known = [each for each in margins if each is not None]
    ranges = [_common(tuple(each.ranges[place] for each in known)) for place in range(len(first.found))]
    windows = iter([_narrowed(each, ranges) for each in known])
    given = [
        next(windows)
        if isinstance(each, Distributed)
        else used(each, list(first.found))
        if isinstance(each, torch.Tensor)
        else each
        for each in args
    ]
    try:
        with _ElementsAlone() as mode:
            found = func(*given, **kwargs)
    except _NotAlone:
        return None
    spans = [(cut.dim, each[cut.axis.index]) for cut, each in zip(first.found, ranges, strict=True)]
    if not mode.ran or not isinstance(found, torch.Tensor) or found.dim() != parts[0].dim():
        return None
    if any(found.shape[dim] != high - low for dim, (low, high) in spans):
        return None
    return _cut_out(found, list(first.found), ranges, min(each.left for each in known))


def _spreads(tensor: torch.Tensor, place: int) -> bool:
    """Whether a plain tensor has several indices along a dim, counted from the last."""
    return tensor.dim() >= -place and tensor.shape[place] != 1


@lru_cache(REMEMBERED)
def _common(each: tuple[Ranges, ...]) -> Ranges:
    """What all of these have, on each rank."""
    return tuple((max(low for low, _ in rank), min(high for _, high in rank)) for rank in zip(*each, strict=True))


def _narrowed(margin: Margin, ranges: list[Ranges]) -> torch.Tensor:
    window = margin.window
    for cut, have, wanted in zip(margin.found, margin.ranges, ranges, strict=True):
        (start, _), (low, high) = have[cut.axis.index], wanted[cut.axis.index]
        window = window.narrow(cut.dim, low - start, high - low)
    return window


MARGINS.append(widened)
