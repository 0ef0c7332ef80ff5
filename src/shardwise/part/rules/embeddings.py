"""Look-ups in a table (V, H) (`F.embedding`): cut along V a `Sum`, to which a row's owner adds it; cut along H local.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gather
from shardwise.part.labels import Axes, Use, label
from shardwise.part.moves import share_as
from shardwise.part.rules.indexing import check_range, owned_alone, place_of, with_one_more
from shardwise.part.rules.products import _weight
from shardwise.part.sums import Sum, plain
from shardwise.part.tensor import FUNCTIONS, Part, is_part, no_rule, parts_in, rule


@rule("embedding")
def embedding(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns the rows of w (V, H) at `index`: a `Sum` if w is cut along V, a part if w along H or the index is cut."""
    weight, index = args[:2]
    if is_part(index) and not is_part(weight):  # rows of a whole table for this rank's indices
        return index.with_local(func(weight, index.local, *args[2:], **kwargs))
    if not is_part(weight) or is_part(index):
        raise Uncut(no_rule(func, parts_in(args)))
    if weight.dim_cut == 1:
        return weight.with_local(func(weight.local, index), index.dim())
    check_range(index, weight.shape[0], "index")
    owned, place = place_of(weight, index)
    # a rank without rows reads one of zeros
    rows = weight.local if weight.local.shape[0] else with_one_more(weight.local, 0)
    return Sum.of(owned_alone(rows[place], owned.unsqueeze(-1)), weight.axis, weight.origin)


class _Rows(torch.autograd.Function):
    """`embedding` in a table cut along V, whose backward makes the gradient of this rank's rows alone.

    ATen's backward of an embedding does not get the table, so it would make the gradient of all rows on every rank.
    """

    @staticmethod
    def forward(ctx, weight: Part, index: torch.Tensor, padding: int) -> torch.Tensor:
        ctx.save_for_backward(weight, index)
        ctx.padding = padding
        return torch.ops.aten.embedding.default(weight.detach(), index, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        """Returns the gradient of the table, cut as it is: each rank's own rows."""
        weight, index = ctx.saved_tensors
        owned, place = place_of(weight, index)
        owned = owned & (index != ctx.padding) if ctx.padding >= 0 else owned
        rows = owned_alone(plain(gradient), owned.unsqueeze(-1)).to(weight.dtype).reshape(-1, weight.shape[1])
        local = torch.zeros_like(weight.local)
        if local.shape[0]:
            local.index_add_(0, place.flatten(), rows)
        return weight.with_local(local), None, None


def rows_of(
    index: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Returns `F.embedding(index, weight, ...)` if either is cut; by `_Rows` if the table is cut along V."""
    by_rows = is_part(weight) and weight.dim_cut == 0 and not is_part(index)
    # max_norm renews rows in place, and scale_grad_by_freq counts indices in backward: left to ATen's operation
    if not by_rows or max_norm is not None or scale_grad_by_freq:
        return F.embedding(index, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _Rows.apply(weight, index, padding)


FUNCTIONS[F.embedding] = rows_of


@rule("embedding_dense_backward")
def embedding_dense_backward(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns a table's gradient (V, H), cut along H as the table is; a `Sum` if ranks read a whole table."""
    gradient, index = args[:2]
    # the table is cut along H, and each rank has its columns of the gradient
    if is_part(gradient) and gradient.dim_cut == gradient.dim() - 1 and not is_part(index):
        return gradient.with_local(func(gradient.local, *args[1:], **kwargs), 1)
    # args[4] is scale_grad_by_freq, which divides by how often an index is read on all ranks
    if is_part(gradient) and gradient.dim_cut < index.dim() and not args[4]:
        mine = share_as(index, gradient, gradient.dim_cut, func)
        return Sum.of(func(gradient.local, mine, *args[2:], **kwargs), gradient.axis, gradient.origin, spread=False)
    # the gradient is whole, so every rank needs all indices that it belongs to
    if is_part(index) and not is_part(gradient):
        return func(gradient, gather(index), *args[2:], **kwargs)
    raise Uncut(no_rule(func, parts_in(args)))


@label("embedding")
def embedding_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels the result by the table's columns (H); False if the table is no parameter, or the index has labels."""
    param = _weight(args[0])
    # an index with labels may be cut as well: a rank would look up its part of the rows alone
    if param is None or getattr(args[1], "_axis_labels", None) is not None:
        return False
    name, (rows, columns) = param
    if name in axes.frozen:  # the plan keeps the table whole: its rows carry no labels
        return True
    axes.give(output, axes.seeds[name, columns].reshape([1] * (output.dim() - 1) + [-1]))
    axes.uses.append(Use(name, "rows", rows, columns, axes.modules[-1] if axes.modules else ""))
    return True
