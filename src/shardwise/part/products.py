"""Rules of matrix products and convolutions. Labels: trace/axis_rules/products; tiles: parallel/domain/convolve."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.cuts import Uncut, repeated
from shardwise.part.gathering import gather
from shardwise.part.moves import dealt_as
from shardwise.part.sums import Sum
from shardwise.part.tensor import Part, is_part, no_rule, parts_in, rule


def _product(func: Any, a: torch.Tensor, b: torch.Tensor, batch: int) -> torch.Tensor:
    """Returns a (..., m, k) @ b (..., k, n) with `batch` batch dims: a `Sum` where k is cut, else a part."""
    if is_part(a) and is_part(b):
        a, b = _settled(func, a, b, batch)
    kind_a = a.dim_cut - batch if is_part(a) else None  # 0 m, 1 k, negative batch
    kind_b = b.dim_cut - batch if is_part(b) else None  # 0 k, 1 n
    lead = a if is_part(a) else b
    if not is_part(lead):
        return func(a, b)
    if (kind_a is not None and kind_a < 0) or (kind_b is not None and kind_b < 0):
        dim = lead.dim_cut
        return lead.with_local(func(_share(a, lead, dim), _share(b, lead, dim)), dim)
    if kind_a == 1 or kind_b == 0:
        # (B, S) of the input, by which a reduce-scatter of the sum can begin at once
        rows = a.rows if is_part(a) else None
        return Sum.of(func(_share(a, lead, batch + 1), _share(b, lead, batch)), lead.axis, lead.origin, rows=rows)
    if kind_a == 0:
        return a.with_local(func(a.local, b), batch)
    return b.with_local(func(a, b.local), batch + 1)


def _share(tensor: torch.Tensor, lead: Part, dim: int) -> torch.Tensor:
    """Returns this rank's share of an input along `dim`, dealt like `lead`."""
    if not is_part(tensor):
        return lead.share(tensor, dim)
    return dealt_as(tensor, lead, dim, "a product").local


