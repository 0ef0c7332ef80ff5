"""Axis labels of views and concatenation: labels are rearranged as elements are. On shares: part/views."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

from shardwise.layout.views import groups
from shardwise.trace.axes import Axes, Merged, base, param_of
from shardwise.trace.axis_rules.registry import rule, slim


def relabel(labels: np.ndarray, before: tuple[int, ...], after: tuple[int, ...]) -> np.ndarray:
    """Returns the labels after a view of these shapes, with size one along dims that have none."""
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


@rule(
    "view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "squeeze", "unsqueeze", "squeeze_", "unsqueeze_"
)
def view(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of views: labels are regrouped as the shapes are, since elements keep their order."""
    x = args[0]
    if param_of(x) is not None:
        kept = _param_view(axes, x, output)
        if kept is not None:
            output._axes_of = kept
            return True
    labels = axes.labels(x)
    if labels is not None and x.numel():
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


def _permuted(axes: Axes, x: Any, output: Any, dims: list[int]) -> bool:
    if param_of(x) is not None:
        name, dims_of_param = param_of(x)  # type: ignore[misc]
        output._axes_of = (name, tuple(dims_of_param[d] for d in dims))
        return True
    labels = axes.labels(x)
    if labels is not None:
        axes.give(output, labels.transpose(dims))
    return True


@rule("transpose", "t", "numpy_T")
def transpose(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of a transpose: the labels of two dims change places."""
    x = args[0]
    dims = list(range(x.dim()))
    a, b = (d % x.dim() for d in args[1:3]) if len(args) > 2 else (0, x.dim() - 1)
    dims[a], dims[b] = dims[b], dims[a]
    return _permuted(axes, x, output, dims)


@rule("permute")
def permute(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of permutations: the labels' dims are permuted alike."""
    return _permuted(axes, args[0], output, [d % args[0].dim() for d in args[1]])


@rule("expand", "expand_copy")
def expand(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of `expand`: repeated elements have the labels of the one."""
    x = args[0]
    if param_of(x) is not None and x.dim() > 1:
        name, dims_of_param = param_of(x)  # type: ignore[misc]
        if all(a == b for a, b in zip(x.shape, output.shape[output.dim() - x.dim() :], strict=True)):
            output._axes_of = (name, (*([None] * (output.dim() - x.dim())), *dims_of_param))
            return True
    labels = axes.labels(x)
    if labels is not None:
        axes.give(output, labels.reshape([1] * (output.dim() - labels.ndim) + list(labels.shape)))
    return True


@rule("select")
def select(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of one index of a dim: the result has the labels at that index."""
    x, dim, index = args
    dim %= x.dim()
    if param_of(x) is not None and x.dim() > 1:
        name, dims_of_param = param_of(x)  # type: ignore[misc]
        output._axes_of = (name, (*dims_of_param[:dim], *dims_of_param[dim + 1 :]))
        return True
    return _take(axes, x, output, dim, index % x.shape[dim])


def _take(axes: Axes, x: torch.Tensor, output: torch.Tensor, dim: int, index: int) -> bool:
    labels = axes.labels(x)
    if labels is None:
        return True
    if labels.shape[dim] > 1:
        picked = np.take(labels, index, axis=dim)
        axes.chosen(labels, dim)
        axes.give(output, picked)
    else:
        axes.give(output, labels.squeeze(dim))
    return True


@rule("unbind")
def unbind(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of `unbind`: each result has the labels at its index, as by `select`."""
    x = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.dim()
    return all(select(axes, func, (x, dim, i), {}, piece) for i, piece in enumerate(output))


@rule("slice")
def slice_(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of slices: the result has the labels of its range of the dim."""
    x = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.dim()
    start, end = (args[2] if len(args) > 2 else None), (args[3] if len(args) > 3 else None)
    step = args[4] if len(args) > 4 else kwargs.get("step", 1)
    return _ranged(axes, x, output, dim, slice(start, end, step))


def _ranged(axes: Axes, x: torch.Tensor, output: torch.Tensor, dim: int, which: slice) -> bool:
    if param_of(x) is not None and x.dim() > 1 and output.shape == x.shape:
        output._axes_of = x._axes_of
        return True
    labels = axes.labels(x)
    if labels is not None:
        if labels.shape[dim] > 1:
            labels = labels[tuple(which if d == dim else slice(None) for d in range(labels.ndim))]
        axes.give(output, slim(labels))
    return True


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def split(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of splits: each piece has the labels of its range of the dim."""
    x = args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.dim()
    low = 0
    for piece in output:
        _ranged(axes, x, piece, dim, slice(low, low + piece.shape[dim]))
        low += piece.shape[dim]
    return True


@rule("cat", "stack")
def cat(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of `cat` and `stack`: labels are joined; beside a tensor without, they may not vary along the dim."""
    # torch passes over empty tensors of one dim, whatever shape the others have
    tensors = [t for t in args[0] if not (t.dim() == 1 and t.numel() == 0)]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % output.dim()
    every = [axes.labels(t) for t in tensors]
    if func._schema.name == "aten::stack":
        every = [None if e is None else np.expand_dims(e, dim) for e in every]
        sizes = [1] * len(tensors)
    else:
        sizes = [t.shape[dim] for t in tensors]
    labelled = [e for e in every if e is not None]
    if not labelled:
        return True
    shape = list(np.broadcast_shapes(*(tuple(1 if d == dim else n for d, n in enumerate(e.shape)) for e in labelled)))
    if not any(e.shape[dim] > 1 for e in labelled):  # pieces side by side along another dim than the labels'
        for a, b in itertools.pairwise(labelled):
            axes.unite(a, b)
        axes.give(output, labelled[0])
        return True
    # beside a tensor without labels: there are none for its part of the dim
    if len(labelled) < len(every):
        return False
    full = []
    for labels, size in zip(labelled, sizes, strict=True):
        shape[dim] = size
        full.append(np.broadcast_to(labels, shape))
    axes.give(output, slim(np.concatenate(full, axis=dim)))
    return True


@rule("repeat")
def repeat(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of `repeat`: labels are repeated as the elements are."""
    x, times = args[0], list(args[1])
    labels = axes.labels(x)
    if labels is not None:
        labels = labels.reshape([1] * (len(times) - labels.ndim) + list(labels.shape))
        axes.give(output, np.tile(labels, [n if labels.shape[d] > 1 else 1 for d, n in enumerate(times)]))
    return True
