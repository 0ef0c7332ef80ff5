"""Rules of losses, embeddings and `gather` over cut classes. Their labels: trace/axis_rules/products, reductions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from shardwise.host import has_values, require, to_device
from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gather, reduced
from shardwise.part.levels import Distributed
from shardwise.part.moves import dealt_as, reowned
from shardwise.part.sums import Sum, plain
from shardwise.part.tensor import FUNCTIONS, Part, is_part, no_rule, parts_in, rule


def _place_of(part: Part, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (whether this rank owns each index of the cut dim, its place among its own; 0 where it does not)."""
    mine = to_device(part.owners.indices(part.axis.index), index.device)
    if not len(mine):
        return torch.zeros_like(index, dtype=torch.bool), torch.zeros_like(index)
    # what is not among this rank's own gets some place that can be read; `owned` says that it counts for nothing
    place = torch.searchsorted(mine, index.contiguous()).clamp_(max=len(mine) - 1)
    owned = mine[place] == index
    return owned, torch.where(owned, place, torch.zeros_like(place))


def with_one_more(local: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns a share with one more index of zeros behind its own, which stands for what other ranks have."""
    return torch.ops.aten.constant_pad_nd.default(local, [0, 0] * (local.dim() - 1 - dim) + [0, 1])


def _check_range(index: torch.Tensor, size: int, what: str, ignored: int | None = None) -> None:
    """Raises as one process would, where an index lies on no rank. Values on a GPU are asserted without waiting."""
    if isinstance(index, Distributed) or not has_values(index) or not index.numel():
        return  # of an index that an axis further in cuts too, to read this would take collectives
    wrong = (index < 0) | (index >= size)
    if ignored is not None:
        wrong = wrong & (index != ignored)
    require(~wrong.any(), lambda: IndexError(f"{what} {int(index[wrong][0])} is out of range: there are {size}"))


def _without(dim: int, gone: int) -> int:
    """Returns a dim's place once dim `gone` is removed."""
    return dim - (dim > gone)


def _beside(x: Part, tensor: torch.Tensor, classes: int) -> torch.Tensor:
    """Returns this rank's share of a tensor with the dims of `x` but that of the classes."""
    place = _without(x.dim_cut, classes)
    if is_part(tensor):
        if tensor.dim_cut != place:
            raise Uncut(f"a loss of tensors that are cut differently ({x!r}, {tensor!r})")
        return reowned(tensor, x.owners).local
    return x.share(tensor, place)


def _total_weight(x: Part, target: torch.Tensor, weight: Any, ignored: int, classes: int) -> torch.Tensor:
    """Returns the divisor of a mean over all ranks' targets. Collective where targets are cut."""
    # ranks that have all targets count them all, without a message
    mine = _beside(x, target, classes) if is_part(target) else target
    counted = (mine != ignored).to(x.dtype)
    if weight is not None:
        counted = counted * weight[mine.clamp(0, x.shape[classes] - 1)]
    return reduced(counted.sum(), x) if is_part(target) else counted.sum()


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(func: Any, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (loss, total weight) of x (N, C, ...) log-probabilities, cut along C or along N."""
    x, target, weight, reduction, ignored = args
    classes = 0 if x.dim() == 1 else 1
    if is_part(x) and x.dim_cut != classes and not parts_in([weight]):
        # cut along samples or positions, all classes here; a mean is over all ranks' targets, so the sum comes first
        value, total = func(x.local, _beside(x, target, classes), weight, 0 if reduction == 0 else 2, ignored)
        if reduction == 0:
            return x.with_local(value, _without(x.dim_cut, classes)), total
        if reduction == 2:  # whose backward reads no total
            return reduced(value, x), torch.zeros((), dtype=x.dtype, device=x.device)
        total = _total_weight(x, target, weight, ignored, classes)
        return reduced(value / total, x), total
    if not is_part(x) or parts_in([target, weight]):
        raise Uncut(no_rule(func, parts_in(args)))
    counts = target != ignored
    _check_range(target, x.shape[classes], "target", ignored)
    # cut along classes: one rank has the log-probability of a target, and the others add zero to it
    owned, place = _place_of(x, target)
    row = x.local.gather(classes, place.unsqueeze(classes)).squeeze(classes) if x.local.shape[classes] else None
    mine = torch.zeros(target.shape, dtype=x.dtype, device=x.device) if row is None else row * (owned & counts)
    target_weight = weight[target.clamp(min=0)] if weight is not None else torch.ones_like(target, dtype=x.dtype)
    target_weight = target_weight * counts
    losses = -reduced(mine, x) * target_weight
    total = target_weight.sum()
    if reduction == 0:
        return losses, total.new_zeros(())
    return (losses.sum() / total if reduction == 1 else losses.sum()), total


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the gradient of the log-probabilities: minus the weight of the target's class at its place, else zero."""
    gradient, x, target, weight, reduction, ignored, total = args
    classes = 0 if x.dim() == 1 else 1
    if is_part(x) and x.dim_cut != classes:
        local = _beside(x, gradient, classes) if reduction == 0 else gradient
        return x.with_local(func(local, x.local, _beside(x, target, classes), weight, reduction, ignored, total))
    if not is_part(x) or is_part(gradient):
        raise Uncut(no_rule(func, parts_in(args)))
    owned, place = _place_of(x, target)
    owned = owned & (target != ignored)
    target_weight = (
        weight[target.clamp(min=0)] if weight is not None else torch.ones(target.shape, dtype=x.dtype, device=x.device)
    )
    scale = -(gradient * target_weight) / (total if reduction == 1 else 1)
    dx = torch.zeros_like(x.local)
    if dx.shape[classes]:
        dx.scatter_add_(classes, place.unsqueeze(classes), (scale * owned).to(dx.dtype).unsqueeze(classes))
    return x.with_local(dx)


@rule("embedding")
def embedding(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns rows of w (V, H): cut along V a sum, to which one rank adds each row; cut along H local."""
    weight, index = args[:2]
    if is_part(index) and not is_part(weight):  # rows of a whole table for this rank's indices
        return index.with_local(func(weight, index.local, *args[2:], **kwargs))
    if not is_part(weight) or is_part(index):
        raise Uncut(no_rule(func, parts_in(args)))
    if weight.dim_cut == 1:
        return weight.with_local(func(weight.local, index), index.dim())
    _check_range(index, weight.shape[0], "index")
    owned, place = _place_of(weight, index)
    # a rank without rows reads one of zeros
    rows = weight.local if weight.local.shape[0] else with_one_more(weight.local, 0)
    return Sum.of(rows[place] * owned.unsqueeze(-1), weight.axis, weight.origin)


class _Rows(torch.autograd.Function):
    """`embedding` of a table cut by rows, whose gradient is made for this rank's rows alone.

    ATen's backward of an embedding is not given the table, and would make the gradient of all rows on every rank.
    """

    @staticmethod
    def forward(ctx, weight: Part, index: torch.Tensor, padding: int) -> torch.Tensor:
        ctx.save_for_backward(weight, index)
        ctx.padding = padding
        return torch.ops.aten.embedding.default(weight.detach(), index, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        weight, index = ctx.saved_tensors
        owned, place = _place_of(weight, index)
        owned = owned & (index != ctx.padding) if ctx.padding >= 0 else owned
        rows = (plain(gradient) * owned.unsqueeze(-1)).to(weight.dtype).flatten(0, index.dim() - 1)
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
    """Returns `F.embedding(indices, table)` of a table or indices that are cut."""
    by_rows = is_part(weight) and weight.dim_cut == 0 and not is_part(index)
    # max_norm renews rows in place, and scale_grad_by_freq counts indices in backward: left to ATen's operation
    if not by_rows or max_norm is not None or scale_grad_by_freq:
        return F.embedding(index, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _Rows.apply(weight, index, padding)


FUNCTIONS[F.embedding] = rows_of


def entries_here(x: Part, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Returns `x.gather(dim, index)` along the cut dim, plain. Collective."""
    owned, place = _place_of(x, index)
    # a rank without indices reads zeros
    local = x.local if x.local.shape[dim] else with_one_more(x.local, dim)
    return reduced(local.gather(dim, place) * owned, x)


def added_here(func: Any, x: Part, dim: int, index: torch.Tensor, values: torch.Tensor) -> Part:
    """Returns `x.scatter_add(dim, index, values)` along the cut dim, of plain values, each added at its owner."""
    owned, place = _place_of(x, index)
    local = x.local
    if local.shape[dim]:
        local = func(local, dim, place, values * owned)
    return x if func._schema.is_mutable else x.with_local(local)


class _Entries(torch.autograd.Function):
    """Differentiable `x.gather(dim, index)` along the cut dim: an entry's gradient goes to the rank that owns it."""

    @staticmethod
    def forward(ctx, x: Part, dim: int, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.like, ctx.dim = x.shell(), dim
        return entries_here(x, dim, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        (index,), x = ctx.saved_tensors, ctx.like
        owned, place = _place_of(x, index)
        local = torch.zeros_like(x.local)
        if local.shape[ctx.dim]:
            local.scatter_add_(ctx.dim, place, plain(gradient) * owned)
        return x.with_local(local), None, None


def entries_of(x: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Returns `x.gather(dim, index)` of a part."""
    if not is_part(x) or is_part(index) or dim % x.dim() != x.dim_cut or kwargs:
        return torch.gather(x, dim, index, **kwargs)
    return _Entries.apply(x, dim % x.dim(), index)


FUNCTIONS[torch.gather] = FUNCTIONS[torch.Tensor.gather] = entries_of


@rule("embedding_dense_backward")
def embedding_dense_backward(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """The gradient of a table: of one cut by columns, its columns; of a whole one whose rows were read by index on
    several ranks, a sum.
    """
    gradient, index = args[:2]
    if is_part(gradient) and gradient.dim_cut == gradient.dim() - 1 and not is_part(index):
        return gradient.with_local(func(gradient.local, *args[1:], **kwargs), 1)
    # args[4] is scale_grad_by_freq, which divides by how often an index is read on all ranks
    if is_part(gradient) and gradient.dim_cut < index.dim() and not args[4]:
        if is_part(index):
            index = dealt_as(index, gradient, gradient.dim_cut, str(func))
        mine = index.local if is_part(index) else gradient.share(index, gradient.dim_cut)
        return Sum.of(func(gradient.local, mine, *args[2:], **kwargs), gradient.axis, gradient.origin, spread=False)
    if is_part(index) and not is_part(gradient):
        return func(gradient, gather(index), *args[2:], **kwargs)
    raise Uncut(no_rule(func, parts_in(args)))
