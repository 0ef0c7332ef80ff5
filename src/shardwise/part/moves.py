"""Move the indices of a cut dim between ranks: `recut`, `reowned`, and `moved`, which is differentiable.

    recut   from a cut along one dim to a cut along another, over one axis: an all-to-all
              rank 0  (S/2, H)  ->  (S, H/2)          (Ulysses: positions to heads and back)
    fetch   each rank names the indices that it wants of a cut dim, and gets them from their owners: halos, shifts,
            zigzag against contiguous blocks
              owners 000 111, wanted 0..3 and 2..5  ->  rank 0 has 0 1 2 3, rank 1 has 2 3 4 5
    give_back   the adjoint of fetch: what each rank has at the indices it wanted, added up at their owners

Bytes on the wire, received by each rank: recut (p-1)/p of its share; fetch what it wants and does not own.
What each rank sends to whom is computed from owners and wanted indices, alike on every rank; no sizes are exchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from shardwise.comm import Axis
from shardwise.host import to_device
from shardwise.part.cuts import Owners, Uncut, in_whole_groups
from shardwise.part.exchanges import _elements, _Exchange, _ranges, fetch, with_size
from shardwise.part.gathering import gather, gathered
from shardwise.part.levels import Distributed
from shardwise.part.sums import linear, redealt, whole_over_axis
from shardwise.part.tensor import Part, is_part


def recut(part: Part, dim: int, owners: Owners, inside: Owners | None = None) -> Part:
    """Returns the part cut along `dim` instead, dealt by `owners`. Collective; not differentiable (see `moved`).

    Raises `Uncut` if an inner axis cuts the present cut dim too, may not be gathered, and `inside` is None.

    inside  owners, over an inner axis that cuts the present cut dim, of all of that dim in the result; None: unknown
    """
    # the same dim, dealt otherwise: less to send
    if dim == part.dim_cut:
        return reowned(part, owners)
    # what an inner axis cuts is exchanged share by share
    if isinstance(part.local, Distributed):
        return _recut_inside(part, dim, owners, inside)
    axis, before, local = part.axis, part.owners, part.local
    blocks = [owners.take(local, dim, rank) for rank in range(axis.size)]
    shape = list(local.shape)
    shape[dim] = owners.counts[axis.index]
    rest = _elements(shape, part.dim_cut)
    received_sizes = [count * rest for count in before.counts]
    flat = _Exchange(blocks, received_sizes, axis).wait()
    pieces = [
        piece.view(with_size(shape, part.dim_cut, count))
        for piece, count in zip(flat.split(received_sizes), before.counts, strict=True)
    ]
    whole = torch.cat(pieces, part.dim_cut)
    # pieces arrive in the order of ranks, whose indices of the dim may lie between each other (zigzag)
    if before.order is not None:
        whole = whole.index_select(part.dim_cut, to_device(before.order, whole.device))
    return part.with_local(whole, dim, owners)


def _recut_inside(part: Part, dim: int, owners: Owners, inside: Owners | None) -> Part:
    """Returns `recut` of a part whose local tensor is distributed too; raises `Uncut` as that does.

    Each rank of the inner axis exchanges its own indices. An inner cut of the present cut dim is gathered if it may be.

    inside  as of `recut`
    """
    inner = part.local.settled()
    if isinstance(inner, Part) and inner.dim_cut == part.dim_cut and inner.may_gather and inside is None:
        # nobody says how it will lie inside, and the plan gathers it anyway
        inner = gather(inner)
    if not isinstance(inner, Part):
        return recut(part.with_local(inner), dim, owners)
    before, after, inner_owners = part.owners, owners, inner.owners
    if inner.dim_cut == dim:  # of the dim that will be cut, each rank further in has some indices
        after = _among(owners, inner_owners.indices(inner.axis.index))
        inner_owners = _among(inner_owners, owners.indices(part.axis.index))
    elif inner.dim_cut == part.dim_cut:
        if inside is None:
            raise Uncut(f"a dim that is cut over {inner.axis.name} too cannot be exchanged over {part.axis.name}")
        # the cut dim will be whole over this axis, and lie inside as `inside` says: each inner rank moves its own of it
        before, inner_owners, inside = _among(before, inside.indices(inner.axis.index)), inside, None
    exchanged = recut(Part(inner.local, part.dim_cut, before, part.axis), dim, after, inside)
    return part.with_local(inner.with_local(exchanged.local, owners=inner_owners), dim, owners)


def _among(owners: Owners, indices: np.ndarray) -> Owners:
    """Returns the `Owners` of the dim that `indices` select, in this order."""
    return Owners.of(owners.array[indices], owners.ranks)


def reowned(part: Part, owners: Owners, group: int = 1) -> Part:
    """Returns the part cut along the same dim, dealt by `owners`. Collective; not differentiable (see `moved`).

    group  consecutive indices that stay on one rank of an inner axis that cuts the dim too
    Raises `Uncut` if `owners` are of another size.
    """
    if owners == part.owners:
        return part
    # the same dim in another size is not the same tensor: a rule asked with the wrong owners
    if owners.size != part.owners.size:
        raise Uncut(f"{part!r} has other indices than those that are asked for ({owners!r})")
    inner = part.local.settled() if isinstance(part.local, Distributed) else None
    # further in the same dim is cut again: this axis alone cannot say which indices go where
    if isinstance(inner, Part) and inner.dim_cut == part.dim_cut and inner.axis.positions:
        return _reowned_inside(part, inner, owners, group)
    wanted = tuple(_ranges(owners.indices(rank)) for rank in range(owners.ranks))
    return part.with_local(fetch(part, wanted), part.dim_cut, owners)


def dealt_as(part: Part, lead: Part, dim: int, what: str) -> Part:
    """Returns the part cut along `dim` with the owners of `lead`, moved between ranks if it lies otherwise.

    Collective in that case; not differentiable. Raises `Uncut` if it would have to be moved and the cut is not of
    positions, or the dim's sizes differ. `what`: the operation that reads both, for the message.
    """
    if part.dim_cut == dim and part.beside(lead):
        return part
    if part.axis is lead.axis and lead.axis.positions and part.shape[dim] == lead.owners.size:
        return recut(part if dim == part.dim_cut else whole_inside(part), dim, lead.owners)
    raise Uncut(f"{what} of tensors that are cut differently ({part!r}, {lead!r})")


def share_as(tensor: torch.Tensor, lead: Part, dim: int, what: Any = "an operation") -> torch.Tensor:
    """Returns this rank's share along `dim` of a tensor, whole or cut over the rule's axis, dealt as `lead` is.

    Collective if it is cut otherwise; `Uncut` and `what` as of `dealt_as`.
    """
    return dealt_as(tensor, lead, dim, str(what)).local if is_part(tensor) else lead.share(tensor, dim)


def whole_inside(part: Part) -> Part:
    """Returns the part gathered over the inner axes of positions that cut its cut dim too. Collective."""
    inner = part.local.settled() if isinstance(part.local, Distributed) else None
    if isinstance(inner, Part) and inner.dim_cut == part.dim_cut and inner.axis.positions:
        return whole_inside(part.with_local(gathered(inner)))
    return part


def _as_it_was(part: Part, dims: set[int], within: list[str]) -> Part:
    """Returns a gradient gathered over inner axes that cut one of `dims`, except the axes named in `within`.

    within  axes over which the tensor itself is cut
    """
    inner = part.local.settled() if isinstance(part.local, Distributed) else None
    if not isinstance(inner, Part):
        return part
    if inner.dim_cut in dims and inner.axis.name not in within:
        return _as_it_was(part.with_local(gathered(inner)), dims, within)
    return part.with_local(_as_it_was(inner, dims, within))


def _axes_inside(part: Part) -> list[str]:
    """Returns the names of the axes further in over which a part is cut."""
    inner = part.local.settled() if isinstance(part.local, Distributed) else None
    return [inner.axis.name, *_axes_inside(inner)] if isinstance(inner, Part) else []


def _reowned_inside(part: Part, inner: Part, owners: Owners, group: int) -> Part:
    """Returns `reowned` of a dim that the axis of `inner` cuts too: gathered over it, moved, cut in blocks again.

    It is gathered since inner ranks' indices differ between the ranks of this axis, and a rank knows its own alone.
    """
    outer = reowned(part.with_local(gathered(inner)), owners)
    # the length on this rank has changed, so ranks further in are dealt new blocks of it
    again = in_whole_groups(Owners.blocks(owners.counts[part.axis.index], inner.axis.size), group)
    mine = again.take(outer.local, inner.dim_cut, inner.axis.index).contiguous()
    dealt = inner.with_local(mine, owners=again)
    if group > 1:  # a rank that has one group, or none, cannot tell it from its own indices
        dealt.factors = 1, owners.size // group, group
    return outer.with_local(dealt)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Part, dim: int, owners: Owners, axis: Axis, inside: Owners | None
    ) -> torch.Tensor:  # fmt: skip
        part = from_axis(tensor, axis)
        ctx.before, ctx.within = (part.dim_cut, part.owners, axis, owners_inside(part, dim)), _axes_inside(part)
        ctx.outside, ctx.dims = _outside(tensor, axis), {part.dim_cut, dim}
        return replaced_from_axis(tensor.detach(), axis, recut(part, dim, owners, inside))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return redealt(gradient, lambda given: _Moved.back(ctx, given)), None, None, None, None

    @staticmethod
    def back(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient cut as the tensor was. Collective."""
        dim, owners, axis, inside = ctx.before
        arrived = _outside(gradient, axis)
        # an axis further out cuts one of these dims, and owners over `axis` count the indices of an outer share: the
        # gradient gets the outer cuts that the tensor has first
        if any(dim in ctx.dims for dim, _, _ in (*ctx.outside, *arrived)):
            axes = [axis for _, _, axis in ctx.outside]
            for _, _, other in arrived:
                gradient = gradient if other in axes else whole_over_axis(gradient, other)
            gradient = _dealt(gradient, ctx.outside)
        part = from_axis(gradient, axis)
        if not isinstance(part, Part) or part.axis is not axis:
            # a gradient that every rank has, or that is cut over other axes alone
            part = Part(share_of(part, dim, owners, axis), dim, owners, axis)
        part = _as_it_was(part, {part.dim_cut, *ctx.dims}, ctx.within)
        return replaced_from_axis(gradient, axis, recut(part, dim, owners, inside))


