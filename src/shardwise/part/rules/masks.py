"""Elements of a cut tensor that a mask selects: `x[mask]`, `x[mask] = values`; their places: `mask.nonzero()`.

    mask (B, H, W) cut along H over two ranks        owner of each selected element, in the order of (B, H, W)
    sample 0: rank 0 selects 3, rank 1 selects 2     0 0 0 1 1
    sample 1: rank 0 selects 1, rank 1 selects 4     0 1 1 1 1

Each rank selects in its own share. Who owns which element follows from how many each rank selects for every index in
front of the cut dim: these counts are summed over ranks, and nothing else is sent. Python reads them, as torch does in
one process to know how many there are.

Places are indices into the whole tensor. Each rank has those in its own share, and an operation that reads or writes at
them (the tokens of one expert) runs on shares (`rules/indexing`, `rules/scatters`). What has no rule raises `Uncut`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from shardwise.host import has_values, read, to_device
from shardwise.part.cuts import Owners, Uncut
from shardwise.part.gathering import gathered_told
from shardwise.part.known import note_known
from shardwise.part.levels import Distributed
from shardwise.part.moves import reowned, share_as
from shardwise.part.sums import Sum, all_sum, plain
from shardwise.part.tensor import FUNCTIONS, Part, is_part, no_rule, parts_in, rule

MASKS = (torch.bool, torch.uint8)


def is_mask(indices: list) -> bool:
    """Whether an index is one mask and nothing else: `x[mask]`, `x[:, mask]`."""
    used = [i for i in indices if i is not None]
    return len(used) == 1 and used[0].dtype in MASKS


def selected(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `x[mask]` as a part, whether or not the mask covers the cut dim; `args` are x and its indices."""
    x, (place, mask) = args[0], _place(args[1])
    lead, cut = _cut(func, x, mask, place)
    whole = _whole_in_rehearsal(lead, mask)
    theirs = mask
    if place <= cut < place + mask.dim():  # the mask covers the cut dim: each rank selects by its own share of it
        theirs = _seen(lead, share_as(mask, lead, cut - place), cut - place, whole)
    output = func(share_as(x, lead, cut), [*[None] * place, theirs])
    # the mask covers other dims, and selects the same on every rank: the cut dim keeps its owners
    if theirs is mask:
        return lead.with_local(output, cut if cut < place else cut - mask.dim() + 1)
    return lead.with_local(output, place, _owners(lead, theirs, cut - place, whole))


