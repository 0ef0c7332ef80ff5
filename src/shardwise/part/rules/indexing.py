"""Reading at indices: `x[i, j]`, `index_select`, `gather`, `take_along_dim`; by masks: masks; writing: scatters.

By plain indices of the cut dim, each entry's owner adds it to a `Sum`. By cut indices, each rank reads at its share of
the indices; along a cut dim it can if they name indices that the rank owns (places that a mask selects).
If tiles hold indices into a field that is cut too, every rank gathers the field, and the run says what that costs.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwise.host import has_values, require, to_device
from shardwise.part.cuts import Owners, Uncut
from shardwise.part.labels import Axes, label
from shardwise.part.levels import Distributed
from shardwise.part.moves import share_as
from shardwise.part.rules.masks import MASKS, getitem, is_mask, selected
from shardwise.part.sums import Sum, plain, reduced, whole_over_axis
from shardwise.part.tensor import FUNCTIONS, Part, is_part, no_rule, parts_in, rule
from shardwise.part.tiles.entire import whole_without_rule
from shardwise.part.tiles.gathers import noted
from shardwise.part.tiles.windows import answers, cuts


def place_of(part: Part, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for global indices of the cut dim, (whether this rank owns each, its place in the share or else 0)."""
    mine = to_device(part.owners.indices(part.axis.index), index.device)
    if not len(mine):
        return torch.zeros_like(index, dtype=torch.bool), torch.zeros_like(index)
    # what is not among this rank's own gets some place that can be read; `owned` says that it counts for nothing
    place = torch.searchsorted(mine, index.contiguous()).clamp_(max=len(mine) - 1)
    owned = mine[place] == index
    return owned, torch.where(owned, place, torch.zeros_like(place))


def check_range(index: torch.Tensor, size: int, what: str, ignored: int | None = None) -> None:
    """Raises `IndexError` if an index lies outside `0..size-1`, as one process would; on a GPU asserts without waiting.

    what  word for the index in the message;  ignored  an index that is allowed although it is outside
    """
    if isinstance(index, Distributed) or not has_values(index) or not index.numel():
        return  # of an index that an axis further in cuts too, to read this would take collectives
    wrong = (index < 0) | (index >= size)
    if ignored is not None:
        wrong = wrong & (index != ignored)
    require(~wrong.any(), lambda: IndexError(f"{what} {int(index[wrong][0])} is out of range: there are {size}"))


def owned_alone(read: torch.Tensor, owned: torch.Tensor) -> torch.Tensor:
    """Returns `read` with zeros where `owned` is False; multiplying by 0 instead would keep inf and NaN."""
    return read.masked_fill(~owned, 0)


def in_own_share(indices: list, dim: int, owners: Owners) -> list | None:
    """Returns `indices` with that of dim `dim` as places in this rank's share; None if it may name other ranks' rows.

    dim, owners  the cut dim and its owners
    """
    named: Any = indices[dim] if dim < len(indices) else None
    if not is_part(named) or not named.names_own(owners):
        return None
    mine = to_device(owners.indices(named.axis.index), named.device)
    own = named.with_local(torch.searchsorted(mine, named.local.contiguous()))
    return [own if d == dim else i for d, i in enumerate(indices)]


