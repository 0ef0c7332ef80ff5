"""Views by a shape, by strides, and of complex numbers as pairs; owners and labels are regrouped as elements are.

If shares of the cut dim are no shares of one dim of the view, positions are re-dealt or gathered; other cuts raise
`Uncut`. Transposes and the like: dim_order.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise.layout.view_dims import groups
from shardwise.part.cuts import Owners, Uncut, group_size, in_whole_groups, of_other_rows, regrouped, runs_of
from shardwise.part.exchanges import fetch
from shardwise.part.gathering import gathered, gathered_told
from shardwise.part.labels import Axes, Merged, base, is_free, label, param_of, slim
from shardwise.part.levels import Distributed, ViewOf
from shardwise.part.moves import reowned
from shardwise.part.sums import Sum
from shardwise.part.tensor import Part, in_backward, no_rule, rule
from shardwise.part.whole_view import WHOLE, WholeView, factors_of, goal_of


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "_reshape_copy")
def view(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.view(shape)`; positions that cannot stay cut are re-dealt, or gathered as a `Sum` that refuses writes.

    Collective in these two cases. Raises `Uncut` if it would have to move a cut of weights.
    """
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
            whole_field = gathered_told(part, "what views make of a field that one rank alone has")
            return Sum.read_only(whole_field.reshape(shape), part.axis)
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
    """Returns (cut dim, owners) of a view of the part to `shape`; raises `Uncut` if it cannot stay cut."""
    return regrouped(tuple(part.shape), part.dim_cut, part.owners, shape, goal_of(part, whole))


def _with_some_for_all(part: Part, whole: WholeView) -> Part | None:
    """Returns the part, re-dealt so that every rank has indices if the view joins dims cut by two axes (collective).

    A rank without indices could not tell later which of the joined dims the inner axis cut. None if there are fewer
    indices than ranks, or both axes cut one dim that the view rearranges.
    """
    inner = part.local
    # every rank has indices, or one axis alone cuts: nothing to do
    if 0 not in part.owners.counts or not isinstance(inner, Part) or 0 in whole.before:
        return part
    if not inner.axis.positions or not part.axis.positions:  # cuts of weights stay as they were derived
        return part
    run, to = whole.run(part.dim_cut)
    if inner.dim_cut == part.dim_cut:
        return part if len(run) == len(to) == 1 else None
    if inner.dim_cut not in run or len(to) >= len(run):  # the view does not join the two cut dims
        return part
    if part.owners.size < part.axis.size:
        return None
    return reowned(part, Owners.blocks(part.owners.size, part.axis.size))


def _in_whole_groups(part: Part, whole: WholeView) -> Part | None:
    """Returns the part re-dealt so that each index of the view's cut dim lies whole on one rank. Collective.

    None if all indices form one group. Called while an `Uncut` is handled, which it raises again if the cut is not of
    positions, or an outer axis cuts the dim too.
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
    """Returns a view that changes the length of rows (relative scores (S, S + 1) to (S + 1, S)), as a part. Collective.

    The elements of a rank's new rows are in its own old rows, except at both ends, where it fetches old rows of others.
    None if the cut dim is not the outermost of those that the view rearranges, or other axes cut it too.
    """
    run, to = whole.run(part.dim_cut)
    # else a rank's rows do not lie end to end in the whole, and new ones are no runs of old ones
    if whole.outer or isinstance(part.local, Distributed) or any(whole.before[d] > 1 for d in run if d < part.dim_cut):
        return None
    dim = next((d for d in to if whole.after[d] > 1), None)
    # an empty dim has no rows to move
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
    """Returns `view_as_real`, `view_as_complex` or the conjugate of a part; lazy conjugates are materialised.

    A message sends memory, in which a lazy conjugate does not show.
    """
    part = args[0]
    local = part.local
    if func._schema.name == "aten::view_as_complex":
        if part.dim_cut == part.dim() - 1:
            raise Uncut(f"the two parts of complex numbers lie on different ranks ({no_rule(func, [part])})")
        local = local.contiguous()  # pairs must lie side by side in each rank's memory
    return part.with_local(func(local).resolve_conj().resolve_neg())


@rule("as_strided")
def as_strided(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.as_strided(...)`, by slices and selects if it amounts to these; else, in backward alone, gathered."""
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
    """Returns (a slice or an int for each dim of x, x's dim for each dim of the view, None for a new one of size 1).

    None if the strided view is no combination of slices, selects and permuted dims.
    """
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
    """Returns `part[index]` with its dims in the order `dims`, the results of `_indices_of`."""
    # from the last dim on, so that a dim that a select drops does not move those in front
    for d, each in reversed(list(enumerate(index))):
        if isinstance(each, int):
            part = torch.ops.aten.select.int(part, d, each)
        # a slice of everything is skipped: it would be one operation more in every rehearsal
        elif each != slice(0, part.shape[d], 1):
            part = torch.ops.aten.slice.Tensor(part, d, each.start, each.stop, each.step)
    kept = [d for d, each in enumerate(index) if isinstance(each, slice)]
    turned = [kept.index(d) for d in dims if d is not None]
    # strides may swap dims: the view's order decides
    part = part if turned == sorted(turned) else torch.ops.aten.permute.default(part, turned)
    for o in [o for o, d in enumerate(dims) if d is None]:
        part = torch.ops.aten.unsqueeze.default(part, o)
    return part


