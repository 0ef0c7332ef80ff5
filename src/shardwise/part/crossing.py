"""Convert a distributed tensor to this rank's plain share and its cuts, to send it between pipeline stages, and back.

    Part[cp, dim 1] of (B, S/cp, H)  --taken_apart-->  (B, S/cp, H) and its cuts  ==> ... --put_together-->  the part

Both stages hold positions alike. Cuts over other axes (tensor parallelism) are gathered before a message; cuts over
positions stay, so that a message is a share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch

from shardwise.comm import Axis
from shardwise.part.assigned import Written, now_of, stand_for
from shardwise.part.cuts import Owners
from shardwise.part.levels import Distributed
from shardwise.part.moves import share_of
from shardwise.part.sums import Sum, linear, plain, redealt
from shardwise.part.tensor import Part

Along = tuple[tuple[str, int], ...]  # (name of an axis, dim) of each cut, outermost first
Cuts = tuple[tuple[str, int, Owners], ...]  # (name of an axis, dim, owners) of each cut, outermost first


def _parts_of(tensor: torch.Tensor) -> Iterator[Part]:
    """Yields the part over each axis of positions that cuts a tensor, outermost first. Reduces sums over such axes."""
    while isinstance(tensor, Distributed) and tensor.axis.positions:
        tensor = tensor.settled()
        if isinstance(tensor, Part) and tensor.axis.positions:
            yield tensor
            tensor = tensor.local


def cuts_of(tensor: torch.Tensor) -> Cuts:
    """Returns (axis name, dim, owners) of each cut over an axis of positions, outermost first.

    Collective if the tensor is a sum over such an axis.
    """
    return tuple((part.axis.name, part.dim_cut, part.owners) for part in _parts_of(tensor))


def axes_of(tensor: torch.Tensor) -> tuple[Axis, ...]:
    """Returns the axes of positions that cut a tensor, outermost first. Collective if it is a sum over such an axis."""
    return tuple(part.axis for part in _parts_of(tensor))


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with sums reduced and every cut gathered except those of positions. Collective."""
    if isinstance(tensor, Distributed) and tensor.axis.positions:
        tensor = tensor.settled()
        if isinstance(tensor, Part) and tensor.axis.positions:
            return tensor.with_local(_settled(tensor.local))
    return plain(tensor)


def settled(tensor: Any) -> Any:
    """Returns, differentiably, the tensor cut over axes of positions alone, with every `Sum` reduced. Collective."""
    tensor = now_of(tensor)
    return redealt(tensor, _settled) if isinstance(tensor, Distributed) else tensor


