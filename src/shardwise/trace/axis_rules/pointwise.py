"""Axis labels of elementwise operations: labels meet element by element. On shares: part/pointwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwise.trace.axes import Axes, param_of
from shardwise.trace.axis_rules.registry import is_free, rule
from shardwise.trace.leaves import tensors_in


@rule(
    "_to_copy", "detach", "alias", "fill_", "zero_", "masked_fill_", "zeros_like", "ones_like", "full_like",
    "empty_like", "lift_fresh", "relu_", "clamp_", "native_dropout", "copy_", "contiguous",
)  # fmt: skip
def elementwise(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule: labels that meet in one element lie together; the result has them."""
    tensors = tensors_in((args, kwargs))
    if len(tensors) == 1 and param_of(tensors[0]) and not func._schema.is_mutable:
        for result in tensors_in(output):  # a weight made of one weight: 1 + w, exp(w), w in another dtype
            result._axes_of = tensors[0]._axes_of
        return True
    if _of_weights(axes, func, tensors, output):
        return True
    ndim = max(t.dim() for t in tensors)
    # a weight with several long dims has no one row of labels: `_meet` looks at each of its dims
    matrices = [t for t in tensors if param_of(t) and sum(n > 1 for n in t.shape) > 1]
    tensors = [t for t in tensors if not any(t is m for m in matrices)]
    labelled = [t for t in tensors if axes.labels(t) is not None]
    free = all(map(is_free, labelled)) and not matrices
    # a weight beside an activation without labels, which every rank has whole
    if labelled and all(map(is_free, labelled)) and any(t.numel() > 1 and not is_free(t) for t in tensors):
        for of_scale in map(axes.labels, labelled):
            assert of_scale is not None
            axes.keep_whole(of_scale, "it is applied to a whole tensor")
        tensors = []
    joint: np.ndarray | None = None
    for tensor in sorted(tensors, key=is_free):  # what comes from parameters alone last
        labels = axes.labels(tensor)
        if labels is None:
            continue
        labels = labels.reshape([1] * (ndim - labels.ndim) + list(labels.shape))
        if joint is None:
            joint = labels
        # a scale that is repeated for each cut index (a norm inside every head): each rank needs all of it
        elif is_free(tensor) and np.broadcast_shapes(joint.shape, labels.shape) != labels.shape:
            axes.keep_whole(labels, "it is applied inside each of several cut indices")
        else:
            axes.unite(joint, labels)
            joint = np.broadcast_arrays(joint, labels)[0]
    for matrix in matrices:
        _meet(axes, matrix, joint, ndim)
    if joint is None:
        return True
    if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and axes.labels(args[0]) is None:
        return False  # labelled values into a whole tensor
    for result in tensors_in(output):
        if result.dim() == joint.ndim:
            axes.give(result, joint)
            result._axes_free = free
    return True


def _of_weights(axes: Axes, func: Any, tensors: list[torch.Tensor], output: Any) -> bool:
    """Labels a weight made of other weights and of whole tensors (a mask, a scale): it is cut as the first is.

    What other weights have along one of its dims lies together with what it has there.
    """
    results = tensors_in(output)
    lead = next((t for t in tensors if param_of(t) and sum(n > 1 for n in t.shape) > 1), None)
    if lead is None or any(result.shape != lead.shape for result in results):
        return False
    if func._schema.is_mutable and not all(map(param_of, tensors)):
        return False  # what is written is dealt as it lies; a weight that follows other weights alone as they are
    others = [t for t in tensors if t is not lead]
    if any(not param_of(t) and axes.labels(t) is not None for t in others):
        return False  # activations beside a weight: element by element
    name, dims = param_of(lead)  # type: ignore[misc]
    for other in filter(param_of, others):
        of_other, its_dims = param_of(other)  # type: ignore[misc]
        for back in range(1, other.dim() + 1):
            if its_dims[-back] is None or other.shape[-back] == 1:
                continue
            seeds = axes.vector(of_other, its_dims[-back])
            if dims[-back] is None or name in axes.frozen:
                axes.keep_whole(seeds, "it is applied to a whole dim")
            elif of_other in axes.frozen:
                axes.keep_whole(axes.vector(name, dims[-back]), "a weight beside it is whole")
            elif of_other != name or its_dims[-back] != dims[-back]:
                axes.unite(axes.vector(name, dims[-back]), seeds)
    for result in results:
        result._axes_of = name, dims
    return True


def _meet(axes: Axes, matrix: torch.Tensor, joint: np.ndarray | None, ndim: int) -> None:
    """Unites a matrix with the labels that it meets element by element; its dims that have none there stay whole."""
    name, dims = param_of(matrix)  # type: ignore[misc]
    for d, dim in enumerate(dims):
        if dim is None:
            continue
        place = d + ndim - matrix.dim()
        seeds = axes.vector(name, dim)
        # all labels lie along this dim: the weight is dealt as they are
        alone = joint is not None and joint.size == joint.shape[place] == len(seeds) > 1
        if alone and name not in axes.frozen:
            axes.unite(joint.ravel(), seeds)  # type: ignore[union-attr]
        elif len(seeds) > 1:
            axes.keep_whole(seeds, "it is applied to a whole dim")
