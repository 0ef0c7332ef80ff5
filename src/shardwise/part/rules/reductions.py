"""Reductions and vector norms: local if the cut dim is kept; over the cut dim by small collectives (`REDUCTIONS`).

The functions `_sum`, `_mean`, ... are entries of `REDUCTIONS`, with the arguments of `part/dimwise.Along`: (operation,
part, dims that are reduced, keepdim, arguments by name) -> result, whole on every rank.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from shardwise.host import to_device
from shardwise.part.cuts import Owners
from shardwise.part.dimwise import Along, DimwiseRule, arguments_of, named, over
from shardwise.part.gathering import gathered
from shardwise.part.labels import Axes, label, param_of
from shardwise.part.levels import Distributed
from shardwise.part.sums import reduced
from shardwise.part.tensor import Part, rule
from shardwise.trace.leaves import tensors_in


def _sum(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    return _added_up(part.local.sum, part, dims, keepdim, bound)


def _sum_of_numbers(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    return _added_up(part.local.nansum, part, dims, keepdim, bound)


def _added_up(add: Any, part: Part, dims: set[int], keepdim: bool, bound: dict, count: int = 1) -> torch.Tensor:
    """Returns the sum over `dims` and over ranks, divided by `count`; `add` is `sum` or `nansum` of the share."""
    asked = bound.get("dtype")
    dtype = asked or part.dtype
    as_it_is = _wide(dtype) is dtype or _waits(part)
    # one rank's sum may overflow where that of all does not
    own = add(sorted(dims), keepdim, dtype=asked if as_it_is else _wide(dtype))
    total = reduced(own if count == 1 else own / count, part)
    return total if as_it_is else total.to(dtype)


def _mean(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    """Returns the mean over `dims` and ranks, the sum divided by the number of elements on all ranks."""
    # the sum over ranks by the count of all: shares are of unequal length, and a mean of means weighs them alike
    return _added_up(part.local.sum, part, dims, keepdim, bound, math.prod(part.shape[d] for d in dims))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which torch adds up elements of `dtype`, float32 for 16 bits, whose sums may overflow."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _waits(tensor: Any) -> bool:
    """Whether a sum of `tensor` has to wait for later chunks of positions, so that it cannot be cast to a dtype yet."""
    while isinstance(tensor, Distributed):
        if tensor.axis.turns:
            return True
        tensor = getattr(tensor, "local", None)
    return False


def _extreme(op: str):
    """Returns the reduction for `op` "max" or "min"; (value, index) if the operation returns two tensors."""

    def run(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> Any:
        if len(func._schema.returns) > 1:
            return _extreme_and_place(op, part, keepdim)
        return _over_ranks(op, part, dims, keepdim)

    return run


def _over_ranks(op: str, part: Part, dims: set[int], keepdim: bool) -> torch.Tensor:
    """Returns the max (min) over `dims` and over ranks; NaN if any element is NaN, as in one process."""
    own = _local_extreme(op, part, dims, keepdim)
    if not part.is_floating_point():
        return reduced(own, part, op)
    # a collective may ignore NaN, so whether there is one is reduced beside the values, in the same message
    unknown = own.isnan().to(own.dtype)
    total, found = reduced(torch.stack([own, unknown if op == "max" else -unknown]), part, op).unbind(0)
    return total.masked_fill(found != 0, math.nan)


def _place_of_extreme(op: str):
    """Returns the rule of `argmax` or `argmin`, by `op` "max" or "min"."""

    def run(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> Any:
        # a place among all elements is one in the flattened tensor
        if bound.get("dim") is None:  # among all elements
            place = getattr(part.reshape(-1), f"arg{op}")(0)
            return place.reshape([1] * part.dim()) if keepdim else place
        return _extreme_and_place(op, part, keepdim)[1]

    return run


def _local_extreme(op: str, part: Part, dims: set[int], keepdim: bool) -> torch.Tensor:
    """Returns the max (min) over `dims` of this rank's share; `_beaten` if the share is empty."""
    local = part.local
    if local.shape[part.dim_cut]:
        return getattr(local, f"a{op}")(sorted(dims), keepdim)
    return of_nothing(local, sorted(dims), keepdim, _beaten(local.dtype, op))


def of_nothing(x: torch.Tensor, dims: list[int], keepdim: bool, value: float) -> torch.Tensor:
    """Returns `value` in the shape of `x` reduced over `dims`, cut as on other ranks, for a rank without indices."""
    return torch.full_like(x.sum(dims, keepdim), value, dtype=x.dtype)


