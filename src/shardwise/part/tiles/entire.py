"""Wrappers that run a function of torch on gathered tiles, on every rank; most are applied in part/rules/rare.

Received by a rank: (p-1)/p of the field over every axis that cuts it, and in backward as much again of the gradient.
A result with as many dims as the field is cut again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.part.cuts import Owners, Uncut
from shardwise.part.done_whole import by_rules
from shardwise.part.moves import from_axis, share_of
from shardwise.part.sums import redealt, whole_gradient, whole_over_axis
from shardwise.part.tensor import FUNCTIONS, Part
from shardwise.part.tiles.gathers import noted
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import answers, cuts, opened, placed
from shardwise.trace.leaves import replaced, tensors_in


def with_elements(share: torch.Tensor, empty: list[int]) -> torch.Tensor:
    """Returns a share with size one along its dims `empty`, of size 0, because kernels refuse empty tensors."""
    # a sum over nothing: zeros, by an operation of autograd, so that backward runs on this rank too
    return share.sum(empty, keepdim=True).to(share.dtype) if empty else share


def extent(tensor: torch.Tensor, dim: int, cut: CutDim) -> int:
    """Returns the length of dim `dim` inside the axes further out than the cut's, which that axis divides."""
    return from_axis(tensor.detach(), cut.axis).shape[dim]


def dealt_again(result: torch.Tensor, cut: CutDim) -> Owners:
    """Returns the owners of `result` along the dim of `cut`: the cut's own, or blocks if the size has changed."""
    n = extent(result, cut.dim, cut)
    return cut.owners if n == cut.owners.size else Owners.blocks(n, cut.axis.size)


def of_all(plain: Callable) -> Callable:
    """Returns a function that runs `plain` on gathered tensors, on every rank, and cuts its results again.

    A result is cut as the first part among the arguments if it has as many dims, and the cut dims are long enough.
    """

    @wraps(plain)
    def answer(*args: Any, **kwargs: Any) -> Any:
        """Returns `plain` of tensors of which any dim may be cut. Collective."""
        # nothing is cut: no gathering, and nothing to cut again
        parts = tensors_in((args, kwargs), Part)
        args, kwargs = replaced(Part, partial(_whole, plain.__name__), (args, kwargs))
        result = plain(*args, **kwargs)
        now = cuts(parts[0], range(parts[0].dim())) if parts else []

        def again(whole: torch.Tensor) -> torch.Tensor:
            whole = whole_gradient(whole, now[0].axis)  # the operation's backward runs on whole tensors too
            # a result of other dims, or of fewer cells than ranks, stays whole
            n, sizes = parts[0].dim(), zip(whole.shape, parts[0].shape, strict=False)
            room = [size == before or size >= math.prod(cut.axis.size for cut in now) for size, before in sizes]
            fits = whole.dim() == n and all(room[cut.dim] for cut in now)
            return redealt(whole, lambda given: _shared(given, now)) if fits else whole

        return replaced(torch.Tensor, again, result) if now else result

    return answer


def _whole(name: str, part: Part) -> torch.Tensor:
    """Returns the part gathered over every axis of positions, noted for the user. `name`: the function. Collective."""
    whole: torch.Tensor = part
    for cut in reversed(cuts(part, range(part.dim()))):
        noted(f"a field of which {name} reads all dims", whole, cut)
        whole = whole_over_axis(whole, cut.axis)
    return whole


def _shared(whole: torch.Tensor, cut_dims: list[CutDim]) -> torch.Tensor:
    """Returns a whole tensor cut by `cut_dims` (outermost first), in blocks if a size has changed. Nothing is sent."""
    if not cut_dims:
        return whole
    cut, *inside = cut_dims
    owners = dealt_again(whole, cut)
    share = _shared(share_of(whole, cut.dim, owners, cut.axis), inside)
    return placed(share, [CutDim(cut.axis, cut.dim, owners)])


def _functions(name: str) -> set[Callable]:
    """Returns the functions called `name` in torch, torch.Tensor, F, torch.linalg and torch.fft."""
    places = (torch, torch.Tensor, F, torch.linalg, torch.fft)
    return {getattr(place, name) for place in places if callable(getattr(place, name, None))}


def done_whole(*names: str) -> None:
    """Registers the functions of torch of these names to run on gathered tiles (`of_all`); the user is told."""
    for name in names:
        for plain in _functions(name):
            answers(plain, cut_once=False)(of_all(plain))


def whole_without_rule(*names: str) -> None:
    """Registers the functions of torch of these names to run by rules on shares, on gathered tiles after `Uncut`."""

    def by_rule_or_whole(plain: Callable) -> Callable:
        whole = of_all(plain)

        @wraps(plain)
        def answer(*args: Any, **kwargs: Any) -> Any:
            try:
                with by_rules():  # else a sequence would be gathered below autograd, where backward goes other ways
                    return plain(*args, **kwargs)
            except Uncut:  # raised on all ranks alike, and before anything was written: none of them writes
                return whole(*args, **kwargs)

        return answer

    for name in names:
        for plain in _functions(name):
            answers(plain, cut_once=False)(by_rule_or_whole(plain))


def apart(function: Callable, lead: Callable[[torch.Tensor], int]) -> None:
    """Registers `function` to run on each rank's own indices if one of the first dims of its input is cut.

    lead  input -> number of its first dims (samples, channels) whose indices the function treats independently
    A call raises `Uncut` if another argument is cut otherwise along these dims.
    """
    answer = FUNCTIONS.get(function, function)  # read before it is replaced below: it answers cuts of the other dims

    def run(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dims = range(lead(input)) if isinstance(input, torch.Tensor) else range(0)  # `isin` may be given a number
        cut_dims = cuts(input, dims)
        if not cut_dims:
            return answer(input, *args, **kwargs)
        share = opened(input, cut_dims)
        # a rank that is dealt no sample computes a stand-in, so that it comes to the collectives of the others
        empty = [cut.dim for cut in cut_dims if not share.shape[cut.dim]]

        def beside(other: Part) -> torch.Tensor:
            # indices of `max_unpool2d`: each rank reads those of its own samples
            if [(cut.axis, cut.dim, cut.owners) for cut in cuts(other, dims)] != [
                (cut.axis, cut.dim, cut.owners) for cut in cut_dims
            ]:
                raise Uncut(f"{function.__name__} of tensors that are cut differently ({input!r}, {other!r})")
            return with_elements(opened(other, cut_dims), empty)

        args, kwargs = replaced(Part, beside, (args, kwargs))

        def own(result: torch.Tensor) -> torch.Tensor:
            for dim in empty:  # what was computed of the stand-in belongs to nobody
                result = result.narrow(dim, 0, 0)
            return placed(result, cut_dims)

        return replaced(torch.Tensor, own, answer(with_elements(share, empty), *args, **kwargs))

    answers(function, cut_once=False)(run)


def in_front(dims: int) -> Callable[[torch.Tensor], int]:
    """Returns a function that returns the number of dims of a tensor in front of its last `dims` (see `apart`)."""
    return lambda x: x.dim() - dims
