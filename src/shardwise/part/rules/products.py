"""Products of matrices and vectors, grouped products, linear layers; a `Sum` over ranks if the inner dim k is cut.

An activation's labels are united with those of a weight's inner dim, and the result has those of its outer dim.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gather
from shardwise.part.labels import Axes, Use, base, label, param_of, slim
from shardwise.part.levels import Distributed
from shardwise.part.moves import share_as
from shardwise.part.sums import Sum
from shardwise.part.tensor import Part, is_part, no_rule, parts_in, rule
from shardwise.part.tiles.windows import answers


def _product(func: Any, a: torch.Tensor, b: torch.Tensor, batch: int) -> torch.Tensor:
    """Returns a (..., m, k) @ b (..., k, n) with `batch` (0 or 1) batch dims; a `Sum` if k is cut, else a part."""
    if is_part(a) and is_part(b):
        a, b = _settled(func, a, b, batch)
    kind_a = a.dim_cut - batch if is_part(a) else None  # 0 m, 1 k, negative batch
    kind_b = b.dim_cut - batch if is_part(b) else None  # 0 k, 1 n
    lead = a if is_part(a) else b
    if not is_part(lead):  # what was cut has been gathered (`_settled`)
        return func(a, b)
    if (kind_a is not None and kind_a < 0) or (kind_b is not None and kind_b < 0):
        dim = lead.dim_cut
        return lead.with_local(func(share_as(a, lead, dim), share_as(b, lead, dim)), dim)
    if kind_a == 1 or kind_b == 0:
        # (B, S) of the input, by which a reduce-scatter of the sum can begin at once
        rows = a.rows if is_part(a) else None
        return Sum.of(func(share_as(a, lead, batch + 1), share_as(b, lead, batch)), lead.axis, lead.origin, rows=rows)
    if kind_a == 0:
        return a.with_local(func(a.local, b), batch)
    return b.with_local(func(a, b.local), batch + 1)


def _settled(func: Any, a: Part, b: Part, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (a, b) with cuts that a product can use, one of them gathered if they do not fit; else raises `Uncut`."""
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
    """Returns the product (m, k) @ (k, n), a part if m or n is cut, a `Sum` if k is."""
    return _product(func, args[0], args[1], 0)


