"""Rules of reductions, medians, softmax, norms, along cut dims or beside them. Labels: trace/axis_rules/reductions."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.host import to_device
from shardwise.part.cuts import Owners, Uncut, repeated
from shardwise.part.gathering import gathered, reduced
from shardwise.part.levels import Distributed
from shardwise.part.moves import dealt_as
from shardwise.part.sums import Sum
from shardwise.part.tensor import Part, is_part, no_rule, parts_in, rule
from shardwise.trace.elementwise import fit, is_elementwise


def _dims(part: Part, dim: Any) -> set[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return set(range(part.dim()))
    return {d % part.dim() for d in (dim if isinstance(dim, list | tuple) else [dim])}


def arguments_of(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Returns an operation's arguments by name, defaults included."""
    names = [argument.name for argument in func._schema.arguments]
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


def _after(part: Part, local: Any, dims: set[int], keepdim: bool) -> Part:
    """Returns a reduction's local result as a part: the reduced `dims`, not the cut one, are gone or of size one."""
    return part.with_local(local, part.dim_cut if keepdim else part.dim_cut - sum(d < part.dim_cut for d in dims))


@rule("sum", "mean", "amax", "amin", "max", "min", "any", "all", "prod", "linalg_vector_norm", "norm", "logsumexp",
      "argmax", "argmin", "var", "std", "var_mean", "std_mean", "count_nonzero", "median", "nanmedian", "kthvalue",
      "mode", "aminmax", "nansum", "_is_all_true", "_is_any_true")  # fmt: skip
def reduce(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns `op(x, dim, keepdim)`: a part where the cut dim stays, else combined over ranks by `_COMBINE`."""
    part = args[0]
    name = func._schema.name.partition("::")[2]
    bound = arguments_of(func, args, kwargs)
    if not is_part(part):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    # `max(x, other)` has the name of a reduction and is an elementwise operation
    if isinstance(bound.get("dim"), torch.Tensor) or "other" in bound:
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    dims, keepdim = _dims(part, bound.get("dim")), bool(bound.get("keepdim", False))
    if part.dim_cut not in dims:
        output = func(part.local, *args[1:], **kwargs)
        if isinstance(output, tuple):
            return type(output)(_after(part, each, dims, keepdim) for each in output)
        return _after(part, output, dims, keepdim)
    combine = _COMBINE.get(name)
    if combine is None:  # a firm cut is never gathered without a word
        raise Uncut(no_rule(func, [part]))
    return combine(func, part, dims, keepdim, bound)


def added_up(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns a loss of elements (`mse_loss`), or its backward, by the elementwise operation and its sum or mean."""
    bound = arguments_of(func, args, kwargs)
    how, backward = bound.get("reduction"), func._schema.name.endswith("_backward")
    pair = [tensor for name in ("self", "target") if isinstance(tensor := bound.get(name), torch.Tensor)]
    if how not in (1, 2) or len(pair) < 2 or not fit(pair) or (backward and isinstance(bound["grad_output"], Part)):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    # 1 is the mean, 2 the sum, 0 each element's own: that one is elementwise, the rest is a reduction with a rule
    unreduced = bound | {"reduction": 0}
    if backward:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in pair))
        gradient = bound["grad_output"] / (math.prod(shape) if how == 1 else 1)
        unreduced["grad_output"] = gradient.expand(shape)
    arguments = tuple(unreduced[argument.name] for argument in func._schema.arguments)
    if not is_elementwise(func, arguments, {}):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    output = func(*arguments)
    if backward or how == 2:
        return output if backward else output.sum()
    return output.mean()


