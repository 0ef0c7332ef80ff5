"""Slices, splits, one index of a dim (`select`), `slice_scatter`, and their gradients.

Of a slice of the cut dim each rank keeps the indices that it owns; nothing is sent. One index of a dim that is cut over
positions is a `Sum` whose only summand is its owner's.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from shardwise.host import to_device
from shardwise.part.cuts import Owners, Uncut, unsliced
from shardwise.part.gathering import gather
from shardwise.part.labels import Axes, label, param_of, rearranged
from shardwise.part.levels import Distributed, ViewOf
from shardwise.part.sums import Sum, reduced
from shardwise.part.tensor import Part, is_part, no_rule, rule

_SLICES = 1 << 16  # slices that are remembered for each axis; the oldest are forgotten


@rule("slice")
def slice_(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `x[start:end:step]` along a dim; along the cut dim each rank keeps the indices that it owns."""
    part, dim, start, end, step = _slice_arguments(*args, **kwargs)
    if dim != part.dim_cut:
        return part.with_local(torch.ops.aten.slice.Tensor(part.local, dim, start, end, step))
    start, end, step = slice(start, end, step).indices(part.shape[dim])
    owners = part.owners.sliced(start, end, step)
    # backward is given the slice's owners and its arguments, not the owners of what was sliced
    _remember(part, (owners, part.shape[dim], start, end, step))
    return part.with_local(_kept(part, dim, start, end, step), dim, owners)


def _before(part: Part) -> OrderedDict[tuple, Owners]:
    """Returns the dict (owners after a slice, size, start, end, step) -> owners before it, of the part's axis.

    It is kept on the `Axis` object, which lives for one run; a longer memory would differ between ranks.
    """
    return vars(part.axis).setdefault("slices_before", OrderedDict())


def _remember(part: Part, key: tuple) -> None:
    """Records the owners of `part`, of which a slice was taken, under `key` (see `_before`)."""
    before = _before(part)
    before[key] = part.owners
    before.move_to_end(key)
    if len(before) > _SLICES:
        before.popitem(last=False)


def _slice_arguments(part: Part, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1):
    dim %= part.dim()
    return part, dim, 0 if start is None else start, part.shape[dim] if end is None else end, step


def _kept(part: Part, dim: int, start: int, end: int, step: int) -> torch.Tensor:
    """Returns the indices of this rank's share that a slice of the cut dim keeps; a view if their steps are equal."""
    _same_way(part.local, dim, part.owners, part.axis.size, start, end, step)
    places = part.owners.local_slice(part.axis.index, start, end, step)
    if not len(places):
        return part.local.narrow(dim, 0, 0)
    if apart := _evenly_apart(places):  # a view, which may be written into
        return torch.ops.aten.slice.Tensor(part.local, dim, int(places[0]), int(places[-1]) + 1, apart)
    return part.local.index_select(dim, to_device(places, part.device))


def _evenly_apart(places: np.ndarray) -> int:
    """Returns the step between consecutive `places`; 0 if it varies, 1 for fewer than two."""
    gaps = np.diff(places)
    if not len(gaps):
        return 1
    return int(gaps[0]) if (gaps == gaps[0]).all() else 0


def _same_way(local: torch.Tensor, dim: int, owners: Owners, ranks: int, start: int, end: int, step: int) -> None:
    """Raises `Uncut` if `local` is cut along `dim` too and, on any rank, the kept indices are not evenly apart.

    All ranks raise alike, because each checks the slice of every rank.
    """
    if isinstance(local, Part) and local.dim_cut == dim and not all(
        _evenly_apart(owners.local_slice(rank, start, end, step)) for rank in range(ranks)
    ):  # fmt: skip
        # of a dim that is cut again, reading by index gives a sum, and a slice gives a part: ranks would differ
        raise Uncut(f"indices are taken out of a dim that is cut over two axes, {local!r} among them")