def with_one_more(local: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns a share with one index of zeros appended along `dim`, which is read for indices that others own."""
    return torch.ops.aten.constant_pad_nd.default(local, [0, 0] * (local.dim() - 1 - dim) + [0, 1])


@rule("index_select")
def index_select(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.index_select(dim, places)` if x or the places are cut; a `Sum` if x is cut along `dim`."""
    x, dim, places = args
    if is_part(places) and not is_part(x):  # every rank has what is read, and reads it at its own share of the places
        return places.with_local(func(x, dim, places.local), dim % x.dim())
    # the places are this rank's own rows: nothing has to move
    if is_part(x) and (own := in_own_share([None] * (dim % x.dim()) + [places], x.dim_cut, x.owners)):
        return _read_by_own(torch.ops.aten.index.Tensor, x.local, own)
    if is_part(x) and x.dim_cut != dim % x.dim():
        return x.with_local(func(x.local, dim, places))
    # only positions may be picked along their cut dim, by indices that every rank has
    if not is_part(x) or not x.axis.positions or is_part(places):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    return _picked(torch.ops.aten.index.Tensor, x, [None] * x.dim_cut + [places])


@rule("gather")
def gather(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.gather(dim, index)` if x or the index is cut, or both are cut alike; else raises `Uncut`."""
    x, dim, index = args[:3]
    along_dim = dim % x.dim()
    if not is_part(x):
        # along `dim` any entry may be read; along others an entry is read at the index's own place
        source = x if index.dim_cut == along_dim else index.share(x, index.dim_cut)
        return index.with_local(func(source, dim, index.local))
    if x.dim_cut != along_dim:
        return _gathered_by(func, x, dim, index)
    if is_part(index):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    return entries_here(x, x.dim_cut, index)


def _gathered_by(func: Any, part: Part, dim: int, index: torch.Tensor) -> Part:
    """Returns `part.gather(dim, index)` along a dim that is not cut; the index is as long as it along the cut dim."""
    cut = part.dim_cut
    if index.shape[cut] != part.shape[cut]:
        raise Uncut(no_rule(func, [part]))
    return part.with_local(func(part.local, dim, share_as(index, part, cut, func)))


def entries_here(x: Part, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Returns `x.gather(dim, index)` along the cut dim by a plain index, whole on every rank. Collective."""
    check_range(index, x.shape[dim], "index")
    owned, place = place_of(x, index)
    # a rank without indices reads zeros
    local = x.local if x.local.shape[dim] else with_one_more(x.local, dim)
    return reduced(owned_alone(local.gather(dim, place), owned), x)


class _Entries(torch.autograd.Function):
    """Differentiable `x.gather(dim, index)` along the cut dim, in whose backward each rank keeps its own entries."""

    @staticmethod
    def forward(ctx, x: Part, dim: int, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.like, ctx.dim = x.shell(), dim
        return entries_here(x, dim, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        """Returns the gradient of x, cut as it is: each rank's own entries."""
        (index,), x = ctx.saved_tensors, ctx.like
        owned, place = place_of(x, index)
        local = torch.zeros_like(x.local)
        if local.shape[ctx.dim]:
            local.scatter_add_(ctx.dim, place, owned_alone(plain(gradient), owned))
        return x.with_local(local), None, None


def entries_of(x: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Returns `x.gather(dim, index)`; along the cut dim by a plain index as the differentiable `_Entries`."""
    if not is_part(x) or is_part(index) or dim % x.dim() != x.dim_cut or kwargs:
        return torch.gather(x, dim, index, **kwargs)
    return _Entries.apply(x, dim % x.dim(), index)


FUNCTIONS[torch.gather] = FUNCTIONS[torch.Tensor.gather] = entries_of


@rule("index")
def index(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `x[i, j, ...]`; `args` are x and its list of indices, None for a dim that is not indexed."""
    part, indices = args[0], list(args[1])
    # a mask selects a number of elements that differs between ranks
    if is_mask(indices):
        return selected(func, args, kwargs)
    # indices that are this rank's own rows: read where they lie
    if is_part(part) and (own := in_own_share(indices, part.dim_cut, part.owners)):
        return _read_by_own(func, part.local, own)
    used = [d for d, i in enumerate(indices) if i is not None]
    # the cut dim itself is indexed by values: what each rank selects is its own
    if is_part(part) and part.axis.positions and part.dim_cut in used and not parts_in(indices):
        return _picked(func, part, indices)
    # only the indices are cut
    if not is_part(part):
        return _read_by_own(func, part, indices)
    whole = not parts_in(indices) and part.dim_cut not in used
    # torch puts the index's dims in front where the indexed ones are not side by side: the cut dim would move
    contiguous = used == list(range(used[0], used[-1] + 1)) if used else False
    # another cut of the indices, or dims that move: no rule
    if not whole or not contiguous or any(indices[d].dtype is torch.bool for d in used):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    added = torch.broadcast_shapes(*(indices[d].shape for d in used))
    dim = part.dim_cut if part.dim_cut < used[0] else part.dim_cut - len(used) + len(added)
    return part.with_local(func(part.local, indices), dim)


def _read_by_own(func: Any, x: torch.Tensor, indices: list) -> Part:
    """Returns `x[i, j, ...]` of the plain x by cut indices, as a part cut as they are; each rank reads at its share."""
    used = [d for d, i in enumerate(indices) if i is not None]
    lead = parts_in(indices)[0]
    place = lead.dim_cut - lead.dim()
    added = len(torch.broadcast_shapes(*(indices[d].shape for d in used)))
    # where indexed dims are not side by side, torch puts the index's dims in front
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    own = [i if i is None else share_of_index(func, i, lead, place) for i in indices]
    return lead.with_local(func(x, own), first + added + place)


def share_of_index(func: Any, index: torch.Tensor, lead: Part, place: int) -> torch.Tensor:
    """Returns this rank's share of an index tensor, cut as `lead` along dim `place`, which counts from the end (< 0).

    An index that is broadcast along that dim is returned unchanged. Raises `Uncut` for a mask.
    """
    here = index.dim() + place
    if index.dtype in MASKS:
        raise Uncut(no_rule(func, [lead]))
    if is_part(index):
        return share_as(index, lead, here, func)
    return lead.share(index, here) if here >= 0 and index.shape[here] > 1 else index


def _picked(func: Any, part: Part, indices: list) -> torch.Tensor:
    """Returns `part[i, j, ...]` by plain indices, the cut dim among the indexed, as a `Sum` of owners' entries."""
    wanted = indices[part.dim_cut]
    inner = part.local
    cut_again = isinstance(inner, Part) and inner.dim_cut == part.dim_cut  # (tokens of tiles) no row can be appended
    if wanted.dtype is torch.bool:
        raise Uncut(no_rule(func, [part]))
    owned, place = places_of(part, wanted)
    if isinstance(inner, Distributed) and not cut_again:
        # what others own is read as a row of zeros behind this rank's own
        place = torch.where(owned, place, inner.shape[part.dim_cut])
        own = [place if d == part.dim_cut else i for d, i in enumerate(indices)]
        return Sum.of(func(with_one_more(inner, part.dim_cut), own), part.axis, part.origin)
    # a share without indices has no place to read at, not even one to be masked
    if not part.owners.counts[part.axis.index]:
        shape = func(torch.empty(part.shape, device="meta"), [i if i is None else i.to("meta") for i in indices]).shape
        return Sum.of(part.local.new_zeros(shape), part.axis, part.origin)
    entries = func(part.local, [place if d == part.dim_cut else i for d, i in enumerate(indices)])
    used = [d for d, i in enumerate(indices) if i is not None]
    together = used == list(range(used[0], used[-1] + 1))
    after = part.dim() - 1 - used[-1] if together else part.dim() - len(used)
    # what others own was read at a wrong place: it counts as zero in the sum
    owned = torch.broadcast_to(owned, torch.broadcast_shapes(*(indices[d].shape for d in used)))
    return Sum.of(owned_alone(entries, owned.view(*owned.shape, *([1] * after))), part.axis, part.origin)


def places_of(part: Part, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `place_of` of indices that may be negative (count from the end)."""
    return place_of(part, torch.where(wanted < 0, wanted + part.owners.size, wanted))


@answers(torch.Tensor.__getitem__, cut_once=False)
def entries(input: torch.Tensor, index: Any) -> torch.Tensor:
    """Returns `input[index]`; if tensors in `index` are cut, the dims that they index are gathered (collective)."""
    indices = index if isinstance(index, tuple) else (index,)
    # masks select, and have a rule of their own
    parts = [item for item in indices if isinstance(item, Part)]
    by_tiles = any(not part.dtype.is_floating_point and part.dtype not in MASKS for part in parts)
    # rows of the table that it names are its own already
    by_tiles = by_tiles and not (isinstance(input, Part) and any(part.names_own(input.owners) for part in parts))
    return getitem(_readable(input, _dims_read(indices, input.dim())) if by_tiles else input, index)


def _dims_read(index: tuple, dims: int) -> list[int]:
    """Returns the dims, of `dims`, that tensors in `index` index; it may hold slices, ints, None and `...` besides."""
    dims_read, rest = [], sum(item is not None and item is not ... for item in index)
    dim = 0
    for item in index:
        if isinstance(item, torch.Tensor):
            dims_read.append(dim)
        # `...` stands for the dims that nothing else names; None makes a new dim and reads none
        dim += dims - rest if item is ... else item is not None
    return dims_read


def _readable(input: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """Returns a field gathered along these dims, and notes each gathering for the user (`noted`). Collective."""
    for cut in reversed(cuts(input, dims)):
        noted("a field that is read at places of tiles", input, cut)
        input = whole_over_axis(input, cut.axis)
    return input


@answers(torch.index_select, torch.Tensor.index_select, cut_once=False)
def index_select_of_tiles(input: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Returns `torch.index_select` along a dim that may be cut, by an index that may be."""
    own = isinstance(input, Part) and isinstance(index, Part) and index.names_own(input.owners)
    return torch.index_select(_readable(input, [dim]) if isinstance(index, Part) and not own else input, dim, index)


whole_without_rule("take_along_dim")


@answers(torch.gather, torch.Tensor.gather, cut_once=False)
def gather_of_tiles(input: torch.Tensor, dim: int, index: torch.Tensor, **options: Any) -> torch.Tensor:
    """Returns `torch.gather` along a dim that may be cut, by an index that may be."""
    along = isinstance(index, Part) and bool(cuts(index, [dim]))
    return entries_of(_readable(input, [dim]) if along else input, dim, index, **options)


@label("gather")
def gather_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Whether x of `x.gather(dim, index)` may be cut: it has no labels, or along `dim` alone and the index has none."""
    labels = axes.labels(args[0])
    if labels is None or axes.labels(args[2]) is not None:
        return labels is None
    return all(n == 1 for d, n in enumerate(labels.shape) if d != args[1] % args[0].dim())
