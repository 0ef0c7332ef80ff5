"""Rules of whole tensors with some indices replaced (index_fill, slice_scatter): each rank replaces its own.

index_fill, index_copy      as `index_put` along one dim
slice_scatter, select_scatter   a copy, into a slice of which is written
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.cuts import Owners, Uncut
from shardwise.part.moves import dealt_as
from shardwise.part.tensor import is_part, no_rule, parts_in, rule


@rule("index_fill", "index_fill_", "index_copy", "index_copy_")
def index_replaced(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns x with values at some indices of a dim: a number for all, or a tensor of those indices."""
    x, dim, places, values = args
    dim %= x.dim()
    lead = parts_in([x, values])[0]
    along = is_part(x) and x.dim_cut == dim and x.axis.positions
    writes = func._schema.is_mutable
    # a whole tensor would be written by each rank at its own share of the values alone
    if parts_in([places]) or (writes and lead is not x):
        raise Uncut(no_rule(func, parts_in(args)))
    if along:
        # along the cut dim each rank puts those that it owns
        values = values if isinstance(values, torch.Tensor) else torch.tensor(values)
        put = torch.ops.aten.index_put_ if writes else torch.ops.aten.index_put
        return put.default(x, [None] * dim + [places], values.to(x.dtype))
    if lead.dim_cut == dim:
        raise Uncut(no_rule(func, parts_in(args)))

    def mine(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or not each.dim():
            return each
        cut = lead.dim_cut
        return dealt_as(each, lead, cut, str(func)).local if is_part(each) else lead.share(each, cut)

    made = func(mine(x), dim, places, mine(values))
    return x if writes else lead.with_local(made)


@rule("slice_scatter", "select_scatter")
def slice_replaced(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns a copy of x with values in a slice, or at one index, of a dim."""
    x, values, dim, start, end, step = _slice_of(func, *args, **kwargs)
    if not is_part(x):  # zeros into which tiles are put
        along = values.dim_cut
        owners = values.owners if along != dim else Owners.blocks(x.shape[dim], values.axis.size)
        x = values.with_local(owners.take(x, along, values.axis.index), along, owners)
    copy = x.clone()
    # a slice is a view of the copy's shares, so what is written there is in the copy
    if step == 1:
        torch.ops.aten.slice.Tensor(copy, dim, start, end).copy_(values)
        return copy
    places = torch.arange(start, end, step, device=x.device)
    return torch.ops.aten.index_copy.default(copy, dim, places, values)


def _slice_of(func: Any, x: Any, values: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> tuple:
    """Returns (x, values of the slice, its dim, start, end, step)."""
    dim %= x.dim()
    if func._schema.name == "aten::select_scatter":
        index = start % x.shape[dim]
        return x, values.unsqueeze(dim), dim, index, index + 1, 1
    return x, values, dim, *slice(start, end, step).indices(x.shape[dim])
