"""Elementwise operations, by torch's tag or found so by trying: computed on shares, once these are cut alike.

An operation without a rule of its own comes here if each element of its result depends on that element alone.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gather, gathered, gathered_told
from shardwise.part.labels import Axes, is_free, label, param_of
from shardwise.part.moves import recut, whole_inside
from shardwise.part.position_tables import is_table
from shardwise.part.sums import Sum
from shardwise.part.tensor import Part, facts, is_part, no_rule, parts_in, rule
from shardwise.trace.leaves import replaced, tensors_in

# elementwise by their definition; `add` stands for every operation that is tagged so, or found to be so by trying
ELEMENTWISE = (
    "add", "_to_copy", "to_copy", "copy_", "detach", "detach_", "alias", "fill_", "zero_", "masked_fill_", "lift_fresh",
    "contiguous", "nan_to_num_", "relu_", "clamp_", "bernoulli_p",
)  # fmt: skip
Shapes = Sequence[Sequence[int]]


class _Whole(threading.local):
    """The operation that is being answered, and the unsharded shapes of its tensors, for the rules of inner axes.

    A tile of an outer axis may have one index or none along a dim, which an inner axis' rule would take for a broadcast
    dim.
    """

    running: tuple[Any, Shapes] | None = None  # (operation, shape of each tensor among its arguments)

    def shapes(self, func: Any, tensors: list[torch.Tensor]) -> Shapes:
        """Returns the unsharded shape of each tensor if an outer axis' rule runs `func`, else the tensors' own."""
        running = self.running
        same = running is not None and running[0] is func and len(running[1]) == len(tensors)
        return running[1] if running is not None and same else [tensor.shape for tensor in tensors]

    @contextmanager
    def inside(self, func: Any, shapes: Shapes) -> Iterator[None]:
        """Context in which `self.shapes(func, ...)` returns these shapes, as shares may be parts over inner axes."""
        before, self.running = self.running, (func, shapes)
        try:
            yield
        finally:
            self.running = before


WHOLE = _Whole()


class PointwiseCuts:
    """The cut that all inputs of an elementwise operation get: `dim` of its result, dealt by `owners`, as `lead` is.

    tensors, shapes  its tensors and their unsharded shapes
    Raises `Uncut` if a firm part can be neither moved nor gathered to that cut.
    """

    def __init__(self, func: Any, tensors: list[torch.Tensor], shapes: Shapes):
        self.whole = {id(tensor): shape for tensor, shape in zip(tensors, shapes, strict=True)}
        self.ndim = max(tensor.dim() for tensor in tensors)
        parts = [tensor for tensor in tensors if is_part(tensor)]
        # soft parts may be gathered, so the others say how the result is cut: the one of most dims has all of its dims
        firm = [part for part in parts if not part.may_gather] or parts
        self._follow(max(firm, key=lambda part: part.dim()))
        if any(self.crossing(part) for part in firm):  # positions by positions: cut as the largest is, or by its rows
            self._follow(max(firm, key=lambda part: (math.prod(self.whole[id(part)]), -self.place(part))))
        lead = self.lead
        for part in firm:
            if self.place(part) != self.dim or not part.beside(lead):
                # `local` moves or gathers positions that lie otherwise, and gathers what may be gathered
                free = lead.axis.positions and (self.movable(part) or self.crossing(part))
                if free or all(p.may_gather for p in parts):
                    continue
                raise Uncut(f"{func} meets tensors that are cut differently: {no_rule(func, [part, lead])}")

    def _follow(self, lead: Part) -> None:
        self.lead, self.dim, self.owners = lead, self.place(lead), lead.owners

    def crossing(self, tensor: Part) -> bool:
        """Whether a part of positions is cut along another dim than the result and broadcast along the result's."""
        dim = self.dim - (self.ndim - tensor.dim())
        lead, shape = self.lead, self.whole[id(tensor)]
        apart = self.place(tensor) != self.dim and lead.axis.positions and self.whole[id(lead)][lead.dim_cut] > 1
        return apart and (dim < 0 or shape[dim] == 1)

    def movable(self, tensor: Part) -> bool:
        """Whether a part has the dim along which the result is cut, so that its cut can be moved there."""
        dim = self.dim - (self.ndim - tensor.dim())
        return dim >= 0 and tensor.shape[dim] == self.owners.size

    def place(self, tensor: Part) -> int:
        """Returns the part's cut dim, counted in the dims of the result."""
        return tensor.dim_cut + self.ndim - tensor.dim()

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of one input. Collective if that is cut otherwise than the result."""
        if is_part(tensor):
            if self.place(tensor) == self.dim and tensor.beside(self.lead):
                return tensor.local
            # positions that lie otherwise are moved, which sends less than gathering them
            if self.lead.axis.positions and not tensor.may_gather and not self.crossing(tensor):
                dim = self.dim - (self.ndim - tensor.dim())
                return recut(tensor if dim == tensor.dim_cut else whole_inside(tensor), dim, self.owners).local
            tensor = gather(tensor)  # soft, or repeated: it would have been refused
        place = self.dim - (self.ndim - tensor.dim())
        # repeated along the cut dim: every rank reads all of it
        if place < 0 or (tensor.shape[place] == 1 and self.owners.size != 1):
            return tensor
        return self.lead.share(tensor, place)


@rule(*ELEMENTWISE)
def pointwise(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns `func` of parts, computed on shares after inputs that are cut otherwise were moved. May be collective."""
    tensors = tensors_in((args, kwargs))
    shapes = WHOLE.shapes(func, tensors)
    if _dealt_alike(tensors):
        # the result may be gathered only where all inputs may
        lead = next((part for part in tensors if not part.may_gather), tensors[0])
        first = args[0]
        args, kwargs = replaced(Part, lambda part: part.local, (args, kwargs))
        with WHOLE.inside(func, shapes):
            output = func(*args, **kwargs)
        return first if facts(func).writes else replaced(torch.Tensor, lead.with_local, output)
    # a cut dim of size one is broadcast, so all ranks read the index that one rank has: it is gathered
    repeated = {id(tensor) for tensor, shape in zip(tensors, shapes, strict=True) if _repeats(tensor, shape, shapes)}
    if repeated:
        args, kwargs = replaced(Part, lambda part: gather(part) if id(part) in repeated else part, (args, kwargs))
        axis, tensors = parts_in(tensors)[0].axis, tensors_in((args, kwargs))
        if not parts_in(tensors):
            # no other input is cut: the result is whole, and no memory of a part
            return replaced(torch.Tensor, lambda whole: Sum.read_only(whole, axis), func(*args, **kwargs))
    # positions by positions, as a mask of attention: gathering tables sends nothing, since every rank can make them.
    # An operation that writes may not: its result would be a gathered copy, and not the tensor that was written into
    if not facts(func).writes and _pairs_of_tables(parts_in(tensors)):
        args, kwargs = replaced(Part, lambda part: gathered(part) if is_part(part) else part, (args, kwargs))
        return func(*args, **kwargs)
    agreement = PointwiseCuts(func, tensors, shapes)
    changed = args[0] if facts(func).writes else None
    # a whole tensor, written into by cut positions, must stay alike on all ranks: each writes all of the gathered ones.
    # Under an axis of weights that would send what nobody asked for, so `_refuse_changing` raises there
    if changed is not None and not is_part(changed) and agreement.lead.axis.positions:
        return _into_a_whole(func, args, kwargs)
    if changed is not None:
        _refuse_changing(func, changed, agreement)
    args, kwargs = replaced(torch.Tensor, agreement.local, (args, kwargs))
    with WHOLE.inside(func, shapes):
        output = func(*args, **kwargs)
    # the share was written into in place; the caller's object is the part around it
    if changed is not None:
        return changed
    return replaced(torch.Tensor, lambda t: agreement.lead.with_local(t, agreement.dim, agreement.owners), output)