def relabel(labels: np.ndarray, before: tuple[int, ...], after: tuple[int, ...]) -> np.ndarray:
    """Returns the labels after a view from shape `before` to `after`, with size one along dims without labels."""
    out = labels
    place = 0
    for run, to in groups(before, after):
        sizes = out.shape[place : place + len(run)]
        width = len(to)
        # no labels along this run of dims, so no elements to follow
        if all(size == 1 for size in sizes):
            shape = (*out.shape[:place], *([1] * width), *out.shape[place + len(run) :])
        else:
            # labels that vary along one dim of the run: one for each element, to be regrouped as elements are
            full = tuple(before[d] for d in run)
            out = np.broadcast_to(out, (*out.shape[:place], *full, *out.shape[place + len(run) :]))
            shape = (*out.shape[:place], *(after[d] for d in to), *out.shape[place + len(run) :])
        out = out.reshape(shape)
        place += width
    return slim(out)


@label(
    "view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "squeeze", "unsqueeze", "squeeze_", "unsqueeze_"
)
def view_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels a view by its input's labels, regrouped as the dims are. Always True."""
    x = args[0]
    # a view that leaves a weight's dims whole is one of the weight still
    if param_of(x) is not None:
        kept = _param_view(axes, x, output)
        if kept is not None:
            output._axes_of = kept
            return True
    labels = axes.labels(x)
    if labels is not None and x.numel():  # without elements the shapes do not say how dims are regrouped
        axes.give(output, relabel(labels, tuple(x.shape), tuple(output.shape)))
    return True


def _param_view(axes: Axes, x: torch.Tensor, output: torch.Tensor) -> Any:
    """Returns (name, dims) of a parameter's view that drops or adds dims of size one, or merges dims; else None."""
    name, dims = param_of(x)  # type: ignore[misc]
    dims_after: list[Any] = []
    inner_dims: list[Any] = []
    for run, to in groups(tuple(x.shape), tuple(output.shape)):
        long = [d for d in run if x.shape[d] > 1]
        outs = [d for d in to if output.shape[d] > 1]
        # a dim that a view splits is no dim of the parameter any more
        if len(outs) > 1 or (len(long) > 1 and any(dims[d] is None for d in long)):
            return None
        entry: Any = dims[long[0]] if long else None
        if len(long) > 1:
            inner = math.prod(x.shape[d] for d in long[1:])
            entry = Merged(base(entry), (entry.repeat if isinstance(entry, Merged) else 1) * inner)
            inner_dims += [dims[d] for d in long[1:]]
        dims_after += [entry if output.shape[d] > 1 else None for d in to]
    for entry in inner_dims:
        axes.keep_whole(axes.vector(name, entry), "a view merges it into an outer dim")
    return name, tuple(dims_after)


@label("view_as_complex")
def view_as_complex_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels `view_as_complex(x)`, the labels of real and imaginary part of a number united. Always True."""
    x = args[0]
    if (param := param_of(x)) is not None:
        name, dims = param
        if dims[-1] is not None:
            axes.unite_along(axes.seeds[name, base(dims[-1])], [0])
        output._axes_of = (name, dims[:-1])
        return True
    labels = axes.labels(x)
    if labels is not None:
        axes.give(output, axes.unite_along(labels, [labels.ndim - 1])[..., 0])
        output._axes_free = is_free(x)
    return True


@label("view_as_real")
def view_as_real_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels `view_as_real(x)` as x, its new last dim without labels. Always True."""
    x = args[0]
    if (param := param_of(x)) is not None:
        output._axes_of = (param[0], (*param[1], None))
        return True
    labels = axes.labels(x)
    if labels is not None:
        axes.give(output, labels[..., None])
        output._axes_free = is_free(x)
    return True
