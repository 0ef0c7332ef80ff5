"""Rules of views, permutations, concatenation: owners are rearranged alike. Labels: trace/axis_rules/views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise.part.cuts import (
    Owners,
    Uncut,
    group_size,
    in_whole_groups,
    joined,
    of_other_rows,
    regrouped,
    runs_of,
    tiled,
)
from shardwise.part.gathering import gathered
from shardwise.part.levels import Distributed, ViewOf
from shardwise.part.moves import fetch, reowned
from shardwise.part.slices import one_of_many
from shardwise.part.sums import Sum
from shardwise.part.tensor import (
    GATHERS,
    RESHAPES,
    Part,
    facts,
    in_backward,
    is_part,
    no_rule,
    parts_in,
    reshaped_in_place,
    rule,
)
from shardwise.part.whole_view import WHOLE, WholeView, factors_of, goal_of


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "_reshape_copy")
def view(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.view(shape)`, its owners regrouped as the dims are."""
    part = args[0]
    if isinstance(args[1], torch.dtype):
        # the last dim would have more indices or fewer, and owners are those of before
        if args[1].itemsize != part.dtype.itemsize:
            raise Uncut(f"{func} gives a dim another length: {no_rule(func, [part])}")
        return part.with_local(func(part.local, args[1]))
    shape = list(args[1])
    if -1 in shape:
        others = 1
        for size in shape:
            others *= size if size != -1 else 1
        shape[shape.index(-1)] = part.numel() // max(others, 1)
    with WHOLE.of(part, tuple(shape)) as whole:
        dealt = _with_some_for_all(part, whole)
        # however the dim is dealt, some rank has no whole dims of the view (`_with_some_for_all`)
        if dealt is None:
            for tell in GATHERS:
                tell("what views make of a field that one rank alone has", part)
            return Sum.read_only(gathered(part).reshape(shape), part.axis)
        part = dealt
        try:
            dim, owners = _cut_after(part, tuple(shape), whole)
        except Uncut:
            grouped = _in_whole_groups(part, whole)
            rows = _in_other_rows(part, whole, shape) if grouped is None else None
            if rows is not None:
                return rows
            if grouped is None:  # a column, or one window: every rank has it
                return Sum.read_only(gathered(part).reshape(shape), part.axis)
            part = grouped
            dim, owners = _cut_after(part, tuple(shape), whole)
        local = list(shape)
        local[dim] = owners.counts[part.axis.index]
        # axes further in decide by whole shapes where their cut goes, and must know what this one took
        with WHOLE.cut_along(part.dim_cut, dim):
            viewed = part.with_local(part.local.reshape(local), dim, owners)
        viewed.factors = factors_of(part, dim, whole)
    # products read (B * S, K): the sum of theirs can then begin in shares of S
    if part.dim() == 3 and len(shape) == 2 and dim == 1 and part.dim_cut == 2:
        viewed.rows = part.shape[0], part.shape[1]
    return viewed


def _cut_after(part: Part, shape: tuple[int, ...], whole: WholeView) -> tuple[int, Owners]:
    """Returns (dim, owners) of a view of the part. Raises `Uncut`."""
    return regrouped(tuple(part.shape), part.dim_cut, part.owners, shape, goal_of(part, whole))


def _with_some_for_all(part: Part, whole: WholeView) -> Part | None:
    """Returns the part dealt such that every rank has indices, where a view joins dims that two axes cut. Collective.

    A rank without indices would not know later which the inner cut is. None where there are fewer indices than ranks,
    or both axes cut one dim that the view rearranges: what a rank has of it is then no whole dims.
    """
    inner = part.local
    if 0 not in part.owners.counts or not isinstance(inner, Part) or 0 in whole.before:
        return part
    if not inner.axis.positions or not part.axis.positions:
        return part
    run, to = whole.run(part.dim_cut)
    if inner.dim_cut == part.dim_cut:
        return part if len(run) == len(to) == 1 else None
    if inner.dim_cut not in run or len(to) >= len(run):
        return part
    if part.owners.size < part.axis.size:
        return None
    return reowned(part, Owners.blocks(part.owners.size, part.axis.size))