@rule("slice_backward")
def slice_backward(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the gradient of a slice's source, with the slice's gradient in its place and zeros elsewhere.

    It is cut as the source was, if that is known (`_before`); of positions else by owners that fit the slice.
    """
    part, sizes, dim, start, end, step = args
    dim %= len(sizes)
    local_sizes = list(sizes)
    # the cut dim is not sliced: its shares stay as they are
    if dim != part.dim_cut:
        local_sizes[part.dim_cut] = part.local.shape[part.dim_cut]
        return part.with_local(func(part.local, local_sizes, dim, start, end, step))
    start, end, step = slice(start, end, step).indices(sizes[dim])
    # as it lay before the slice, if that was over this axis in this run
    owners = _before(part).get((part.owners, sizes[dim], start, end, step))
    if owners is None and part.axis.positions:  # dealt anew since, beside something else
        owners = unsliced(part.owners, sizes[dim], start, step)
    if owners is None:
        raise Uncut(no_rule(func, [part]))
    rank = part.axis.index
    local_sizes[dim] = owners.counts[rank]
    _same_way(part.local, dim, owners, part.axis.size, start, end, step)
    # places that are evenly apart are a slice of this rank's own
    places = owners.local_slice(rank, start, end, step)
    if apart := _evenly_apart(places):
        first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        whole = torch.ops.aten.slice_backward(part.local, local_sizes, dim, first, last, apart)
        return part.with_local(whole, dim, owners)
    placed = to_device(places, part.device)
    whole = part.local.new_zeros(local_sizes).index_copy(dim, placed, part.local)
    return part.with_local(whole, dim, owners)


@rule("select")
def select(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.select(dim, index)`; along a cut dim of positions a `Sum` to which its owner adds, else `Uncut`."""
    part, dim, index = args
    dim %= part.dim()
    if dim == part.dim_cut and part.axis.positions:
        return one_of_many(part, dim, index)
    if dim == part.dim_cut:
        raise Uncut(f"one index is taken out of a dim whose indices lie on different ranks ({no_rule(func, [part])})")
    selected = part.with_local(part.local.select(dim, index), part.dim_cut - (dim < part.dim_cut))
    # the column of `nonzero`'s places (numbers, dims) which counts along the cut dim: a rank's places are its own
    if part.own is not None and (dim, index % part.shape[dim]) == (1, part.own[1]):
        selected.own = part.own[0], None
    return selected


def one_of_many(part: Part, dim: int, index: int) -> torch.Tensor:
    """Returns one index of a cut dim for every rank, as a `Sum` to which its owner alone adds."""
    own = local = part.local.settled() if isinstance(part.local, Distributed) else part.local
    if isinstance(local, Part) and local.dim_cut == dim and not local.axis.positions:  # decided before ranks differ
        if not local.may_gather:
            raise Uncut(no_rule(torch.ops.aten.select.int, [part]))
        local = gather(local)
    mine, index = part.owners.indices(part.axis.index), _from_start(index, part.shape[dim])
    place = np.searchsorted(mine, index)
    owned = place < len(mine) and mine[place] == index
    # elsewhere zeros, cut over axes further in as the owner's
    row = local.select(dim, int(place)) if owned else local.narrow(dim, 0, 0).sum(dim).to(part.dtype)
    kept = row.copy_  # writes a changed row back into the owner's share, of which `row` is a view until the next line
    row = row.contiguous()  # laid alike on all ranks: by strides `reshape` views or copies, and a copy takes the sum
    total = Sum.of(row, part.axis, part.origin) if row.is_floating_point() else reduced(row, part)
    source = ViewOf(part, kept if owned else None)
    if not isinstance(total, Distributed):
        total = Sum.taken(total, part.axis, source)
    total.source = source
    if isinstance(total, Sum):
        total.read_only_copy = local is not own  # what was gathered is not where the owner keeps it
    return total


@rule("select_backward")
def select_backward(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the gradient of `select`'s source: the gradient at the selected index, zero at others."""
    part, sizes, dim, index = args
    dim %= len(sizes)
    cut = part.dim_cut + (dim <= part.dim_cut)
    sizes = list(sizes)
    sizes[cut] = part.local.shape[part.dim_cut]
    return part.with_local(func(part.local, sizes, dim, index), cut)


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "split_copy")
def split(func: Any, args: tuple, kwargs: dict) -> list[Part]:
    """Returns the pieces of a split along a dim."""
    part, size = args[0], args[1]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % part.dim()
    n = part.shape[dim]
    sizes = [min(size, n - low) for low in range(0, n, size)] if isinstance(size, int) else list(size)
    pieces, low = [], 0
    for each in sizes:
        pieces.append(slice_(None, (part, dim, low, low + each, 1), {}))
        low += each
    return pieces


@rule("unbind")
def unbind(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Returns a tensor for each index of a dim, by `select`."""
    part = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % part.dim()
    return [select(func, (part, dim, index), {}) for index in range(part.shape[dim])]


@rule("slice_scatter", "select_scatter")
def slice_replaced(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns a copy of x with `values` in a slice, or at one index, of a dim; a whole x is first cut as they are."""
    x, values, dim, start, end, step = _slice_of(func, *args, **kwargs)
    if not is_part(x):  # zeros into which tiles are put
        along = values.dim_cut
        owners = values.owners if along != dim else Owners.blocks(x.shape[dim], values.axis.size)
        x = values.with_local(owners.take(x, along, values.axis.index), along, owners)
    copy = x.clone()
    # a slice is a view of the copy's shares, so what is written there is in the copy; `Uncut` where it is none
    torch.ops.aten.slice.Tensor(copy, dim, start, end, step).copy_(values)
    return copy


def _from_start(index: int, size: int) -> int:
    """Returns the index counted from the first element; raises `IndexError` as torch does."""
    if not -size <= index < size:
        raise IndexError(f"index {index} out of range for tensor of size {size}")
    return index % size


def _slice_of(func: Any, x: Any, values: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> tuple:
    """Returns (x, values, dim, start, end, step) from the arguments of `slice_scatter`, or of `select_scatter`.

    Of the latter `start` is the index, and values get a dim of size one.
    """
    dim %= x.dim()
    if func._schema.name == "aten::select_scatter":
        index = _from_start(start, x.shape[dim])
        return x, values.unsqueeze(dim), dim, index, index + 1, 1
    return x, values, dim, *slice(start, end, step).indices(x.shape[dim])


label("slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")(rearranged)


@label("select", "unbind")
def select_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels `select` and `unbind`; labels that vary along the selected dim alone stay whole. Always True."""
    x = args[0]
    labels = None if param_of(x) is not None and x.dim() > 1 else axes.labels(x)
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.dim()
    if labels is not None and labels.shape[dim] > 1:
        axes.chosen(labels, dim)
    return rearranged(axes, func, args, kwargs, output)
