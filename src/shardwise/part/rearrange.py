"""Rules of flips, rolls, pads, sorts, topk, diagonals, index, scatter. Scans: scans. Labels: axis_rules/reductions."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.host import to_device
from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gathered, reduced
from shardwise.part.levels import Distributed
from shardwise.part.loss import added_here, entries_here, with_one_more
from shardwise.part.masks import MASKS, is_mask, put, selected
from shardwise.part.moves import dealt_as, fetch, shown, whole_inside
from shardwise.part.scans import SCANS, scanned, scanned_along
from shardwise.part.sums import Sum
from shardwise.part.tensor import GATHERS, Part, is_part, no_rule, parts_in, rule


@rule("flip", "roll", "constant_pad_nd", "topk", "sort", "argsort", "unfold", "_weight_norm_interface", *SCANS)
def along(func: Any, args: tuple, kwargs: dict) -> Any:
    """Rule of operations that work along some dims: local where these are whole, by case where one is the cut one."""
    part = args[0]
    touched = _touched(func, part, args, kwargs)
    if is_part(part) and part.axis.positions and func._schema.name in ("aten::flip", "aten::roll"):
        # indices are fetched over one axis: tiles that a further axis cuts along this dim are gathered first
        part = whole_inside(part) if part.dim_cut in touched else part
        return _reordered(func, part, args, kwargs)
    if is_part(part) and part.dim_cut in touched and scanned_along(func, part, kwargs):
        return scanned(func, whole_inside(part), kwargs)
    if not is_part(part) or part.dim_cut in touched:
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    output = func(part.local, *args[1:], **kwargs)
    if isinstance(output, tuple):
        return tuple(part.with_local(each) for each in output)
    return part.with_local(output)


@rule("index_select")
def index_select(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of `x.index_select(dim, places)`: places may be cut where x is plain, or plain where x is cut."""
    x, dim, places = args
    if is_part(places) and not is_part(x):  # every rank has what is read, and reads it at its own share of the places
        return places.with_local(func(x, dim, places.local), dim % x.dim())
    if is_part(x) and x.dim_cut != dim % x.dim():
        return x.with_local(func(x.local, dim, places))
    if not is_part(x) or not x.axis.positions or is_part(places):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    return _picked(torch.ops.aten.index.Tensor, x, [None] * x.dim_cut + [places])