def taken_apart(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's plain share of a tensor whose sums were reduced by `settled`."""
    while isinstance(tensor, Distributed):
        tensor = tensor.settled_local()
    return tensor


def put_together(payload: torch.Tensor, cuts: Cuts, axes: Iterable[Axis]) -> torch.Tensor:
    """Returns the `Part`, cut over `axes` as `cuts` says, whose share on this rank is the plain `payload`."""
    by_name = {axis.name: axis for axis in axes}
    # the innermost first; integers and masks of positions are small enough to be gathered where no rule is
    for name, dim, owners in reversed(cuts):
        payload = Part(payload, dim, owners, by_name[name], may_gather=not payload.is_floating_point())
    return payload


def dealt_beside(whole: torch.Tensor, part: Part) -> Part | None:
    """Returns the plain vector `whole` as a part with the owners of the cut dim of `part`.

    None if positions cut several dims of `part`.
    """
    cuts, axes, local = cuts_of(part), axes_of(part), whole
    if len({dim for _, dim, _ in cuts}) != 1:
        return None
    for (_, _, owners), axis in zip(cuts, axes, strict=True):
        local = owners.take(local, 0, axis.index)
    dealt = tuple((name, 0, owners) for name, _, owners in cuts)
    return cast(Part, put_together(local.contiguous(), dealt, axes))


def share_under(tensor: torch.Tensor, cuts: Cuts, axes: Iterable[Axis]) -> torch.Tensor:
    """Returns this rank's plain share of a tensor under `cuts`. Collective if it is a sum or cut otherwise."""
    by_name = {axis.name: axis for axis in axes}
    for name, dim, owners in cuts:
        tensor = share_of(tensor, dim, owners, by_name[name])
    return plain(tensor)


def apart(tensor: torch.Tensor, cuts: Cuts, axes: Sequence[Axis]) -> torch.Tensor:
    """Returns, differentiably, this rank's plain share under `cuts`; with () `settled(tensor)`, still cut as it is.

    Collective if the tensor is a sum or cut otherwise than `cuts`.
    """
    if not cuts:
        return settled(tensor)
    there, back = partial(share_under, cuts=cuts, axes=axes), partial(put_together, cuts=cuts, axes=axes)
    return linear(tensor, there, back, once=True)


def joined(payload: torch.Tensor, cuts: Cuts, axes: Sequence[Axis]) -> torch.Tensor:
    """Returns, differentiably, the tensor cut by `cuts` of which this rank holds the plain `payload`."""
    if not cuts:
        return payload
    return linear(payload, partial(put_together, cuts=cuts, axes=axes),
                  lambda gradient: share_under(gradient, cuts, axes).contiguous(), once=True)  # fmt: skip


def on_shares(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Applies `function` to this rank's plain share; returns its result with the same cuts. Differentiable.

    `function` keeps the cut dims, their length and the order of their indices.
    """
    cuts, axes = (cuts_of(tensor), axes_of(tensor)) if isinstance(tensor, Distributed) else ((), ())
    return joined(function(apart(tensor, cuts, axes)), cuts, axes)


def _dealt(tensor: torch.Tensor, cuts: Cuts, axes: Sequence[Axis]) -> torch.Tensor:
    return put_together(share_under(tensor, cuts, axes).contiguous(), cuts, axes)


def entering(tensor: torch.Tensor, cuts: Cuts, axes: Sequence[Axis]) -> torch.Tensor:
    """Returns, differentiably, a plain tensor cut into shares; its gradient is gathered. Collective in backward."""
    return linear(tensor, partial(_dealt, cuts=cuts, axes=axes), plain, once=True)


def leaving(tensor: torch.Tensor, cuts: Cuts, axes: Sequence[Axis]) -> torch.Tensor:
    """Returns, differentiably, a cut tensor gathered; each rank takes its share of the gradient. Collective."""
    return linear(tensor, plain, partial(_dealt, cuts=cuts, axes=axes), once=True)


def filled(
    shape: Sequence[int], value: float, along: Along, axes: Iterable[Axis], beside: Sequence[torch.Tensor],
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Returns a part of the whole shape `shape` filled with `value`; `options` as of `torch.full`.

    along   (axis name, dim) of each cut, outermost first
    beside  distributed tensors: a dim of the length of one of their cut dims gets its owners, others get blocks
    """
    by_name = {axis.name: axis for axis in axes}
    owners_by_axis = {(name, owners.size): owners for tensor in beside for name, _, owners in cuts_of(tensor)}
    local, cuts = list(shape), []
    for name, dim in along:
        axis = by_name[name]
        # a dim of the same length is dealt as it is beside, so that both meet without a message (zigzag)
        owners = owners_by_axis.get((name, local[dim])) or Owners.blocks(local[dim], axis.size)
        local[dim] = owners.counts[axis.index]
        cuts.append((name, dim, owners))
    return put_together(torch.full(local, value, **options), tuple(cuts), by_name.values())


def overwrite(tensor: torch.Tensor, value: torch.Tensor, axes: Sequence[Axis]) -> None:
    """Gives the object `tensor` the values of `value` (same whole shape, cut over none but `axes`, of positions)."""
    # a plain tensor that stands for a distributed one, and has no memory of its own
    if isinstance(tensor, Written):
        stand_for(tensor, value)
    elif not isinstance(tensor, Distributed):
        tensor.data = plain(value)
    elif isinstance(tensor, Sum):
        # waits for what is under way, which would write into the summand later
        tensor.value()
        tensor.total = value
    elif isinstance(tensor, Part) and not tensor.axis.positions:
        # of cut weights: what arrives is whole over their axis
        tensor.local = share_of(value, tensor.dim_cut, tensor.owners, tensor.axis)
        tensor.copied, tensor.rows = False, None
    else:
        assert isinstance(tensor, Part)
        # whole, or a sum: brought to the cut that the tensor has
        if not isinstance(value, Part):
            value = put_together(share_under(value, cuts_of(tensor), axes), cuts_of(tensor), axes)
        assert isinstance(value, Part)
        tensor.local, tensor.dim_cut, tensor.owners, tensor.axis = value.local, value.dim_cut, value.owners, value.axis
        tensor.may_gather, tensor.origin, tensor.copied, tensor.rows = value.may_gather, value.origin, False, None


__all__ = [
    "Along", "Cuts", "apart", "axes_of", "cuts_of", "dealt_beside", "entering", "filled", "joined", "leaving",
    "overwrite", "put_together", "settled", "share_under", "taken_apart",
]  # fmt: skip
