"""Writing at indices: scatters, `index_put`, `index_add` (other cuts: `Uncut`); by masks: masks; by slices: writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gathered, gathered_told
from shardwise.part.levels import Distributed
from shardwise.part.moves import share_as
from shardwise.part.rules.indexing import (
    check_range,
    in_own_share,
    owned_alone,
    place_of,
    places_of,
    share_of_index,
    with_one_more,
)
from shardwise.part.rules.masks import MASKS, is_mask, put
from shardwise.part.rules.writes import write
from shardwise.part.sums import Sum, reduced
from shardwise.part.tensor import FUNCTIONS, Part, is_part, no_rule, parts_in, rule
from shardwise.part.tiles.entire import done_whole, whole_without_rule
from shardwise.part.tiles.windows import answers


@rule("scatter_add", "scatter_add_", "scatter", "scatter_", "scatter_reduce")
def scatter(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `x.scatter(dim, index, values)` along a dim that is not cut, with index and values cut as x is.

    `scatter_add` works along the cut dim too: plain values are added at the owners of a cut x, cut values to a whole x.
    """
    dim = args[1] % args[0].dim()
    lead = parts_in(args)[0]
    cut = lead.dim_cut
    shapes = [t.shape[cut] for t in (args[0], *args[2:]) if isinstance(t, torch.Tensor) and t.dim()]
    changes = func._schema.is_mutable
    adds = func._schema.name == "aten::scatter_add" and not is_part(args[0]) and is_part(args[3])
    if adds and cut == dim and args[2].shape[cut] == args[3].shape[cut]:  # the gradient of what each rank read of it
        lead = args[3]
        index = share_as(args[2], lead, cut, func)
        return args[0] + Sum.of(func(torch.zeros_like(args[0]), dim, index, lead.local), lead.axis, lead.origin)
    # added, not replaced: a sum over ranks, or each owner by itself, gives what one process has
    if cut == dim and func._schema.name.startswith("aten::scatter_add"):
        return _scattered(func, dim, *args[:1], *args[2:])
    # entries have to lie beside those of x along the cut dim; a whole target would be written differently on each rank
    if cut == dim or set(shapes) != {lead.shape[cut]} or (changes and not is_part(args[0])):
        raise Uncut(no_rule(func, parts_in(args)))
    output = func(*_shares(func, args, lead), **kwargs)
    return args[0] if changes else lead.with_local(output)


def _shares(func: Any, values: Sequence[Any], lead: Part) -> list[Any]:
    """Returns `values` with this rank's shares of the tensors among them, cut as `lead` is; others unchanged."""
    has_dims = [isinstance(value, torch.Tensor) and value.dim() for value in values]
    return [share_as(value, lead, lead.dim_cut, func) if cut else value
            for value, cut in zip(values, has_dims, strict=True)]  # fmt: skip


def _scattered(func: Any, dim: int, x: Any, index: Any, values: Any) -> torch.Tensor:
    """Returns `x.scatter_add(dim, index, values)` along the cut dim; index and values are both cut, or both plain."""
    if is_part(x) and not parts_in([index, values]):
        return added_here(func, x, dim, index, values)
    if not is_part(index) or not is_part(values) or index.dim_cut != dim or not index.beside(values):
        raise Uncut(no_rule(func, parts_in([x, index, values])))
    empty = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    mine = torch.scatter_add(empty, dim, index.local, values.local)
    # written in place: the others' values have to be in it now, and cannot stay a sum
    if func._schema.is_mutable:
        return x.add_(reduced(mine, values))
    return x + Sum.of(mine, values.axis, values.origin)


def added_here(func: Any, x: Part, dim: int, index: torch.Tensor, values: torch.Tensor) -> Part:
    """Returns `x.scatter_add(dim, index, values)` along the cut dim; each rank adds the plain values that it owns."""
    check_range(index, x.shape[dim], "index")
    owned, place = place_of(x, index)
    local = x.local
    if local.shape[dim]:
        read = values[tuple(slice(n) for n in index.shape)]  # the values may be more than the index names
        local = func(local, dim, place, owned_alone(read, owned))
    return x if func._schema.is_mutable else x.with_local(local)