def owners_inside(part: Part, dim: int) -> Owners | None:
    """Returns the owners of `dim` over the inner axis that cuts it; None if none does."""
    inner = part.local.settled() if isinstance(part.local, Distributed) else None
    if not isinstance(inner, Part):
        return None
    return inner.owners if inner.dim_cut == dim else owners_inside(inner, dim)


Layers = tuple[tuple[int, Owners, Axis], ...]  # (dim, owners, axis), outermost first


def _outside(tensor: torch.Tensor, axis: Axis) -> Layers:
    """Returns (dim, owners, axis) of each cut of a tensor over axes further out than `axis`, outermost first."""
    layers: list[tuple[int, Owners, Axis]] = []
    while isinstance(tensor, Part) and tensor.axis.depth < axis.depth:
        layers.append((tensor.dim_cut, tensor.owners, tensor.axis))
        tensor = tensor.settled_local()
    return tuple(layers)


def _dealt(gradient: torch.Tensor, layers: Layers) -> torch.Tensor:
    """Returns a gradient cut over these layers, outermost first. Collective if it is a sum or cut otherwise."""
    if not layers:
        return gradient
    (dim, owners, axis), *rest = layers
    local = share_of(gradient, dim, owners, axis)
    return Part(_dealt(local, tuple(rest)), dim, owners, axis)