def put(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns x after `x[mask] = values` (or `+=`); values are one number, whole, or cut as `x[mask]` is.

    args  (x, indices, values, accumulate, ...) of ATen's `index_put`
    """
    values, rest = args[2], args[3:]
    x, (place, mask) = args[0], _place(args[1])
    mask = _cut_like(mask, x, place)
    lead, cut = _cut(func, x, mask, place, values)
    if func._schema.is_mutable and not is_part(x):
        raise Uncut(f"{func} writes a cut tensor into one that is not cut alike")
    dim, theirs = values.dim() - (x.dim() - place - mask.dim() + 1), mask  # of the values: the one that was selected
    # the mask covers the cut dim: values lie in the order of what all ranks select, and each takes its own
    if place <= cut < place + mask.dim():
        whole = _whole_in_rehearsal(lead, mask)
        # in a rehearsal a share that was fetched has no values
        theirs = share_as(mask, lead, cut - place)
        theirs = theirs if whole is None else lead.share(whole, cut - place)
        if is_part(values) and values.dim_cut != dim:
            raise Uncut(no_rule(func, parts_in(args)))
        if is_part(values):
            theirs = _seen(lead, theirs, cut - place, whole)
            values = reowned(values, _owners(lead, theirs, cut - place, whole)).local
        # one value for all that is selected is every rank's; of several each rank takes its own
        elif dim >= 0 and values.shape[dim] != 1:
            values = _of_mine(lead, theirs, cut - place, values, dim, whole)
    elif is_part(values) and values.dim_cut == dim + (cut - place if cut < place else cut - place - mask.dim() + 1):
        # the mask covers other dims: values are cut along the tensor's cut dim, in its place among theirs
        values = values.local
    elif is_part(values) or values.numel() != 1:
        raise Uncut(no_rule(func, parts_in(args)))
    output = func(share_as(x, lead, cut), [*[None] * place, theirs], values, *rest, **kwargs)
    return x if func._schema.is_mutable else lead.with_local(output, cut)


@rule("nonzero")
def nonzero(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `mask.nonzero()`, (n, dims) int64, as a part; each rank has the places in its own share of the mask."""
    mask, cut = args[0], args[0].dim_cut
    if not mask.axis.positions:
        raise Uncut(no_rule(func, [mask]))
    if isinstance(mask.local, Distributed):  # an axis further in would have to know both numberings: done whole
        # a rehearsal has no values: true everywhere, the most that there may be
        everywhere = plain(gathered_told(mask, "a mask whose places are asked for"))
        return func(everywhere if mask.axis.rehearsal is None else everywhere == everywhere)
    whole = _whole_in_rehearsal(mask, mask)
    theirs = _seen(mask, mask.local, cut, whole)
    columns = list(func(theirs).unbind(1))
    columns[cut] = to_device(mask.owners.indices(mask.axis.index), theirs.device)[columns[cut]]
    places = mask.with_local(torch.stack(columns, 1), 0, _owners(mask, theirs, cut, whole))
    # of one dim there is one column, and all of its numbers are places along the cut dim
    places.own = mask.owners, cut if mask.dim() > 1 else None
    return places


def _place(indices: list) -> tuple[int, torch.Tensor]:
    """Returns (number of dims of x in front of those that the mask covers, the mask)."""
    place = next(place for place, index in enumerate(indices) if index is not None)
    return place, indices[place]


def _cut(func: Any, x: torch.Tensor, mask: torch.Tensor, place: int, values: Any = None) -> tuple[Part, int]:
    """Returns (the part whose owners cut x, mask and values, the dim of x that is cut).

    place  number of dims of x in front of those that the mask covers
    """
    # the gradient of a selection, whose own input was whole
    if not is_part(x) and not is_part(mask):  # the gradient of what was selected in front of the cut dim, or behind it
        assert isinstance(values, Part)
        # the selected elements themselves are cut, and nothing tells along which of the masked dims
        if values.dim_cut == place:
            raise Uncut(no_rule(func, [values]))
        return values, values.dim_cut if values.dim_cut < place else values.dim_cut + mask.dim() - 1
    lead: Any = x if is_part(x) else mask
    cut = lead.dim_cut if lead is x else lead.dim_cut + place
    # a mask along another dim than what it selects from: an element's rank would differ from its value's
    if is_part(x) and is_part(mask) and mask.dim_cut + place != cut:
        raise Uncut(f"a mask that is cut along another dim than what it selects from ({no_rule(func, [x, mask])})")
    return lead, cut


def _owners(lead: Part, mask: torch.Tensor, cut: int, whole: torch.Tensor | None) -> Owners:
    """Returns the owners of the selected elements, in the order of the whole tensor. Collective.

    lead, mask, cut  the part that is cut alike, this rank's share of the mask, and its cut dim
    whole            the whole mask, in a rehearsal in which it is known; else None
    """
    axis, owners = lead.axis, lead.owners
    if axis.turns:
        raise Uncut("chunks of positions are computed one after the other, and a mask selects in all of them")
    ranked = owners.in_rank_order  # else what ranks select lies between what others do, index by index
    # in order, one count for each rank is enough; else one for each index of the cut dim
    who = np.arange(axis.size) if ranked else owners.array
    mine = np.asarray([axis.index]) if ranked else owners.indices(axis.index)
    over = list(range(cut if ranked else cut + 1, mask.dim()))
    own_counts = plain(mask.bool().sum(over) if over else mask.bool().long()).reshape(-1, len(mine))
    # each rank fills its own columns, and the sum over ranks has all
    table = own_counts.new_zeros(own_counts.shape[0], len(who))
    table[:, torch.from_numpy(mine)] = own_counts
    total = all_sum(table, axis)
    if whole is not None:
        of_each = whole.bool().sum(list(range(cut + 1, whole.dim()))) if cut + 1 < whole.dim() else whole.bool().long()
        counts = of_each.reshape(-1, owners.size).numpy()
        if ranked:
            counts = np.stack([counts[:, owners.indices(rank)].sum(1) for rank in range(axis.size)], 1)
    elif axis.rehearsal is not None:
        sizes = np.asarray(owners.counts) if ranked else np.ones(len(who), dtype=np.int64)
        # not known: as if every element were selected, which is what `_seen` selects
        counts = np.tile(sizes * math.prod(mask.shape[cut + 1 :]), (own_counts.shape[0], 1))
    else:
        counts = np.asarray(read(total, "how many elements a mask selects"), dtype=np.int64)
    return Owners(np.cumsum(counts), np.tile(who, len(counts)), axis.size)


def _of_mine(
    lead: Part, mask: torch.Tensor, cut: int, values: torch.Tensor, dim: int, whole: torch.Tensor | None
) -> torch.Tensor:  # fmt: skip
    """Returns the slice, along `dim`, of whole values that belongs to the elements this rank selects. Collective."""
    owners = _owners(lead, mask, cut, whole)
    if lead.axis.rehearsal is None or whole is not None:
        return owners.take(values, dim, lead.axis.index)
    # a rehearsal does not know how many others select in front of this rank: the first ones stand for its own
    return values.narrow(dim, 0, int(read(plain(mask.bool().sum()), "how many elements a mask selects")))


def _whole_in_rehearsal(lead: Part, mask: Any) -> torch.Tensor | None:
    """Returns the whole mask in a rehearsal in which its values are known (plain, or of the batch); else None."""
    # outside a rehearsal values are read, not known; sums and parts of parts are not whole on this axis
    if lead.axis.rehearsal is None or isinstance(mask, Sum) or (is_part(mask) and isinstance(mask.local, Distributed)):
        return None
    whole = mask.whole_values if isinstance(mask, Distributed) else mask
    return whole if whole is not None and has_values(whole) else None


def _seen(lead: Part, mask: torch.Tensor, dim: int, whole: torch.Tensor | None) -> torch.Tensor:
    """Returns the share `mask`; in a rehearsal this rank's share of `whole`, or, if that is None, a mask of True.

    So tensors that are cut differently (logits, labels) have equal lengths after one selection, and all ranks issue
    the same exchanges.
    """
    if whole is not None:
        return lead.share(whole, dim)
    return mask if lead.axis.rehearsal is None else mask == mask


def masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns `torch.masked_select(input, mask)`, computed as `x[mask]` after broadcasting both to one shape."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return getitem(input.expand(shape), mask.expand(shape))


def getitem(x: torch.Tensor, index: Any) -> torch.Tensor:
    """Returns `x[index]`; a plain mask in `index` is first cut as `x` is."""
    return x[mask_cut_like(x, index)]


def mask_cut_like(x: torch.Tensor, index: Any) -> Any:
    """Returns `index` with its plain mask, if that is its only tensor, cut as `x` is.

    Backward saves the index, so the mask tells it to which rank the gradient of each element belongs.
    """
    indices = index if isinstance(index, tuple) else (index,)
    masks = [i for i, entry in enumerate(indices) if isinstance(entry, torch.Tensor) and entry.dtype in MASKS]
    others = [entry for entry in indices if not isinstance(entry, torch.Tensor)]
    # one mask beside slices; what other indices give is left to the rules of `index`
    if len(masks) != 1 or len(others) != len(indices) - 1 or not all(isinstance(o, slice) or o is ... for o in others):
        return index
    mask, front = indices[masks[0]], indices[: masks[0]]
    # how many dims stand before the mask, an ellipsis included
    place = len(front) if ... not in front else x.dim() - mask.dim() - (len(indices) - masks[0] - 1)
    return (*front, _cut_like(mask, x, place), *indices[masks[0] + 1 :])


def _cut_like(mask: torch.Tensor, x: torch.Tensor, place: int) -> torch.Tensor:
    """Returns a plain mask that covers dims of `x` from `place` on, cut as these are; a distributed one unchanged."""
    if not isinstance(x, Distributed) or isinstance(mask, Distributed):
        return mask
    if not isinstance(x, Part) or not place <= x.dim_cut < place + mask.dim():
        return _cut_like(mask, x.settled_local(), place)
    dim = x.dim_cut - place
    cut = Part(_cut_like(x.share(mask, dim), x.local, place), dim, x.owners, x.axis)
    note_known(cut, mask)
    return cut


for _function in (torch.masked_select, torch.Tensor.masked_select):
    FUNCTIONS[_function] = masked_select


FUNCTIONS[torch.Tensor.__getitem__] = getitem