def _in_whole_groups(part: Part, whole: WholeView) -> Part | None:
    """Returns the part dealt such that each index of a view's cut dim lies on one rank as a whole. Collective.

    None where there is one group alone. Called while an `Uncut` is handled, which stands where the cut is not of
    positions.
    """
    if not part.axis.positions:
        raise  # what is being handled
    if part.dim_cut in (before for before, _ in whole.outer):
        raise  # cut further out too
    if part.owners.size == 1:
        return None
    try:
        each = group_size(whole.before, part.dim_cut, whole.after)
    except Uncut:  # none of whole indices
        each = part.owners.size
    return None if each == part.owners.size else reowned(part, in_whole_groups(part.owners, each), each)


def _in_other_rows(part: Part, whole: WholeView, shape: list[int]) -> Part | None:
    """Returns rows seen as rows of another length, as relative scores (S, S + 1) to (S + 1, S). Collective.

    A rank's new rows lie in its old ones but for the first and the last, which it fetches. None where the cut dim is
    not the outermost of those that the view rearranges, or other axes cut them too.
    """
    run, to = whole.run(part.dim_cut)
    if whole.outer or isinstance(part.local, Distributed) or any(whole.before[d] > 1 for d in run if d < part.dim_cut):
        return None
    dim = next((d for d in to if whole.after[d] > 1), None)
    if dim is None or not part.numel():
        return None
    old = math.prod(whole.before[d] for d in run if d > part.dim_cut)
    new = math.prod(whole.after[d] for d in to if d > dim)
    owners = of_other_rows(part.owners, old, new)
    runs = [runs_of(owners, rank) for rank in range(owners.ranks)]
    sources = tuple(tuple((a * new // old, -(-b * new // old)) for a, b in each) for each in runs)
    mine, places = runs[part.axis.index], sources[part.axis.index]
    fetched = fetch(part, sources).split([b - a for a, b in places], part.dim_cut)
    flat = [
        rows.flatten(run.start, run.stop - 1).narrow(run.start, a * new - first * old, (b - a) * new)
        for rows, (a, b), (first, _) in zip(fetched, mine, places, strict=True)
    ]
    local = [*shape[:dim], owners.counts[part.axis.index], *shape[dim + 1 :]]
    none = part.local.new_empty(local)
    return part.with_local(torch.cat(flat, run.start).reshape(local) if flat else none, dim, owners)


@rule("view_as_real", "view_as_complex", "_conj", "resolve_conj", "_neg_view", "resolve_neg", "_conj_physical")
def of_complex(func: Any, args: tuple, kwargs: dict) -> Part:
    """Rule of complex numbers as pairs in a last dim, and back; conjugates are written out, to be sent as memory."""
    part = args[0]
    local = part.local
    if func._schema.name == "aten::view_as_complex":
        if part.dim_cut == part.dim() - 1:
            raise Uncut(f"the two parts of complex numbers lie on different ranks ({no_rule(func, [part])})")
        local = local.contiguous()  # pairs must lie side by side in each rank's memory
    return part.with_local(func(local).resolve_conj().resolve_neg())


@rule("transpose")
def transpose(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `x.transpose(a, b)`."""
    part = args[0]
    a, b = (d % part.dim() for d in args[1:3])
    swapped = {a: b, b: a}
    made = part.with_local(part.local.transpose(a, b), swapped.get(part.dim_cut, part.dim_cut))
    return _lying(made, part, [swapped.get(d, d) for d in range(part.dim())])


def _lying(made: Part, part: Part, dims: list[int]) -> Part:
    """Returns `made`, whose dims are `dims` of `part`, with the memory order of that: a share of one index has none."""
    made.whole_strides = tuple(part.whole_strides[d] for d in dims)
    return made


@rule("t", "numpy_T")
def t(func: Any, args: tuple, kwargs: dict) -> Part:
    """Rule of a matrix's transpose."""
    part = args[0]
    return part.with_local(part.local.t(), 1 - part.dim_cut if part.dim() == 2 else part.dim_cut)


@rule("permute")
def permute(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `x.permute(dims)`."""
    part = args[0]
    dims = [d % part.dim() for d in args[1]]
    return _lying(part.with_local(part.local.permute(dims), dims.index(part.dim_cut)), part, dims)


@rule(*RESHAPES)
def in_place(func: Any, args: tuple, kwargs: dict) -> Part:
    """Rule of `transpose_(x, a, b)` and the like: the object itself becomes the part that `transpose` gives.

    torch's recurrent layers of batch first end so.
    """
    part = args[0]
    made = getattr(part, facts(func).name[:-1])(*args[1:], **kwargs)
    # squeezing the cut dim gives a sum, which no part can become in place
    if not isinstance(made, Part) or made.source is not None:
        raise Uncut(f"{func} of a tensor that is cut leaves one that is not: {part!r}")
    vars(part).update(vars(made))
    return reshaped_in_place(part, func, args, kwargs)


@rule("unsqueeze")
def unsqueeze(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `x.unsqueeze(dim)`."""
    part = args[0]
    dim = args[1] % (part.dim() + 1)
    return part.with_local(part.local.unsqueeze(dim), part.dim_cut + (dim <= part.dim_cut))


@rule("squeeze")
def squeeze(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of `squeeze(x)`, `squeeze(x, dim)`, `squeeze(x, dims)`, by the whole tensor's sizes."""
    part = args[0]
    asked = range(part.dim()) if len(args) < 2 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = sorted({d % part.dim() for d in asked if part.shape[d] == 1}, reverse=True)
    if part.dim_cut in gone and part.axis.positions:  # one index, which one rank has
        one = one_of_many(part, part.dim_cut, 0)
        for d in gone:
            # the cut dim is gone already, and those behind it have moved up
            one = one if d == part.dim_cut else one.squeeze(d - (d > part.dim_cut))
        return one
    if part.dim_cut in gone:
        raise Uncut(no_rule(func, [part]))
    local = part.local
    for d in gone:
        local = local.squeeze(d)
    return part.with_local(local, part.dim_cut - sum(d < part.dim_cut for d in gone))


@rule("expand", "expand_copy")
def expand(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of `expand(x, sizes)`: a dim of one index is repeated, a cut one stays."""
    part, sizes = args[0], list(args[1])
    dim = part.dim_cut + len(sizes) - part.dim()
    if sizes[dim] not in (-1, part.owners.size):
        if part.axis.positions and part.owners.size == 1:  # one index, which all ranks then have
            return Sum.read_only(gathered(part).expand(sizes), part.axis)
        raise Uncut(no_rule(func, [part]))
    sizes[dim] = -1
    return part.with_local(part.local.expand(sizes), dim)


@rule("repeat")
def repeat(func: Any, args: tuple, kwargs: dict) -> Part:
    """Rule of `repeat(x, times)`: the owners of the cut dim are repeated as its indices are."""
    part, times = args[0], list(args[1])
    dim = part.dim_cut + len(times) - part.dim()
    owners = tiled(part.owners, times[dim])
    return part.with_local(part.local.repeat(times), dim, owners)


@rule("as_strided")
def as_strided(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule, in backward alone, of the gradient of a whole tensor into which parts were written."""
    part, sizes, strides, offset = args[0], args[1], args[2], args[3] if len(args) > 3 else 0
    # strides that amount to slices and single indices, which have rules of their own
    if (found := _indices_of(part, sizes, strides, offset or 0)) is not None:
        return _taken(part, *found)
    if not part.axis.positions or not in_backward():
        raise Uncut(no_rule(func, [part]))
    whole = gathered(part)
    if whole.stride() != part.stride():  # as the tensor lies in memory whose gradient it is
        whole = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device).copy_(whole)
    kept = Sum.taken(whole, part.axis, ViewOf(part, lambda whole: part.local.copy_(part.share(whole, part.dim_cut))))
    return Sum.taken(func(whole, sizes, strides, offset), part.axis, ViewOf(kept))


def _indices_of(
    part: Part, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> tuple[list[int | slice], list[int | None]] | None:
    """Returns (a slice or index of each dim of x, x's dim of each dim of the view), where strides say so; else None."""
    # without elements or with repeats, strides do not say which dim is which
    if not part.numel() or not math.prod(sizes) or 0 in part.stride():
        return None
    own, rest = part.stride(), offset
    index: list[int | slice] = [0] * part.dim()
    dims: list[int | None] = [None] * len(sizes)
    left = sorted(range(len(sizes)), key=lambda o: (-strides[o], -sizes[o]))
    for d in sorted(range(part.dim()), key=lambda d: (-own[d], -part.shape[d])):
        index[d] = start = rest // own[d] if part.shape[d] > 1 else 0
        rest -= start * own[d]
        # a dim of the view walks along this dim where its stride is a multiple, and stays inside
        for o in left:
            step, odd = divmod(strides[o], own[d])
            stop = start + (sizes[o] - 1) * step + 1
            if not odd and stop <= part.shape[d] and (step or sizes[o] == 1):
                index[d], dims[o] = slice(start, stop, step or 1), d
                left.remove(o)
                break
    return None if rest or any(sizes[o] > 1 for o in left) else (index, dims)


def _taken(part: torch.Tensor, index: list[int | slice], dims: list[int | None]) -> torch.Tensor:
    """Returns the part at slices and indices, its dims in the order `dims` (of the part; None: a new one of size 1)."""
    for d, each in reversed(list(enumerate(index))):
        if isinstance(each, int):
            part = torch.ops.aten.select.int(part, d, each)
        elif each != slice(0, part.shape[d], 1):
            part = torch.ops.aten.slice.Tensor(part, d, each.start, each.stop, each.step)
    kept = [d for d, each in enumerate(index) if isinstance(each, slice)]
    turned = [kept.index(d) for d in dims if d is not None]
    part = part if turned == sorted(turned) else torch.ops.aten.permute.default(part, turned)
    for o in [o for o, d in enumerate(dims) if d is None]:
        part = torch.ops.aten.unsqueeze.default(part, o)
    return part


@rule("cat", "stack")
def cat(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns tensors concatenated along the cut dim or another."""
    tensors = [t for t in args[0] if not (t.dim() == 1 and t.numel() == 0)]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if func._schema.name == "aten::stack":
        tensors = [t.unsqueeze(dim) for t in tensors]
    dim %= tensors[0].dim()
    parts = parts_in(tensors)
    lead = parts[0]
    if lead.dim_cut != dim:
        along = all(p.dim_cut == lead.dim_cut for p in parts)
        # positions are dealt anew; other cuts have to lie beside each other as they are
        if along and lead.axis.positions:
            tensors = [reowned(t, lead.owners) if is_part(t) else t for t in tensors]
        elif not along or any(not p.beside(lead) for p in parts):
            raise Uncut(f"tensors that are cut differently are put together ({no_rule(func, parts)})")
        local = [t.local if is_part(t) else lead.share(t, lead.dim_cut) for t in tensors]
        return lead.with_local(torch.cat(local, dim))
    if len(parts) != len(tensors) or any(p.dim_cut != dim for p in parts):
        if all(p.dim_cut == dim for p in parts) and _like_its_neighbour(tensors, lead, dim):
            tensors = [t if is_part(t) else lead.with_local(lead.share(t, dim)) for t in tensors]
        elif all(p.dim_cut == dim for p in parts) and lead.axis.positions:
            tensors = _with_their_neighbours(tensors, lead, dim)
        else:
            raise Uncut(f"cut and whole tensors are put together along the cut dim ({no_rule(func, parts)})")
    return lead.with_local(torch.cat([p.local for p in tensors], dim), dim, joined(tuple(p.owners for p in tensors)))


def _with_their_neighbours(tensors: list[torch.Tensor], lead: Part, dim: int) -> list[torch.Tensor]:
    """Returns the tensors with whole ones (a class token) as parts, which the first or last rank owns."""
    dealt: list[torch.Tensor] = []
    for place, tensor in enumerate(tensors):
        if not is_part(tensor):
            # behind a cut tensor it is the last rank's, in front of it the first one's
            rank = lead.axis.size - 1 if any(map(is_part, tensors[:place])) else 0
            n = tensor.shape[dim]
            owners = Owners(np.array([n]), np.array([rank]), lead.axis.size)
            tensor = lead.with_local(owners.take(tensor, dim, lead.axis.index), dim, owners)
        dealt.append(tensor)
    return dealt


def _like_its_neighbour(tensors: list[torch.Tensor], lead: Part, dim: int) -> bool:
    """Whether whole tensors have the cut ones' length: undefined gradients of a split, which arrive as zeros."""
    return all(is_part(t) or t.shape[dim] == lead.shape[dim] for t in tensors)