@rule("gather")
def gather(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of `x.gather(dim, index)`, where x or the index is cut, or both are cut alike."""
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
    """Returns `gather(x, dim, index)` along a dim that is whole, by an index with an entry for every cut position."""
    cut = part.dim_cut
    if index.shape[cut] != part.shape[cut]:
        raise Uncut(no_rule(func, [part]))
    mine = dealt_as(index, part, cut, str(func)).local if is_part(index) else part.share(index, cut)
    return part.with_local(func(part.local, dim, mine))


def _reordered(func: Any, part: Part, args: tuple, kwargs: dict) -> Part:
    """Returns `flip(x, dims)` or `roll(x, shifts, dims)`, dealt as x: along the cut dim, indices are fetched."""
    n, cut = part.shape[part.dim_cut], part.dim_cut
    listed = args[-1] if len(args) > 1 else kwargs.get("dims", ())
    dims = [d % part.dim() for d in listed]
    shifts = args[1] if func._schema.name == "aten::roll" else [0] * len(dims)
    if len(dims) != len(shifts):  # without dims torch rolls the flattened tensor
        raise Uncut(f"roll of a flattened tensor ({no_rule(func, [part])})")
    local = part.local
    for dim, shift in zip(dims, shifts, strict=True):
        if dim == cut:
            source = tuple((j - shift) % n for j in range(n)) if shift or func._schema.name == "aten::roll" else (
                tuple(reversed(range(n))))  # fmt: skip
            local = fetch(part.with_local(local), shown(part.owners, source))
        else:
            local = torch.roll(local, shift, dim) if func._schema.name == "aten::roll" else local.flip(dim)
    return part.with_local(local)


def _touched(func: Any, part: Any, args: tuple, kwargs: dict) -> set[int]:
    """Returns the dims along which an operation of this file moves, adds or compares indices."""
    n = part.dim() if isinstance(part, torch.Tensor) else 0
    name = func._schema.name.partition("::")[2]
    if name == "constant_pad_nd":
        return {n - 1 - place // 2 for place, width in enumerate(args[1]) if width}
    if name in ("topk", "sort", "argsort"):
        place = 2 if name == "topk" else 1
        dim = args[place] if len(args) > place else kwargs.get("dim", -1)
        return {int(dim) % n}
    if name == "roll":
        dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
        return {d % n for d in dims} if dims else set(range(n))
    if name in ("flip", *SCANS):
        dims = args[1]
        return {d % n for d in ([dims] if isinstance(dims, int) else dims)}
    return set(range(n))


@rule("diagonal")
def diagonal(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.diagonal(offset, dim1, dim2)`; of dims that are cut the field is gathered: a copy, to read."""
    part, options = args[0], dict(zip(("offset", "dim1", "dim2"), args[1:], strict=False)) | kwargs
    dims = {options.get("dim1", 0) % part.dim(), options.get("dim2", 1) % part.dim()}
    if part.dim_cut not in dims:
        place = part.dim_cut - sum(d < part.dim_cut for d in dims)
        return part.with_local(func(part.local, *args[1:], **kwargs), place)
    if not part.axis.positions:
        raise Uncut(no_rule(func, [part]))
    for tell in GATHERS:
        tell("a field of which a diagonal is read", part)
    return Sum.read_only(func(gathered(part), *args[1:], **kwargs), part.axis)


@rule("tril", "triu")
def triangle(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the matrices of the last two dims with zeros above a diagonal, or below it."""
    part, diagonal = args[0], args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    # cut among the batch dims: every matrix is whole
    if part.dim_cut < part.dim() - 2:
        return part.with_local(func(part.local, diagonal))
    rows, columns = (torch.arange(n, device=part.device) for n in part.shape[-2:])
    beyond = columns - rows[:, None] > diagonal if func._schema.name == "aten::tril" else (
        columns - rows[:, None] < diagonal)  # fmt: skip
    return part.with_local(part.local.masked_fill(part.share(beyond, part.dim_cut - part.dim() + 2), 0))


@rule("index")
def index(func: Any, args: tuple, kwargs: dict) -> Part:
    """Rule of `x[i, j, ...]`: local by plain indices of whole dims; masks, cut indices and the cut dim by case."""
    part, indices = args[0], list(args[1])
    if is_mask(indices):
        return selected(func, args, kwargs)
    used = [d for d, i in enumerate(indices) if i is not None]
    if is_part(part) and part.axis.positions and part.dim_cut in used and not parts_in(indices):
        return _picked(func, part, indices)
    if not is_part(part):
        return _read_by_own(func, part, indices)
    whole = not parts_in(indices) and part.dim_cut not in used
    # torch puts the index's dims in front where the indexed ones are not side by side: the cut dim would move
    contiguous = used == list(range(used[0], used[-1] + 1)) if used else False
    if not whole or not contiguous or any(indices[d].dtype is torch.bool for d in used):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    added = torch.broadcast_shapes(*(indices[d].shape for d in used))
    dim = part.dim_cut if part.dim_cut < used[0] else part.dim_cut - len(used) + len(added)
    return part.with_local(func(part.local, indices), dim)


def _read_by_own(func: Any, x: torch.Tensor, indices: list) -> Part:
    """Returns `x[i, j, ...]` of a plain tensor by cut indices, as a part: each rank reads at its share of them."""
    used = [d for d, i in enumerate(indices) if i is not None]
    lead = parts_in(indices)[0]
    place = lead.dim_cut - lead.dim()
    added = len(torch.broadcast_shapes(*(indices[d].shape for d in used)))
    # where indexed dims are not side by side, torch puts the index's dims in front
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    own = [i if i is None else _share_of_index(func, i, lead, place) for i in indices]
    return lead.with_local(func(x, own), first + added + place)


def _share_of_index(func: Any, index: torch.Tensor, lead: Part, place: int) -> torch.Tensor:
    """Returns this rank's share of an index, dealt as `lead`; `place` is the cut dim, counted from the end (< 0)."""
    here = index.dim() + place
    if index.dtype in MASKS:
        raise Uncut(no_rule(func, [lead]))
    if is_part(index):
        return dealt_as(index, lead, here, str(func)).local
    return lead.share(index, here) if here >= 0 and index.shape[here] > 1 else index


def _picked(func: Any, part: Part, indices: list) -> torch.Tensor:
    """Returns `x[i, j, ...]` by plain indices of the cut dim too: a `Sum`, to which each entry's owner adds it."""
    wanted = indices[part.dim_cut]
    inner = part.local
    tokens = isinstance(inner, Part) and inner.dim_cut == part.dim_cut  # of tiles cut along several dims
    if wanted.dtype is torch.bool:
        raise Uncut(no_rule(func, [part]))
    owned, place = _places_of(part, wanted)
    if isinstance(inner, Distributed) and not tokens:
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
    return Sum.of(entries * owned.view(*owned.shape, *([1] * after)), part.axis, part.origin)


@rule("scatter_add", "scatter_add_", "scatter", "scatter_", "scatter_reduce")
def scatter(func: Any, args: tuple, kwargs: dict) -> Part:
    """`scatter(x, dim, index, values)` along a dim that is not cut, where index and values are cut as x is.

    `scatter_add` along the cut dim: each rank adds what falls on its own indices, or what it has of what is added.
    """
    dim = args[1] % args[0].dim()
    lead = parts_in(args)[0]
    cut = lead.dim_cut
    shapes = [t.shape[cut] for t in (args[0], *args[2:]) if isinstance(t, torch.Tensor) and t.dim()]
    changes = func._schema.is_mutable
    adds = func._schema.name == "aten::scatter_add" and not is_part(args[0]) and is_part(args[3])
    if adds and cut == dim and args[2].shape[cut] == args[3].shape[cut]:  # the gradient of what each rank read of it
        lead = args[3]
        index = dealt_as(args[2], lead, cut, str(func)).local if is_part(args[2]) else lead.share(args[2], cut)
        return args[0] + Sum.of(func(torch.zeros_like(args[0]), dim, index, lead.local), lead.axis, lead.origin)
    if cut == dim and func._schema.name.startswith("aten::scatter_add"):
        return _scattered(func, dim, *args[:1], *args[2:])
    if cut == dim or set(shapes) != {lead.shape[cut]} or (changes and not is_part(args[0])):
        raise Uncut(no_rule(func, parts_in(args)))

    def local(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or not each.dim():
            return each
        if not is_part(each):
            return lead.share(each, cut)
        return dealt_as(each, lead, cut, str(func)).local

    output = func(*map(local, args), **kwargs)
    return args[0] if changes else lead.with_local(output)


def _scattered(func: Any, dim: int, x: Any, index: Any, values: Any) -> torch.Tensor:
    """Returns `x.scatter_add(dim, index, values)` along the cut dim, index and values both cut or both plain."""
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


@rule("index_put", "index_put_", "_index_put_impl_")
def index_put(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of `x[i, j, ...] = values`, or `+=`; autograd uses it for the gradient of `x[i, j, ...]`."""
    x, indices, values, *rest = args
    if is_mask(indices):
        return put(func, args, kwargs)
    if is_part(x) and x.axis.positions and not parts_in(indices):
        return _put_by_whole_indices(func, x, indices, values, rest)
    # the cases below give new tensors
    if func._schema.is_mutable:
        raise Uncut(no_rule(func, parts_in(args)))
    if not is_part(x) and not is_part(values):  # the gradient of what all ranks read at one place
        return func(x, [gathered(i) if is_part(i) else i for i in indices], values, *rest)
    added_up = _put_of_each(func, x, indices, values, rest)
    if added_up is not None:
        return added_up
    used = [d for d, i in enumerate(indices) if i is not None]
    if parts_in(indices) or used != list(range(used[0], used[-1] + 1)) or not is_part(values):
        raise Uncut(no_rule(func, parts_in(args)))
    added = len(torch.broadcast_shapes(*(indices[d].shape for d in used)))
    if values.dim() != x.dim() - len(used) + added or used[0] <= values.dim_cut < used[0] + added:
        raise Uncut(no_rule(func, parts_in(args)))
    dim = values.dim_cut if values.dim_cut < used[0] else values.dim_cut - added + len(used)
    local = dealt_as(x, values, dim, str(func)).local if is_part(x) else values.share(x, dim)
    return values.with_local(func(local, indices, values.local, *rest, **kwargs), dim)


def _put_by_whole_indices(func: Any, x: Part, indices: list, values: torch.Tensor, rest: list) -> Part:
    """Returns x with `x[i, j, ...] = values` by plain indices: each rank writes the entries of its own share."""
    used = [d for d, i in enumerate(indices) if i is not None]
    together = used == list(range(used[0], used[-1] + 1))
    if not together or any(indices[d].dtype in MASKS for d in used):
        raise Uncut(no_rule(func, parts_in([x, values])))
    put, cut = torch.ops.aten.index_put.default, x.dim_cut
    if cut in used:
        if is_part(values):
            for tell in GATHERS:
                tell("what is written at indices of a cut dim", values)
            values = gathered(values)
        owned, place = _places_of(x, indices[cut])
        # what others own is written into one row more, which is dropped
        place = torch.where(owned, place, x.local.shape[cut])
        own = [place if d == cut else i for d, i in enumerate(indices)]
        filled = put(with_one_more(x.local, cut), own, values, *rest).narrow(cut, 0, x.local.shape[cut])
    else:
        added = len(torch.broadcast_shapes(*(indices[d].shape for d in used)))
        dim = cut if cut < used[0] else cut - len(used) + added
        dim -= x.dim() - len(used) + added - values.dim()  # among those of the values
        if is_part(values):
            values = dealt_as(values, x, dim, str(func)).local
        elif dim >= 0 and values.shape[dim] != 1:
            values = x.share(values, dim)
        filled = put(x.local, indices, values, *rest)
    if not func._schema.is_mutable:
        return x.with_local(filled)
    x.local.copy_(filled)
    return x


def _places_of(part: Part, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (whether this rank owns each wanted index of the cut dim, its place among its own); negative ones too."""
    mine = to_device(part.owners.indices(part.axis.index), wanted.device)
    wanted = torch.where(wanted < 0, wanted + part.owners.size, wanted)
    if not len(mine):
        return torch.zeros_like(wanted, dtype=torch.bool), torch.zeros_like(wanted)
    place = torch.searchsorted(mine, wanted.contiguous()).clamp_(max=len(mine) - 1)
    return mine[place] == wanted, place


def _put_of_each(func: Any, x: Any, indices: list, values: Any, rest: list) -> torch.Tensor | None:
    """Returns x plus the sum over ranks of their values at `[..., i, j, ...]`, cut along a dim of the indices.

    None where it is something else. Of nodes read for each cell, (N,)[(cells, neighbours)], this is the gradient.
    """
    used = [d for d, i in enumerate(indices) if i is not None]
    # without `accumulate` values replace each other, and a sum over ranks would add them
    if rest[:1] != [True] or is_part(x) or not is_part(values):
        return None
    added = len(torch.broadcast_shapes(*(indices[d].shape for d in used)))
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    place = values.dim_cut - first - added  # of the cut dim among those of the indices, from the last one
    if not -added <= place < 0 or values.dim() != x.dim() - len(used) + added:
        return None

    own = [None if index is None else _share_of_index(func, index, values, place) for index in indices]
    return x + Sum.of(func(torch.zeros_like(x), own, values.local, True), values.axis, values.origin)


@rule("index_add", "index_add_")
def index_add(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of `x.index_add(dim, index, source)`: along the source's cut dim a sum over ranks, along others local.

    Where every rank has all rows that are added, each keeps those of its own indices of x.
    """
    x, dim, index, source = args
    dim = dim % x.dim()
    if func._schema.is_mutable or not parts_in([source, x]):
        raise Uncut(no_rule(func, parts_in(args)))
    if not is_part(source) and not is_part(index) and dim == x.dim_cut:
        added = func(torch.zeros(x.shape, dtype=x.dtype, device=x.device), dim, index, source, **kwargs)
        return x + x.with_local(x.share(added, dim))
    if not is_part(source):
        raise Uncut(no_rule(func, parts_in(args)))
    cut = source.dim_cut
    if dim == cut and not is_part(x):
        mine = index.local if is_part(index) else source.share(index, 0)
        return x + Sum.of(func(torch.zeros_like(x), dim, mine, source.local, **kwargs), source.axis, source.origin)
    if dim == cut or is_part(index) or (is_part(x) and (x.dim_cut != cut or not x.beside(source))):
        raise Uncut(no_rule(func, parts_in(args)))
    target = x.local if is_part(x) else source.share(x, cut)
    return source.with_local(func(target, dim, index, source.local, **kwargs))