@rule("bmm")
def bmm(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns the batched product (b, m, k) @ (b, k, n), a part if b, m or n is cut, a `Sum` if k is."""
    return _product(func, args[0], args[1], 1)


@rule("mv", "dot")
def vectors(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns the product with a vector (`mv`, `dot`), computed as with a matrix of one column."""
    a, b = args
    if func._schema.name == "aten::dot":
        return torch.mm(a.unsqueeze(0), b.unsqueeze(1)).view(())
    return torch.mm(a, b.unsqueeze(1)).squeeze(1)


@rule("_grouped_mm")
def grouped_mm(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns the grouped product (T, K) @ (G, K, N) -> (T, N), or (K, T) @ (T, N) -> (G, K, N).

    The offsets in `args` divide T into G groups. A `Sum` if K of the first is cut.
    """
    a, b, *rest = args
    lead = parts_in([a, b])[0]
    k_a, k_b = a.dim() - 1, b.dim() - 2
    cut_a = a.dim_cut if is_part(a) else None
    cut_b = b.dim_cut if is_part(b) else None
    by_offsets = a.dim() == 2 and b.dim() == 2  # the second form: offsets divide the contracted dim
    together = cut_a is None or cut_b is None or a.beside(b)
    if parts_in(rest) or parts_in(list(kwargs.values())):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    # cut along the contracted dim: each rank has a summand
    if not by_offsets and cut_a in (k_a, None) and cut_b in (k_b, None) and together:
        local = func(_packed(share_as(a, lead, k_a)), _packed(share_as(b, lead, k_b)), *rest, **kwargs)
        return Sum.of(local, lead.axis, lead.origin)
    # cut along the columns of b, or the rows of a that become the result's: local
    if cut_a is None and cut_b == b.dim() - 1:
        out = func(a, _packed(b.local), *rest, **kwargs)
        return b.with_local(out, out.dim() - 1)
    if by_offsets and cut_b is None and cut_a == 0:
        return a.with_local(func(_packed(a.local), b, *rest, **kwargs), 1)
    raise Uncut(no_rule(func, parts_in(args)))


def _packed(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the matrix, copied if neither of its last two dims has stride 1, which the kernel requires."""
    return matrix if 1 in matrix.stride()[-2:] else matrix.contiguous()


@rule("addmm", "baddbmm", "addmm_", "baddbmm_", "addbmm")
def addmm(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns beta * c + alpha * a @ b, written into c if `func` is in place; c is added once, not by each rank."""
    # it adds up the products of a batch too, which the ones below do not
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


@answers(F.linear, cut_once=False)
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `F.linear` of (..., K) and (N, K): (..., N); of cut positions the bias is added in an own operation.

    torch chooses by strides whether the bias is fused, and strides of shares of one row differ between ranks.
    """
    # chunks of positions (`turns`) are one rank's; of a matrix torch adds the bias in the product, however it lies
    cut = isinstance(input, Distributed) and input.axis.positions and not input.axis.turns
    if bias is None or not cut or input.dim() < 3:
        return F.linear(input, weight, bias)
    return F.linear(input, weight) + bias


def _product_labels(axes: Axes, a: torch.Tensor, b: torch.Tensor, output: torch.Tensor) -> bool:
    """Labels a (..., m, k) @ b (..., k, n); returns False if the inputs have to stay whole."""
    pa, pb = _weight(a), _weight(b)  # x @ w, or w @ x
    if pa is not None and pb is None:
        return _weighted(axes, b, a, output, k_of_x=-2, k_of_w=-1)
    if pb is not None and pa is None:
        return _weighted(axes, a, b, output, k_of_x=-1, k_of_w=-2)
    la, lb = axes.labels(a), axes.labels(b)
    # two activations (attention's scores): what is summed over lies on one rank, what remains meets
    if la is not None:
        la = axes.unite_along(la, [la.ndim - 1] if la.shape[-1] > 1 else [])
    if lb is not None:
        lb = axes.unite_along(lb, [lb.ndim - 2] if lb.shape[-2] > 1 else [])
    if la is not None and lb is not None:
        axes.unite(la, lb)
        axes.give(output, slim(np.broadcast_arrays(la, lb)[0]))
    elif la is not None or lb is not None:
        axes.give(output, la if la is not None else lb)
    return True


def _weight(tensor: torch.Tensor) -> tuple[str, tuple[Any, ...]] | None:
    """Returns `param_of(tensor)` if the tensor's last two dims are dims of a parameter, else None."""
    param = param_of(tensor)
    if param is None or tensor.dim() < 2 or None in param[1][-2:]:
        return None
    return param


def _weighted(axes: Axes, x: torch.Tensor, w: torch.Tensor, output: torch.Tensor, *, k_of_x: int, k_of_w: int) -> bool:
    """Labels the product of x with a weight: unites x's labels with w's inner dim, gives the output w's outer ones.

    k_of_x, k_of_w  their dim that is summed over, -1 or -2
    False if the plan keeps the weight whole (`tp_whole`) and x has labels along another dim than the summed one.
    """
    name, dims = param_of(w)  # type: ignore[misc]
    if name in axes.frozen:
        return _by_whole_weight(axes, x, output, k_of_x)
    inner, outer = dims[k_of_w], dims[-1 if k_of_w == -2 else -2]
    out_place = output.dim() - (1 if k_of_x == -1 else 2)
    # one matrix for each index of a batch dim: all ranks multiply by all of them
    if any(n > 1 for n in w.shape[:-2]):
        for dim in dims[:-2]:
            if dim is not None:
                axes.keep_whole(axes.vector(name, dim), "a batched product runs over it")
    labels = axes.labels(x)
    k = x.dim() + k_of_x
    seeds = axes.vector(name, inner), axes.vector(name, outer)
    if labels is not None and any(n > 1 for d, n in enumerate(labels.shape) if d != k):
        # the same weight for each of many labels (a projection inside every head): it is whole
        rest = axes.unite_along(labels, [k] if labels.shape[k] > 1 else [])
        for seed in seeds:
            axes.keep_whole(seed, "it is applied inside each of several cut indices")
        axes.give(output, np.moveaxis(rest, k, out_place) if k != out_place else rest)
        return True
    if labels is not None:
        axes.unite(labels.ravel(), seeds[0])
    else:
        axes.keep_whole(seeds[0], "its input is whole")
    shape = [1] * output.dim()
    shape[out_place] = -1
    axes.give(output, seeds[1].reshape(shape))
    axes.uses.append(Use(name, "product", base(inner), base(outer), axes.modules[-1] if axes.modules else ""))
    return True


def _by_whole_weight(axes: Axes, x: torch.Tensor, output: torch.Tensor, k_of_x: int) -> bool:
    """Whether the activation x has no labels, or along the summed dim alone, beside a weight that stays whole."""
    labels = axes.labels(x)
    k = x.dim() + k_of_x
    return labels is None or all(n == 1 for d, n in enumerate(labels.shape) if d != k)


@label("mm", "bmm")
def mm_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels a matrix product (`_product_labels`); returns False if its inputs have to stay whole."""
    return _product_labels(axes, args[0], args[1], output)


@label("addmm", "baddbmm")
def addmm_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels a product, united with the labels of its bias; False if the product's inputs have to stay whole."""
    done = _product_labels(axes, args[1], args[2], output)
    bias, product = axes.labels(args[0]), getattr(output, "_axis_labels", None)
    if bias is not None and product is not None:
        axes.unite(bias.reshape([1] * (output.dim() - bias.ndim) + list(bias.shape)), product)
    elif bias is not None:
        axes.keep_whole(bias, "it is added to a whole tensor")
    return done


@label("_grouped_mm")
def grouped_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels x (T, K) @ w (G, K, N) as `_weighted` does; False for other shapes, or if w is no parameter."""
    x, w = args[:2]
    if _weight(w) is None or w.dim() != 3 or x.dim() != 2:
        return False
    return _weighted(axes, x, w, output, k_of_x=-1, k_of_w=-2)