def _sum(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    return reduced(part.local.sum(sorted(dims), keepdim, dtype=bound.get("dtype")), part)


def _sum_of_numbers(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    return reduced(part.local.nansum(sorted(dims), keepdim, dtype=bound.get("dtype")), part)


def _mean(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    # the sum over ranks by the count of all: shares are of unequal length, and a mean of means weighs them alike
    count = 1
    for d in dims:
        count *= part.shape[d]
    return reduced(part.local.sum(sorted(dims), keepdim, dtype=bound.get("dtype")) / count, part)


def _extreme(op: str):
    def run(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> Any:
        if len(func._schema.returns) > 1:
            return _extreme_and_place(op, part, keepdim)
        return reduced(_local_extreme(op, part, dims, keepdim), part, op)

    return run


def _place_of_extreme(op: str):
    def run(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> Any:
        # a place among all elements is one in the flattened tensor
        if bound.get("dim") is None:  # among all elements
            return getattr(part.reshape(-1), f"arg{op}")(0)
        return _extreme_and_place(op, part, keepdim)[1]

    return run


def _local_extreme(op: str, part: Part, dims: set[int], keepdim: bool) -> torch.Tensor:
    """Returns the max (min) over `dims` of this rank's share; the dtype's lowest (highest) value where it is empty."""
    local = part.local
    if local.shape[part.dim_cut]:
        return getattr(local, f"a{op}")(sorted(dims), keepdim)
    return _of_nothing(local, sorted(dims), keepdim, _beaten(local.dtype, op))


def _of_nothing(x: torch.Tensor, dims: list[int], keepdim: bool, value: float) -> torch.Tensor:
    """Returns what a rank without indices gives to a reduction over `dims`, cut further in as others' results are."""
    return torch.full_like(x.sum(dims, keepdim), value, dtype=x.dtype)


def _beaten(dtype: torch.dtype, op: str) -> float | int | bool:
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def _extreme_and_place(op: str, part: Part, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (extreme value, its index) along the cut dim; the first of equal ones. Two small reductions."""
    dim, n = part.dim_cut, part.owners.size
    value = reduced(_local_extreme(op, part, {dim}, True), part, op)
    mine = to_device(part.owners.indices(part.axis.index), part.device)
    at = mine.view([-1 if d == dim else 1 for d in range(part.dim())])
    same = (part.local == value) | (part.local != part.local)  # the second where it is no number
    # n stands for no index here, and is larger than all that there are
    candidates = torch.where(same, at, n)
    first = candidates.amin(dim, True) if len(mine) else torch.full_like(value, n, dtype=torch.int64)
    place = reduced(first, part, "min")
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def _moments(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> Any:
    """Returns variance or standard deviation, with the mean where it is asked for: two sums over ranks."""
    name = func._schema.name.partition("::")[2]
    unbiased = bound.get("unbiased")
    correction = bound.get("correction") if unbiased is None else float(unbiased)
    count = math.prod(part.shape[d] for d in dims)
    along = sorted(dims)
    mean = reduced(part.local.sum(along, True), part) / count
    # about the mean of all ranks: the mean of squares minus the square of the mean would cancel
    spread = reduced((part.local - mean).square().sum(along, True), part)
    spread = spread / max(count - (1 if correction is None else correction), 0)
    spread = spread.sqrt() if name.startswith("std") else spread
    results = [tensor if keepdim else tensor.squeeze(along) for tensor in (spread, mean)]
    return tuple(results) if name.endswith("_mean") else results[0]


def _nonzero(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    return _count(part, part.local != 0, dims, False)


def _all(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    return _count(part, part.local == 0, dims, keepdim) == 0


def _any(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    return _count(part, part.local != 0, dims, keepdim) > 0


def _count(part: Part, hits: torch.Tensor, dims: set[int], keepdim: bool) -> torch.Tensor:
    return reduced(hits.sum(sorted(dims), keepdim), part)


def _prod(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    """Returns the product over the cut dim: each rank's own, gathered and multiplied."""
    own, one_dim = part.local.to(bound.get("dtype") or part.dtype), bound.get("dim") is not None
    own = own.prod(part.dim_cut, keepdim) if one_dim else own.prod()
    ranks = part.axis.size
    return gathered(Part(own.unsqueeze(0), 0, Owners.blocks(ranks, ranks), part.axis)).prod(0)


def _least_and_most(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> tuple[torch.Tensor, ...]:
    return tuple(reduced(_local_extreme(op, part, dims, keepdim), part, op) for op in ("min", "max"))


def _norm(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    """Returns (sum |x|^p)^(1/p) over all ranks; of an infinite p the extreme |x|, of 0 how many are not 0."""
    asked = bound.get("ord", bound.get("p"))
    order, along = 2.0 if asked is None else float(asked), sorted(dims)
    dtype = bound.get("dtype") or (part.abs().dtype if part.is_complex() else part.dtype)
    if math.isinf(order):
        op = "max" if order > 0 else "min"
        sizes = part.with_local(part.local.abs().to(dtype))
        return reduced(_local_extreme(op, sizes, dims, keepdim), part, op)
    if order == 0:
        return _count(part, part.local != 0, dims, keepdim).to(dtype)
    # cheaper than powers; the square of a complex number is not that of its absolute value
    if order == 2 and not part.is_complex():
        return reduced(part.local.square().sum(along, keepdim, dtype=bound.get("dtype")), part).sqrt()
    return reduced(part.local.abs().pow(order).sum(along, keepdim, dtype=dtype), part).pow(1 / order)


@rule("renorm")
def renorm(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns x with each slice along a dim scaled down so that its p-norm is at most `most`."""
    x, order, dim, most = args
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    norm = torch.linalg.vector_norm(x, order, others, keepdim=True)
    return x * torch.where(norm > most, most / (norm + 1e-7), torch.ones_like(norm))


def _logsumexp(func: Any, part: Part, dims: set[int], keepdim: bool, bound: dict) -> torch.Tensor:
    along, empty = sorted(dims), not part.local.shape[part.dim_cut]
    top = _of_nothing(part.local, along, True, -torch.inf) if empty else part.local.amax(along, True)
    top = reduced(top, part, "max")
    # a row of -inf alone: -inf minus -inf would be no number
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    total = reduced((part.local - top).exp().sum(along, True), part).log() + top
    return total if keepdim else total.squeeze(along)


_COMBINE = {
    "sum": _sum, "nansum": _sum_of_numbers, "_is_all_true": _all, "_is_any_true": _any,
    "mean": _mean, "amax": _extreme("max"), "amin": _extreme("min"), "max": _extreme("max"),
    "min": _extreme("min"), "all": _all, "any": _any, "linalg_vector_norm": _norm, "norm": _norm,
    "logsumexp": _logsumexp, "argmax": _place_of_extreme("max"), "argmin": _place_of_extreme("min"),
    "var": _moments, "std": _moments, "var_mean": _moments, "std_mean": _moments, "count_nonzero": _nonzero,
    "prod": _prod, "aminmax": _least_and_most,
}  # fmt: skip


@rule("_softmax", "_log_softmax", "_safe_softmax")
def softmax(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the (log-)softmax as a part; along the cut dim by two all-reduces (maximum, sum), nothing is gathered."""
    part, dim = args[0], args[1] % args[0].dim()
    if dim != part.dim_cut:
        return part.with_local(func(part.local, *args[1:], **kwargs))
    # the third argument asks for float32 of a half input
    x = part.local.float() if len(args) > 2 and args[2] is True else part.local
    logarithm = func._schema.name == "aten::_log_softmax"
    top = x.amax(dim, True) if x.shape[dim] else _of_nothing(x, [dim], True, -torch.inf)
    top = reduced(top, part, "max")
    # a row that is masked as a whole has -inf as its maximum, and -inf minus -inf is no number
    shifted = x - torch.where(top.isinf(), torch.zeros_like(top), top)
    if logarithm:  # over a vocabulary each of these is among the largest tensors of a step: one more than comes out
        total = reduced(shifted.exp().sum(dim, True), part)
        return part.with_local(_reusing(shifted, "sub", total.log()))
    exponents = _reusing(shifted, "exp")
    total = reduced(exponents.sum(dim, True), part)
    output = _reusing(exponents, "div", total)
    # it gives zeros for a row that is masked as a whole
    if func._schema.name == "aten::_safe_softmax":
        output = output.masked_fill(total == 0, 0.0)
    return part.with_local(output)


def _reusing(own: torch.Tensor, name: str, *args: torch.Tensor) -> torch.Tensor:
    """Returns the operation's result in the memory of `own`, a temporary; anew where `own` is cut once more."""
    return getattr(own, name if isinstance(own, Distributed) else f"{name}_")(*args)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the gradient of (log-)softmax: dx = y (dy - sum y dy), or dy - exp(y) sum dy; the sum is over ranks."""
    gradient, output, dim = args[:3]
    part = output if is_part(output) else gradient
    dim %= part.dim()
    dy, y = (beside(func, each, part) for each in (gradient, output))
    if dim != part.dim_cut:
        return part.with_local(func(dy, y, *args[2:], **kwargs))
    if func._schema.name.endswith("_log_softmax_backward_data"):
        total = reduced(dy.sum(dim, True), part)
        dx = _reusing(_reusing(_reusing(y.exp(), "mul", total), "neg"), "add", dy)
    else:
        dx = y * (dy - reduced((dy * y).sum(dim, True), part))
    return part.with_local(dx if len(args) < 4 else dx.to(args[3]))


@rule("glu")
def glu(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `a * sigmoid(b)` of the halves of x along `dim`: of the cut one, where its halves are dealt alike."""
    part = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % part.dim()
    return part.with_local(func(part.local, dim), owners=_half(func, part, dim))


@rule("glu_backward")
def glu_backward(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the gradient of `glu(x, dim)`, cut like x."""
    gradient, x, dim = args
    part = x if is_part(x) else gradient
    dim %= part.dim()
    if dim != part.dim_cut:
        gradient, x = (beside(func, each, part) for each in (gradient, x))
        return part.with_local(func(gradient, x, dim))
    if not is_part(x):
        raise Uncut(no_rule(func, [part]))
    # along the cut dim: the gradient has the size of a half, and is dealt as one
    lead = x.with_local(x.local.narrow(dim, 0, x.local.shape[dim] // 2), owners=_half(func, x, dim))
    return x.with_local(func(beside(func, gradient, lead), x.local, dim))


def _half(func: Any, x: Part, dim: int) -> Owners | None:
    """Returns the owners of a half of x's cut dim; None where `dim` is another, `Uncut` where the halves differ."""
    if dim != x.dim_cut:
        return None
    first, second = (x.owners.sliced(low, low + x.owners.size // 2) for low in (0, x.owners.size // 2))
    if first != second:
        raise Uncut(no_rule(func, [x]))
    return first


def beside(func: Any, tensor: torch.Tensor, lead: Part) -> torch.Tensor:
    """Returns this rank's share of a tensor of `lead`'s shape, dealt as that: a gradient may arrive dealt otherwise."""
    if not is_part(tensor):
        return lead.share(tensor, lead.dim_cut)
    return dealt_as(tensor, lead, lead.dim_cut, str(func)).local


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns (output, mean, rstd) of a layer or RMS norm over last dims that are not cut, each cut as x is."""
    part, shape = args[0], args[1]
    if not is_part(part) or parts_in(args[2:]) or part.dim_cut >= part.dim() - len(shape):
        raise Uncut(f"a norm's statistics run over a cut dim ({no_rule(func, parts_in(args))})")
    return tuple(part.with_local(each) for each in func(part.local, *args[1:], **kwargs))


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns (dx cut like x, gradients of weight and bias as sums over ranks) of a layer or RMS norm."""
    part = args[1] if is_part(args[1]) else parts_in(args)[0]
    if part.dim_cut >= part.dim() - len(args[2]):
        raise Uncut(no_rule(func, parts_in(args)))

    def local(each: Any) -> Any:
        if is_part(each):
            return beside(func, each, part).contiguous()
        statistics = isinstance(each, torch.Tensor) and each.dim() == part.dim()
        # the kernel reads mean and rstd as if they were contiguous
        return part.share(each, part.dim_cut).contiguous() if statistics else each

    args = tuple(map(local, args))
    dx, *others = func(*args, **kwargs)
    sums = (None if o is None else Sum.of(o, part.axis, part.origin, spread=False) for o in others)
    return (None if dx is None else part.with_local(dx), *sums)


@rule("native_group_norm")
def group_norm(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns (output, mean, rstd) of x (N, C, ...) cut along N, or along C in whole groups, all cut alike."""
    x, w, b, n, channels, area, count, eps = args
    # rows are apart: each rank runs the kernel on fewer of them
    if _of_rows(x, w, b):
        rows = x.owners.counts[x.axis.index]
        results = func(x.local.contiguous(), w, b, rows, channels, area, count, eps)
        return tuple(x.with_local(each) for each in results)
    x = as_weights(x, w, b)
    groups = _group_owners(func, x, channels, count, args)
    rank = x.axis.index
    wl, bl = (None if t is None else t.local if is_part(t) else x.share(t, 0) for t in (w, b))
    y, mean, rstd = func(x.local.contiguous(), wl, bl, n, x.owners.counts[rank], area, groups.counts[rank], eps)
    return x.with_local(y), x.with_local(mean, 1, groups), x.with_local(rstd, 1, groups)


def as_weights(x: Any, *weights: Any) -> Any:
    """Returns x (N, C, ...); a whole one, as a pipeline stage is sent it, cut as the weights (C,) are."""
    lead = next(iter(parts_in(weights)), None)
    return x if is_part(x) or lead is None else lead.with_local(lead.share(x, 1), 1, lead.owners)


def _of_rows(x: Any, *weights: Any) -> bool:
    """Whether a group norm's rows are apart: x (N, C, ...) cut along N, as (B, S, C) is that is seen as (B * S, C)."""
    return is_part(x) and x.dim_cut == 0 and not parts_in(weights)


def _group_owners(func: Any, x: Any, channels: int, count: int, args: tuple):
    """Returns the owners of x's groups of channels; `Uncut` where a group lies on several ranks, or a rank has none."""
    if is_part(x) and x.dim_cut == 1:
        groups = x.owners.sliced(0, channels, channels // count)
        if repeated(groups, channels // count) == x.owners and all(groups.counts):
            return groups
    raise Uncut(f"a group norm's groups lie across ranks ({no_rule(func, parts_in(args))})")


@rule("native_group_norm_backward")
def group_norm_backward(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns gradients of a group norm's input, weight and bias, cut along channels; of rows, weights' are sums."""
    dy, x, mean, rstd, w, n, channels, area, count, mask = args
    if _of_rows(x, w):
        dy, mean, rstd = (beside(func, tensor, x).contiguous() for tensor in (dy, mean, rstd))
        rows = x.owners.counts[x.axis.index]
        dx, *others = func(dy, x.local.contiguous(), mean, rstd, w, rows, channels, area, count, mask)
        sums = (None if o is None else Sum.of(o, x.axis, x.origin, spread=False) for o in others)
        return (None if dx is None else x.with_local(dx), *sums)
    x = as_weights(x, w)
    groups = _group_owners(func, x, channels, count, args)
    rank = x.axis.index
    dy = beside(func, dy, x)
    wl = None if w is None else w.local if is_part(w) else x.share(w, 0)
    statistics = mean.local.contiguous(), rstd.local.contiguous()  # the kernel reads them as if they were
    sizes = n, x.owners.counts[rank], area, groups.counts[rank]
    dx, dw, db = func(dy.contiguous(), x.local.contiguous(), *statistics, wl, *sizes, mask)
    return tuple(None if tensor is None else x.with_local(tensor, d) for tensor, d in ((dx, 1), (dw, 0), (db, 0)))