def _settled(func: Any, a: Part, b: Part, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two parts as they can be multiplied: a soft one that is cut along another dim is gathered."""
    same_batch = a.dim_cut == b.dim_cut < batch
    contracted = a.dim_cut == batch + 1 and b.dim_cut == batch
    if (same_batch or contracted) and (a.beside(b) or (a.axis.positions and a.axis is b.axis)):
        return a, b  # what lies otherwise is fetched
    # sequence parallelism: gathering it is part of the plan
    if a.may_gather:
        return gather(a), b
    if b.may_gather:
        return a, gather(b)
    if a.axis.positions and a.axis is b.axis:  # scores that are written out: rows of all positions, or all rows of some
        return (gather(a), b) if a.dim_cut == batch + 1 else (a, gather(b))
    raise Uncut(f"a product of tensors cut along different dims ({no_rule(func, [a, b])})")


@rule("mm")
def mm(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns the product (m, k) @ (k, n), local where outer dims are cut, a `Sum` where k is."""
    return _product(func, args[0], args[1], 0)


@rule("bmm")
def bmm(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of batched products, (b, m, k) @ (b, k, n)."""
    return _product(func, args[0], args[1], 1)


@rule("mv", "dot")
def vectors(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of products with vectors: done as with matrices of one column."""
    a, b = args
    if func._schema.name == "aten::dot":
        return torch.mm(a.unsqueeze(0), b.unsqueeze(1)).view(())
    return torch.mm(a, b.unsqueeze(1)).squeeze(1)


@rule("_grouped_mm")
def grouped_mm(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of groups of rows times their matrices: (T, K) @ (G, K, N) by offsets, or (K, T) @ (T, N) -> (G, K, N)."""
    a, b, *rest = args
    lead = parts_in([a, b])[0]
    k_a, k_b = a.dim() - 1, b.dim() - 2
    cut_a = a.dim_cut if is_part(a) else None
    cut_b = b.dim_cut if is_part(b) else None
    by_offsets = a.dim() == 2 and b.dim() == 2  # the contracted dim is the one that offsets divide
    together = cut_a is None or cut_b is None or a.beside(b)
    if parts_in(rest) or parts_in(list(kwargs.values())):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    if not by_offsets and cut_a in (k_a, None) and cut_b in (k_b, None) and together:
        local = func(_packed(_share(a, lead, k_a)), _packed(_share(b, lead, k_b)), *rest, **kwargs)
        return Sum.of(local, lead.axis, lead.origin)
    if cut_a is None and cut_b == b.dim() - 1:
        out = func(a, _packed(b.local), *rest, **kwargs)
        return b.with_local(out, out.dim() - 1)
    if by_offsets and cut_b is None and cut_a == 0:
        return a.with_local(func(_packed(a.local), b, *rest, **kwargs), 1)
    raise Uncut(no_rule(func, parts_in(args)))


def _packed(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the matrix with one of its last two dims at stride 1, as the kernel asks."""
    return matrix if 1 in matrix.stride()[-2:] else matrix.contiguous()


@rule("addmm", "baddbmm", "addmm_", "baddbmm_", "addbmm")
def addmm(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of beta * c + alpha * a @ b, in place too; a bias is added after the sum over ranks, once."""
    if func._schema.name == "aten::addbmm":
        raise Uncut(no_rule(func, parts_in(args)))
    c, a, b = args[:3]
    product = torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    if alpha != 1:
        product = product * alpha
    # written in place: the sum over ranks is taken now
    if func._schema.is_mutable:
        return (c.mul_(beta) if beta else c.zero_()).add_(product)
    # c is then not read, and may hold anything: 0 * NaN would be NaN
    if beta == 0:
        return product
    return product + (c if beta == 1 else c * beta)


@rule("convolution")
def convolution(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Rule of x (N, C, ...) * w (O, C/g, ...), cut by samples, output channels, input channels, or whole groups.

    A transposed one has w (C, O, ...), and is cut by output or by input channels.
    """
    x, w, b, stride, padding, dilation, transposed, output_padding, g = args
    rest = (stride, padding, dilation, transposed, output_padding)
    outer, inner = _channels(func, args, transposed, g)
    x = _by_groups(x, w, g)
    x_cut = x.dim_cut if is_part(x) else None
    w_cut = w.dim_cut if is_part(w) else None
    # by samples
    if x_cut == 0 and w_cut is None:
        return x.with_local(func(x.local, w, b, *rest, g), 0)
    # by output channels: each rank makes its own of the whole input
    if g == 1 and x_cut is None and w_cut == outer:
        bias = b.local if is_part(b) else None if b is None else w.share(b, 0)
        return w.with_local(func(x, w.local, bias, *rest, 1), 1)
    # by input channels: a sum over ranks, to which the bias is added once
    if g == 1 and w_cut in (inner, None) and x_cut in (1, None) and (w_cut is None or x_cut is None or x.beside(w)):
        lead = w if is_part(w) else x
        local = _convolved(func, _share(x, lead, 1), _share(w, lead, inner), (x, w), rest)
        total = Sum.of(local, lead.axis, lead.origin, spread=False)
        return total if b is None else total + b.view(-1, *([1] * (total.dim() - 2)))
    # depthwise, each rank has whole groups: channels of input and output alike
    if g > 1 and x_cut == 1 and w_cut == 0 and x.shape[1] == g and w.owners == repeated(x.owners, w.shape[0] // g):
        bias = b.local if is_part(b) else None if b is None else w.share(b, 0)
        return w.with_local(func(x.local, w.local, bias, *rest, x.local.shape[1]), 1)
    raise Uncut(no_rule(func, parts_in(args)))


def _by_groups(x: torch.Tensor, w: torch.Tensor, g: int) -> torch.Tensor:
    """Returns x for a depthwise convolution: a whole one (as a pipeline stage is sent it) cut as the weight is."""
    if g == 1 or is_part(x) or not is_part(w) or w.dim_cut != 0 or x.shape[1] != g:
        return x
    groups = w.owners.sliced(0, w.shape[0], w.shape[0] // g)
    return w.with_local(groups.take(x, 1, w.axis.index), 1, groups)


def _convolved(func: Any, x: torch.Tensor, w: torch.Tensor, whole: tuple, rest: tuple) -> torch.Tensor:
    """Returns the convolution of shares of input channels; zeros of its shape on a rank that has none."""
    if x.shape[1]:
        return func(x, w, None, *rest, 1)
    empty = (torch.empty(each.shape, device="meta") for each in whole)
    return x.new_zeros(func(*empty, None, *rest, 1).shape)


@rule("convolution_backward")
def convolution_backward(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns the gradients of input, weight and bias of a convolution with the cuts of `convolution`."""
    dy, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, g, mask = args
    rest = (stride, padding, dilation, transposed, output_padding)
    outer, inner = _channels(func, args, transposed, g)
    lead = parts_in([w]) or parts_in([x]) or parts_in([dy])
    part = lead[0]
    w_cut = w.dim_cut if is_part(w) else None
    if w_cut == outer and g == 1:  # by output channels: dx is a sum over ranks
        local = None if bias_sizes is None else [w.local.shape[outer]]
        dx, dw, db = func(_share(dy, w, 1), x, w.local, local, *rest, 1, mask)
        dx = Sum.of(dx, w.axis, w.origin, spread=False) if dx is not None and mask[0] else None
        dw = None if dw is None else w.with_local(dw, outer)
        return dx, dw, None if db is None else w.with_local(db, 0)
    if w_cut == 0 and g > 1:  # depthwise
        x = _by_groups(x, w, g)
        local = None if bias_sizes is None else [w.local.shape[0]]
        dx, dw, db = func(_share(dy, w, 1), x.local, w.local, local, *rest, x.local.shape[1], mask)
        dx = x.with_local(dx, 1) if mask[0] else None
        return dx, *(None if gradient is None else w.with_local(gradient, 0) for gradient in (dw, db))
    # by input channels
    if g == 1 and not is_part(dy) and (w_cut == inner or (is_part(x) and x.dim_cut == 1)):
        xl, wl = _share(x, part, 1), _share(w, part, inner)
        if xl.shape[1]:
            dx, dw, db = func(dy, xl, wl, bias_sizes, *rest, 1, mask)
        else:
            # kernels take no tensor without channels; the bias has its whole gradient on every rank
            dx, dw, db = torch.zeros_like(xl), torch.zeros_like(wl), dy.sum([0, *range(2, dy.dim())])
        dx = part.with_local(dx, 1) if mask[0] else None
        return dx, part.with_local(dw, inner) if mask[1] else None, db
    if w_cut is None and part.dim_cut == 0:  # by samples
        dx, dw, db = func(_share(dy, part, 0), _share(x, part, 0), w, bias_sizes, *rest, g, mask)
        dx = part.with_local(dx, 0) if mask[0] else None
        sums = (Sum.of(gradient, part.axis, part.origin, spread=False) if m else None
                for gradient, m in zip((dw, db), mask[1:], strict=True))  # fmt: skip
        return dx, *sums
    raise Uncut(no_rule(func, parts_in(args)))


def _channels(func: Any, args: tuple, transposed: bool, groups: int) -> tuple[int, int]:
    """Returns the weight's (dim of output channels, dim of input channels)."""
    if transposed and groups > 1:
        raise Uncut(no_rule(func, parts_in(args)))
    return (1, 0) if transposed else (0, 1)