def _dealt_alike(tensors: list[Any]) -> bool:
    """Whether all tensors are parts of equal shape, cut alike; the quick path, which most operations take."""
    first = tensors[0]
    if not is_part(first):
        return False
    shape, dim, axis, owners = first.shape, first.dim_cut, first.axis, first.owners
    return all(
        part is first
        or (isinstance(part, Part) and part.axis is axis and part.dim_cut == dim and part.shape == shape
            and part.owners == owners)
        for part in tensors
    )  # fmt: skip


def _into_a_whole(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns `whole.add_(part)` of the gathered part, as for statistics that a module keeps. Collective."""

    def whole(part: Part) -> torch.Tensor:
        return gathered_told(part, "a field that is written into a whole tensor") if is_part(part) else part

    args, kwargs = replaced(Part, whole, (args, kwargs))
    return func(*args, **kwargs)


def _repeats(tensor: torch.Tensor, shape: Sequence[int], shapes: Shapes) -> bool:
    """Whether a part has size one along its cut dim and another of `shapes` is longer there.

    shape, shapes  unsharded shapes of the tensor and of all tensors
    """
    if not is_part(tensor) or shape[tensor.dim_cut] != 1:
        return False
    place = tensor.dim_cut - tensor.dim()  # from behind, where shapes meet
    return any(len(other) >= -place and other[place] > 1 for other in shapes)


def _pairs_of_tables(parts: list[Part]) -> bool:
    """Whether all parts are tables of positions, cut along different dims, so that each rank computes the whole result.

    Attention's masks (S, S) then come whole, as ring attention expects them, and nothing is sent.
    """
    places = {(part.dim_cut - part.dim(), part.owners) for part in parts}
    return len(places) > 1 and all(map(is_table, parts))


def _refuse_changing(func: Any, changed: Any, agreement: PointwiseCuts) -> None:
    """Raises `Uncut` unless `changed`, into which an operation writes, is cut as the other inputs are."""
    fits = is_part(changed) and agreement.place(changed) == agreement.dim and changed.beside(agreement.lead)
    if not fits:
        raise Uncut(f"{func} writes a cut tensor into one that is not cut alike")


@label(
    *ELEMENTWISE, "zeros_like", "ones_like", "full_like", "empty_like", "native_dropout",
    "_conj", "_conj_physical", "resolve_conj", "_neg_view", "resolve_neg",
)  # fmt: skip
def elementwise_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels an elementwise operation's result by its inputs' labels, united where they meet in one element.

    Returns False if it wrote labelled values into a tensor without labels, so that the inputs have to stay whole.
    """
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
    if joint is None:  # what is read has no labels, or was kept whole above
        return True
    if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and axes.labels(args[0]) is None:
        return False  # labelled values into a whole tensor
    for result in tensors_in(output):
        if result.dim() == joint.ndim:
            axes.give(result, joint)
            result._axes_free = free
    return True


def _of_weights(axes: Axes, func: Any, tensors: list[torch.Tensor], output: Any) -> bool:
    """Labels a weight computed of weights and whole tensors (a mask, a scale) as the first matrix among them.

    Labels of other weights along a dim are united with its own there. Returns False, without labels, if the operation
    is no such one.
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
        for back in range(1, other.dim() + 1):  # dims meet as in a broadcast, from the last one
            if its_dims[-back] is None or other.shape[-back] == 1:  # repeated along it, or no one dim of the weight
                continue
            seeds = axes.vector(of_other, its_dims[-back])
            if dims[-back] is None or name in axes.frozen:
                axes.keep_whole(seeds, "it is applied to a whole dim")
            elif of_other in axes.frozen:
                axes.keep_whole(axes.vector(name, dims[-back]), "a weight beside it is whole")
            # the same dim of the same weight lies together with itself already
            elif of_other != name or its_dims[-back] != dims[-back]:
                axes.unite(axes.vector(name, dims[-back]), seeds)
    for result in results:
        result._axes_of = name, dims
    return True


def _meet(axes: Axes, matrix: torch.Tensor, joint: np.ndarray | None, ndim: int) -> None:
    """Unites the labels of a weight's matrix with those that it meets elementwise; its other dims are kept whole.

    joint  labels of the other operands, broadcast to `ndim` dims; None if they have none
    """
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