@rule("index_put", "index_put_", "_index_put_impl_")
def index_put(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns x after `x[i, j, ...] = values`, or `+=` (accumulate); the latter is the gradient of `x[i, j, ...]`.

    args  (x, list of indices, values, accumulate, ...)
    """
    x, indices, values, *rest = args
    if is_mask(indices):
        return put(func, args, kwargs)
    if (put_in_own := _put_in_own(func, x, indices, values, rest)) is not None:
        return put_in_own
    # any rank may name any place of x, so indices that are cut are gathered
    if is_part(x) and x.axis.positions:
        return _put_by_whole_indices(func, x, [gathered(i) if is_part(i) else i for i in indices], values, rest)
    # the cases below give new tensors
    if func._schema.is_mutable:
        raise Uncut(no_rule(func, parts_in(args)))
    if not is_part(x) and not is_part(values):  # the gradient of what all ranks read at one place
        return func(x, [gathered(i) if is_part(i) else i for i in indices], values, *rest)
    added_up = _put_of_each(func, x, indices, values, rest)
    if added_up is not None:
        return added_up
    used = [d for d, i in enumerate(indices) if i is not None]
    # what is left are values cut along one of x's own dims, in the place where indices side by side leave it
    if parts_in(indices) or used != list(range(used[0], used[-1] + 1)) or not is_part(values):
        raise Uncut(no_rule(func, parts_in(args)))
    added = len(torch.broadcast_shapes(*(indices[d].shape for d in used)))
    # values that are broadcast, or cut among the dims of the indices, do not say which rows of x a rank has
    if values.dim() != x.dim() - len(used) + added or used[0] <= values.dim_cut < used[0] + added:
        raise Uncut(no_rule(func, parts_in(args)))
    dim = values.dim_cut if values.dim_cut < used[0] else values.dim_cut - added + len(used)
    local = share_as(x, values, dim, func)
    return values.with_local(func(local, indices, values.local, *rest, **kwargs), dim)


def _put_in_own(func: Any, x: torch.Tensor, indices: list, values: torch.Tensor, rest: list) -> Part | None:
    """Returns x after `x[i, j, ...] = values`, or `+=`, by indices that name rows of the rank that holds them alone.

    None if the indices may name other ranks' rows, or x is cut otherwise. `rest`: (accumulate, ...).
    """
    named = [(d, i) for d, i in enumerate(indices) if is_part(i) and i.own is not None and i.own[0].size == x.shape[d]]
    # written in place into what no rank has cut, the result could not be a part
    if not named or (func._schema.is_mutable and not is_part(x)):
        return None
    (cut, lead), *_ = named
    owners = lead.own[0]
    own = in_own_share(indices, cut, owners)
    # other rows than this rank's own, or a cut otherwise: no rule
    if own is None or (is_part(x) and (x.dim_cut, x.owners) != (cut, owners)):
        return None
    local = x.local if is_part(x) else owners.take(x, cut, lead.axis.index)
    place = lead.dim_cut - lead.dim()  # of the cut dim among those of the indices, from the last one
    shares = [None if i is None else share_of_index(func, i, lead, place) for i in own]
    behind = _dims_behind([d for d, i in enumerate(indices) if i is not None], x.dim())
    at = values.dim() - behind + place
    # values belong to this rank's rows
    if is_part(values):
        values = share_as(values, lead, at, func)
    elif at >= 0 and values.shape[at] != 1:
        values = lead.share(values, at)
    filled = func(local, shares, values, *rest)
    return x if func._schema.is_mutable else lead.with_local(filled, cut, owners)


def _dims_behind(used: list[int], dims: int) -> int:
    """Returns how many dims of `x[i, j, ...]` lie behind those of its indices; `used`: the indexed dims of `dims`."""
    return dims - 1 - used[-1] if used == list(range(used[0], used[-1] + 1)) else dims - len(used)


def _put_by_whole_indices(func: Any, x: Part, indices: list, values: torch.Tensor, rest: list) -> Part:
    """Returns x after `x[i, j, ...] = values`, or `+=`, by plain indices; each rank writes into its own share."""
    used = [d for d, i in enumerate(indices) if i is not None]
    together = used == list(range(used[0], used[-1] + 1))
    if not together or any(indices[d].dtype in MASKS for d in used):
        raise Uncut(no_rule(func, parts_in([x, values])))
    put, cut = torch.ops.aten.index_put.default, x.dim_cut
    if cut in used:
        if is_part(values):
            values = gathered_told(values, "what is written at indices of a cut dim")
        owned, place = places_of(x, indices[cut])
        # what others own is written into one row more, which is dropped
        place = torch.where(owned, place, x.local.shape[cut])
        own = [place if d == cut else i for d, i in enumerate(indices)]
        filled = put(with_one_more(x.local, cut), own, values, *rest).narrow(cut, 0, x.local.shape[cut])
    else:
        added = len(torch.broadcast_shapes(*(indices[d].shape for d in used)))
        dim = cut if cut < used[0] else cut - len(used) + added
        dim -= x.dim() - len(used) + added - values.dim()  # among those of the values
        if is_part(values):
            values = share_as(values, x, dim, func)
        elif dim >= 0 and values.shape[dim] != 1:  # else they are repeated along the cut dim, alike on all ranks
            values = x.share(values, dim)
        filled = put(x.local, indices, values, *rest)
    if not func._schema.is_mutable:
        return x.with_local(filled)
    x.local.copy_(filled)
    return x


def _put_of_each(func: Any, x: Any, indices: list, values: Any, rest: list) -> torch.Tensor | None:
    """Returns the whole x plus a `Sum` over ranks of values that are cut along a dim of the indices (`x[i, j] += v`).

    None for other cases. It is the gradient of a whole x read at cut indices, (N,)[(cells, neighbours)].
    """
    used = [d for d, i in enumerate(indices) if i is not None]
    # without `accumulate` values replace each other, and a sum over ranks would add them
    if rest[:1] != [True] or is_part(x) or not is_part(values):
        return None
    added = len(torch.broadcast_shapes(*(indices[d].shape for d in used)))
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    place = values.dim_cut - first - added  # of the cut dim among those of the indices, from the last one
    # cut along a dim of x itself, or values that are broadcast
    if not -added <= place < 0 or values.dim() != x.dim() - len(used) + added:
        return None

    own = [None if index is None else share_of_index(func, index, values, place) for index in indices]
    return x + Sum.of(func(torch.zeros_like(x), own, values.local, True), values.axis, values.origin)


@rule("index_add", "index_add_")
def index_add(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.index_add(dim, index, source)`: a `Sum` along the source's cut dim, on shares along others.

    If the source is whole, each rank adds the rows that belong to its own indices of x.
    """
    x, dim, index, source = args
    dim = dim % x.dim()
    if func._schema.is_mutable or not parts_in([source, x]):
        raise Uncut(no_rule(func, parts_in(args)))
    if not is_part(source) and is_part(index):  # which of the whole rows a rank would add is not said
        raise Uncut(no_rule(func, parts_in(args)))
    # along x's cut dim rows belong to any rank: each adds all of them to zeros, and keeps its own indices
    if not is_part(source) and dim == x.dim_cut:
        added = func(torch.zeros(x.shape, dtype=x.dtype, device=x.device), dim, index, source, **kwargs)
        return x + x.with_local(x.share(added, dim))
    if not is_part(source):
        return x.with_local(func(x.local, dim, index, x.share(source, x.dim_cut), **kwargs))
    cut = source.dim_cut
    # the index names this rank's rows of x alone: nothing is sent
    if is_part(x) and (own := in_own_share([None] * dim + [index], x.dim_cut, x.owners)):
        rows = own[dim]
        return x.with_local(func(x.local, dim, rows.local, share_as(source, rows, dim, func), **kwargs))
    # each rank has some of the rows: their sum over ranks is added to x, once
    if dim == cut and (not is_part(x) or x.dim_cut == dim):
        mine = share_as(index, source, 0, func)
        zeros = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return x + Sum.of(func(zeros, dim, mine, source.local, **kwargs), source.axis, source.origin)
    # cuts that do not meet: x along another dim than the source, or dealt otherwise; indices that are cut by themselves
    if dim == cut or is_part(index) or (is_part(x) and (x.dim_cut != cut or not x.beside(source))):
        raise Uncut(no_rule(func, parts_in(args)))
    target = x.local if is_part(x) else source.share(x, cut)
    return source.with_local(func(target, dim, index, source.local, **kwargs))


def _into(plain: Callable) -> Callable:
    """Returns the in-place function (`scatter_`) made of `plain`, the one that returns a new tensor (`scatter`)."""

    def answer(target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the target, into which the result of `plain` was copied."""
        result = plain(target.clone(), *args, **kwargs)  # which a gradient may read when the target was written over
        if isinstance(result, Sum):  # the target is to hold the sum over ranks, not this rank's summand
            result = result.settled()
        if isinstance(target, Distributed) or not isinstance(result, Distributed):
            return target.copy_(result)
        write(target, slice(None), result)  # a whole target, tiles for it: it becomes a tile, or they are gathered
        return target

    return answer


done_whole("masked_scatter", "put", "diagonal_scatter")
whole_without_rule("scatter", "scatter_add", "scatter_reduce")
for _name in (
    "index_add", "index_copy", "index_fill", "index_reduce", "masked_scatter", "put", "scatter",
    "scatter_add", "scatter_reduce",
):  # fmt: skip
    _new = getattr(torch.Tensor, _name)
    answers(getattr(torch.Tensor, f"{_name}_"), cut_once=False)(_into(FUNCTIONS.get(_new, _new)))
