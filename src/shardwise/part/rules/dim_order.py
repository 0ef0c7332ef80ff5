"""Operations that reorder, add, drop or repeat dims: transposes, permutations, (un)squeezing, expanding, repeating.

The result is cut along the dim that the cut dim becomes. Nothing is sent, unless a cut dim of size one is dropped or
expanded.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwise.part.cuts import Uncut, tiled
from shardwise.part.gathering import gathered
from shardwise.part.labels import Axes, label, param_of, rearranged
from shardwise.part.rules.slices import one_of_many
from shardwise.part.sums import Sum
from shardwise.part.tensor import RESHAPES, Part, facts, no_rule, reshaped_in_place, rule


@rule("transpose")
def transpose(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `x.transpose(a, b)`."""
    part = args[0]
    a, b = (d % part.dim() for d in args[1:3])
    swapped = {a: b, b: a}
    made = part.with_local(part.local.transpose(a, b), swapped.get(part.dim_cut, part.dim_cut))
    return _lying(made, part, [swapped.get(d, d) for d in range(part.dim())])


def _lying(made: Part, part: Part, dims: list[int]) -> Part:
    """Sets `made.whole_strides` to those of `part`'s dims `dims`, which its share may not show; returns `made`."""
    made.whole_strides = tuple(part.whole_strides[d] for d in dims)
    return made


@rule("t", "numpy_T")
def t(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the transpose of a matrix, cut along the other dim."""
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
    """Returns x, the same object, turned into the part that `transpose` or the like gives (`transpose_(x, a, b)`).

    torch's recurrent layers with `batch_first` end so.
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
    """Returns `squeeze(x)`, `squeeze(x, dim)` or `squeeze(x, dims)`, decided by the whole tensor's sizes."""
    part = args[0]
    asked = range(part.dim()) if len(args) < 2 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = sorted({d % part.dim() for d in asked if part.shape[d] == 1}, reverse=True)
    if part.dim_cut in gone and part.axis.positions:  # one index, which one rank has
        one = one_of_many(part, part.dim_cut, 0)
        for d in gone:
            # the cut dim is gone already, and those behind it have moved up
            one = one if d == part.dim_cut else one.squeeze(d - (d > part.dim_cut))
        return one
    if part.dim_cut in gone:  # of weights: the index would have to go to every rank
        raise Uncut(no_rule(func, [part]))
    local = part.local
    for d in gone:
        local = local.squeeze(d)
    return part.with_local(local, part.dim_cut - sum(d < part.dim_cut for d in gone))


@rule("expand", "expand_copy")
def expand(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.expand(sizes)`: dims of size 1 are repeated, a cut dim keeps its owners."""
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
    """Returns `x.repeat(times)`, the owners of the cut dim repeated as its indices are."""
    part, times = args[0], list(args[1])
    dim = part.dim_cut + len(times) - part.dim()
    owners = tiled(part.owners, times[dim])
    return part.with_local(part.local.repeat(times), dim, owners)


label("transpose", "t", "numpy_T", "permute")(rearranged)


@label("expand", "expand_copy")
def expand_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels `x.expand(sizes)`; repeated elements have the label of the element that they repeat. Always True."""
    x = args[0]
    # a weight's matrix that gets dims in front, and repeats none of its own, stays known as that weight
    if param_of(x) is not None and x.dim() > 1:
        name, dims_of_param = param_of(x)  # type: ignore[misc]
        if all(a == b for a, b in zip(x.shape, output.shape[output.dim() - x.dim() :], strict=True)):
            output._axes_of = (name, (*([None] * (output.dim() - x.dim())), *dims_of_param))
            return True
    labels = axes.labels(x)
    if labels is not None:
        axes.give(output, labels.reshape([1] * (output.dim() - labels.ndim) + list(labels.shape)))
    return True


@label("repeat")
def repeat_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels `x.repeat(times)`: labels are repeated as the elements are. Always True."""
    x, times = args[0], list(args[1])
    labels = axes.labels(x)
    if labels is not None:
        labels = labels.reshape([1] * (len(times) - labels.ndim) + list(labels.shape))
        axes.give(output, np.tile(labels, [n if labels.shape[d] > 1 else 1 for d, n in enumerate(times)]))
    return True