def moved(
    tensor: torch.Tensor, dim: int, owners: Owners, axis: Axis, inside: Owners | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns, differentiably, the tensor with its cut over `axis` moved to `dim` and dealt by `owners`. Collective.

    inside  as for `recut`
    """
    return _Moved.apply(tensor, dim, owners, axis, inside)


def from_axis(tensor: Any, axis: Axis) -> Any:
    """Returns the local tensor inside the axes further out than `axis`, reduced if it is a sum over `axis`."""
    while isinstance(tensor, Distributed) and tensor.axis.depth < axis.depth:
        tensor = tensor.settled_local()
    return tensor.settled() if isinstance(tensor, Distributed) else tensor


def replaced_from_axis(tensor: Any, axis: Axis, inner: torch.Tensor) -> Any:
    """Returns the tensor with its level at `axis`, and all further in, replaced by `inner`."""
    if isinstance(tensor, Distributed) and tensor.axis.depth < axis.depth:
        return tensor.like(replaced_from_axis(tensor.settled_local(), axis, inner))
    return inner


def share_of(tensor: torch.Tensor, dim: int, owners: Owners, axis: Axis) -> torch.Tensor:
    """Returns this rank's share along `dim`, by `owners` over `axis`. Collective if it is a sum or cut otherwise.

    Over axes further out the result is distributed as the tensor is; the share of a sum is a sum of shares.
    """
    if isinstance(tensor, Distributed) and tensor.axis.depth < axis.depth:
        return tensor.like(share_of(tensor.settled_local(), dim, owners, axis))
    if isinstance(tensor, Distributed):
        tensor = tensor.settled()
    # whole over this axis, on every rank: it takes its own indices
    if not isinstance(tensor, Part) or tensor.axis is not axis:
        return owners.take(tensor, dim, axis.index)
    if tensor.dim_cut == dim and tensor.owners == owners:
        return tensor.local
    if axis.positions and tensor.dim_cut == dim:  # each rank fetches what it lacks, and no rank holds it whole
        return reowned(tensor, owners).local
    return owners.take(gather(tensor), dim, axis.index)


def to_part(local: torch.Tensor, dim: int, owners: Owners, axis: Axis, origin: str = "") -> Part:
    """Returns, differentiably, the part of which `local` (a parameter, named `origin`) is this rank's share."""
    there = partial(Part, dim=dim, owners=owners, axis=axis, origin=origin)
    back = partial(share_of, dim=dim, owners=owners, axis=axis)
    return linear(local, there, back, once=True)