def _beaten(dtype: torch.dtype, op: str) -> float | int | bool:
    """Returns the value of `dtype` that never wins a "max" or "min" (`op`), for a rank without elements."""
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def _extreme_and_place(op: str, part: Part, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (max or min, its global index) along the cut dim, of equal ones the first. Two small reductions."""
    dim, n = part.dim_cut, part.owners.size
    value = _over_ranks(op, part, {dim}, True)
    mine = to_device(part.owners.indices(part.axis.index), part.device)
    at = mine.view([-1 if d == dim else 1 for d in range(part.dim())])
    same = (part.local == value) | (part.local != part.local)  # NaN, which torch takes for the extreme, equals nothing
    # n stands for no index here, and is larger than all that there are
    candidates = torch.where(same, at, n)
    first = candidates.amin(dim, True) if len(mine) else torch.full_like(value, n, dtype=torch.int64)
    place = reduced(first, part, "min")
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def _moments(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> Any:
    """Returns variance or standard deviation, or (that, mean) for `var_mean` and `std_mean`, by two sums over ranks."""
    name = func._schema.name.partition("::")[2]
    unbiased = bound.get("unbiased")
    # torch has two words for how many are subtracted: one may be None
    correction = bound.get("correction") if unbiased is None else float(unbiased)
    count = math.prod(part.shape[d] for d in dims)
    along, local = sorted(dims), part.local.to(_wide(part.dtype))
    mean = reduced(local.sum(along, True), part) / count
    # about the mean of all ranks: the mean of squares minus the square of the mean would cancel
    gaps = (local - mean).abs() if part.is_complex() else local - mean
    spread = reduced(gaps.square().sum(along, True), part)
    # never less than 0, as torch counts
    spread = spread / max(count - (1 if correction is None else correction), 0)
    spread = spread.sqrt() if name.startswith("std") else spread
    spread, mean = spread if part.is_complex() else spread.to(part.dtype), mean.to(part.dtype)
    results = [tensor if keepdim else tensor.squeeze(along) for tensor in (spread, mean)]
    return tuple(results) if name.endswith("_mean") else results[0]


def _nonzero(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    return _count(part, part.local != 0, dims, False)


def _all(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    return _truth(part, _count(part, part.local == 0, dims, keepdim) == 0)


def _any(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    return _truth(part, _count(part, part.local != 0, dims, keepdim) > 0)


def _truth(part: Part, truth: torch.Tensor) -> torch.Tensor:
    """Returns `truth` in the dtype of torch's `all` and `any`: uint8 for a uint8 part, else bool."""
    return truth.to(torch.uint8) if part.dtype is torch.uint8 else truth


def _each_or_named(x: torch.Tensor, arguments: dict[str, Any]) -> Iterable[int]:
    """Returns the dims that `all` or `any` reduces; unlike for other reductions, an empty list means none."""
    return () if arguments.get("dim") in ([], ()) else named(x, arguments)


def _count(part: Part, hits: torch.Tensor, dims: set[int], keepdim: bool) -> torch.Tensor:
    return reduced(hits.sum(sorted(dims), keepdim), part)


def _prod(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    """Returns the product over the cut dim, by gathering and multiplying each rank's product."""
    own, one_dim = part.local.to(bound.get("dtype") or part.dtype), bound.get("dim") is not None
    own = own.prod(part.dim_cut, keepdim) if one_dim else own.prod()
    ranks = part.axis.size
    return gathered(Part(own.unsqueeze(0), 0, Owners.blocks(ranks, ranks), part.axis)).prod(0)


def _least_and_most(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> tuple[torch.Tensor, ...]:
    return tuple(_over_ranks(op, part, dims, keepdim) for op in ("min", "max"))


def _norm(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    """Returns (sum |x|^p)^(1/p) over all ranks; for infinite p the largest or smallest |x|, for 0 the nonzero count."""
    # `norm` and `linalg_vector_norm` name the order differently
    asked = bound.get("ord", bound.get("p"))
    order, along = 2.0 if asked is None else float(asked), sorted(dims)
    dtype = bound.get("dtype") or (part.abs().dtype if part.is_complex() else part.dtype)
    if math.isinf(order):
        op = "max" if order > 0 else "min"
        sizes = part.with_local(part.local.abs().to(dtype))
        return _over_ranks(op, sizes, dims, keepdim)
    # how many are not 0 is a count, whatever the dtype
    if order == 0:
        return _count(part, part.local != 0, dims, keepdim).to(dtype)
    # cheaper than powers; the square of a complex number is not that of its absolute value
    if order == 2 and not part.is_complex():
        return reduced(part.local.to(_wide(dtype)).square().sum(along, keepdim), part).sqrt().to(dtype)
    powers = part.local.abs().to(_wide(dtype)).pow(order)
    return reduced(powers.sum(along, keepdim), part).pow(1 / order).to(dtype)


@rule("renorm")
def renorm(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns x with each slice along a dim scaled down so that its p-norm is at most `most`, as `torch.renorm`."""
    x, order, dim, most = args
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    norm = torch.linalg.vector_norm(x, order, others, keepdim=True)
    return x * torch.where(norm > most, most / (norm + 1e-7), torch.ones_like(norm))


def _logsumexp(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    """Returns log sum exp over `dims`, the cut one among them, by two all-reduces (maximum, sum)."""
    real = part.is_floating_point() or part.is_complex()
    local = part.local if real else part.local.to(torch.get_default_dtype())
    along, empty = sorted(dims), not part.local.shape[part.dim_cut]
    top = of_nothing(local, along, True, -torch.inf) if empty else local.amax(along, True)
    top = reduced(top, part, "max")
    # where all elements are -inf, -inf minus -inf would be NaN
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    total = reduced((local - top).exp().sum(along, True), part).log() + top
    return total if keepdim else total.squeeze(along)


# ATen name -> what the reduction is over a cut dim; None: `Uncut`
REDUCTIONS: dict[str, Along | None] = {
    "sum": _sum, "nansum": _sum_of_numbers, "_is_all_true": _all, "_is_any_true": _any,
    "mean": _mean, "amax": _extreme("max"), "amin": _extreme("min"), "max": _extreme("max"),
    "min": _extreme("min"), "all": _all, "any": _any, "linalg_vector_norm": _norm, "norm": _norm,
    "logsumexp": _logsumexp, "argmax": _place_of_extreme("max"), "argmin": _place_of_extreme("min"),
    "var": _moments, "std": _moments, "var_mean": _moments, "std_mean": _moments, "count_nonzero": _nonzero,
    "prod": _prod, "aminmax": _least_and_most, "median": None, "nanmedian": None, "kthvalue": None, "mode": None,
}  # fmt: skip
for _name, _along in REDUCTIONS.items():
    over(_name, dims=_each_or_named if _name in ("all", "any") else named, along=_along)

# reductions in the loss over which classes may stay cut, since the result is one small collective
_SMALL = frozenset({"sum", "mean", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin", "logsumexp"})


@label(*REDUCTIONS)
def reduction_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels a reduction, with the labels along the reduced dims united; False for `max(x, other)`.

    In the loss, and for a norm's sum or mean over one dim, reduced labels stay apart and the result has none.
    """
    x, arguments, by_dims = args[0], arguments_of(func, args, kwargs), DimwiseRule(named)
    if "other" in arguments:  # max or min of two tensors, element by element
        return False
    dims = by_dims.run_over(x, arguments) if x.dim() else set()  # a scalar has no dims
    if _of_weight(axes, x, dims, output):
        return True
    name = func._schema.name.partition("::")[2]
    statistic = name in ("sum", "mean") and len(dims) == 1 and bool(arguments.get("keepdim"))  # of a norm
    if (axes.in_loss and name in _SMALL) or statistic:
        labels = axes.labels(x)
        long = {d for d, n in enumerate(labels.shape) if n > 1} if labels is not None else set()
        if long and long <= dims:
            return True  # one small collective gives the whole result
    return by_dims.labels(axes, func, args, kwargs, output)


def _of_weight(axes: Axes, x: torch.Tensor, dims: set[int], output: Any) -> bool:
    """Labels a statistic of a weight (the norm of its rows) by the weight's other dims; False if x is none."""
    param = param_of(x)
    # a vector's norm is one number: there is nothing to label
    if param is None or sum(n > 1 for n in x.shape) < 2:
        return False
    name, of_dims = param
    for result in tensors_in(output):
        # kept dims of size 1 have no index of the weight any more
        if result.dim() == x.dim():
            result._axes_of = name, tuple(None if d in dims else entry for d, entry in enumerate(of_dims))
        else:
            result._axes_of = name, tuple(entry for d, entry in enumerate(of_dims) if d not in dims)
    return True
