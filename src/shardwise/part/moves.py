"""Move the indices of a cut dim between ranks: `recut`, `fetch` and their adjoints, of which all else is made.

    recut   from a cut along one dim to a cut along another, over one axis: an all-to-all
              rank 0  (S/2, H)  ->  (S, H/2)          (Ulysses: positions to heads and back)
    fetch   each rank names the indices that it wants of a cut dim, and gets them from their owners: halos, shifts,
            zigzag against contiguous blocks
              owners 000 111, wanted 0..3 and 2..5  ->  rank 0 has 0 1 2 3, rank 1 has 2 3 4 5
    give_back   the adjoint of fetch: what each rank has at the indices it wanted, added up at their owners

Bytes on the wire, received by each rank: recut (p-1)/p of its share; fetch what it wants and does not own.
What each rank sends to whom is computed from owners and wishes alone, on every rank alike: no sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shardwise.comm import Axis, all_to_all
from shardwise.host import to_device
from shardwise.part.cuts import REMEMBERED, Owners, Uncut, in_whole_groups
from shardwise.part.gathering import gather, gathered, share_of
from shardwise.part.levels import Distributed
from shardwise.part.sums import redealt, whole_over_axis
from shardwise.part.tensor import UNSENT, Part

Wanted = tuple[tuple[tuple[int, int], ...], ...]  # of each rank: ranges (start, stop) of global indices, in order
TAG = "activations"


def recut(part: Part, dim: int, owners: Owners, inside: Owners | None = None) -> Part:
    """Returns the tensor cut along another dim, dealt by `owners`. Collective; not differentiable (see `moved`).

    inside  where an axis further in cuts the dim that is cut now: its owners of that dim once it is whole again
    """
    if dim == part.dim_cut:
        return reowned(part, owners)
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
    """Returns `recut` of a part that is cut further in too: ranks of the inner axis exchange their indices each."""
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
        before, inner_owners, inside = _among(before, inside.indices(inner.axis.index)), inside, None
    exchanged = recut(Part(inner.local, part.dim_cut, before, part.axis), dim, after, inside)
    return part.with_local(inner.with_local(exchanged.local, owners=inner_owners), dim, owners)


def _among(owners: Owners, indices: np.ndarray) -> Owners:
    """Returns the owners of these indices alone, in this order."""
    return Owners.of(owners.array[indices], owners.ranks)


def reowned(part: Part, owners: Owners, group: int = 1) -> Part:
    """Returns the tensor cut along the same dim, dealt by `owners`. Collective; not differentiable (see `moved`).

    group  indices that an axis further in, which cuts the dim too, keeps together
    """
    if owners == part.owners:
        return part
    if owners.size != part.owners.size:
        raise Uncut(f"{part!r} has other indices than those that are asked for ({owners!r})")
    inner = part.local.settled() if isinstance(part.local, Distributed) else None
    if isinstance(inner, Part) and inner.dim_cut == part.dim_cut and inner.axis.positions:
        return _reowned_inside(part, inner, owners, group)
    wanted = tuple(_ranges(owners.indices(rank)) for rank in range(owners.ranks))
    return part.with_local(fetch(part, wanted), part.dim_cut, owners)


def dealt_as(part: Part, lead: Part, dim: int, what: str) -> Part:
    """Returns the part cut along `dim` as `lead` is: itself, or, of positions, moved between ranks.

    Collective where they differ; not differentiable. `Uncut` where the cut is not of positions; `what` reads both.
    """
    if part.dim_cut == dim and part.beside(lead):
        return part
    if part.axis is lead.axis and lead.axis.positions and part.shape[dim] == lead.owners.size:
        return recut(part if dim == part.dim_cut else whole_inside(part), dim, lead.owners)
    raise Uncut(f"{what} of tensors that are cut differently ({part!r}, {lead!r})")


def whole_inside(part: Part) -> Part:
    """Returns the part, gathered over axes of positions further in that cut its cut dim too. Collective."""
    inner = part.local.settled() if isinstance(part.local, Distributed) else None
    if isinstance(inner, Part) and inner.dim_cut == part.dim_cut and inner.axis.positions:
        return whole_inside(part.with_local(gathered(inner)))
    return part


def _as_it_was(part: Part, dims: set[int], within: list[str]) -> Part:
    """Returns a gradient, gathered over inner axes that cut one of `dims` and are not among `within`, the tensor's."""
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
    """Returns `reowned` of a dim that an inner axis cuts too: gathered over that, moved, and cut in blocks again.

    Which indices its ranks have differs between those of this axis, and a rank knows its own alone.
    """
    outer = reowned(part.with_local(gathered(inner)), owners)
    # the length on this rank has changed, so ranks further in are dealt new blocks of it
    again = in_whole_groups(Owners.blocks(owners.counts[part.axis.index], inner.axis.size), group)
    mine = again.take(outer.local, inner.dim_cut, inner.axis.index).contiguous()
    dealt = inner.with_local(mine, owners=again)
    if group > 1:  # a rank that has one group, or none, cannot tell it from its own indices
        dealt.factors = 1, owners.size // group, group
    return outer.with_local(dealt)


@lru_cache(REMEMBERED)
def shown(owners: Owners, source: tuple[int, ...]) -> Wanted:
    """Returns which indices each rank fetches for a result whose index j shows index `source[j]`, on owner j."""
    places = np.asarray(source, dtype=np.int64)
    return tuple(_ranges(places[owners.indices(rank)]) for rank in range(owners.ranks))


def fetch(part: Part, wanted: Wanted, fill: float = 0.0) -> torch.Tensor:
    """Returns this rank's wanted indices of the cut dim, in order; an index outside the dim (-1, size) gives `fill`.

    Collective. The result differs between ranks and is no part: an index may lie on several.
    """
    local = part.local
    if isinstance(local, Distributed):
        inner = local.settled()
        if isinstance(inner, Part) and inner.dim_cut == part.dim_cut and inner.may_gather:
            inner = gather(inner)
        if not isinstance(inner, Part):
            return fetch(part.with_local(inner), wanted, fill)
        if inner.dim_cut == part.dim_cut:
            raise Uncut(f"indices of a dim that is cut over {inner.axis.name} too cannot be fetched")
        return inner.with_local(fetch(Part(inner.local, part.dim_cut, part.owners, part.axis), wanted, fill))
    axis, dim, shape = part.axis, part.dim_cut, list(local.shape)
    way = way_of(part.owners, wanted, axis.index)
    blocks = [picked(local, dim, places) for places in way.send]
    pieces = Passing(blocks, shape, dim, way.counts, axis, way.alone).pieces()
    before, after = way.around
    if before:
        pieces.insert(0, local.new_full(with_size(shape, dim, before), fill))
    if after:
        pieces.append(local.new_full(with_size(shape, dim, after), fill))
    rows = torch.cat(pieces, dim)
    if way.order is None:
        return rows
    rows = rows.index_select(dim, to_device(way.order, rows.device))
    if way.inside is None:
        return rows
    whole = rows.new_full(with_size(shape, dim, way.wanted), fill)
    return whole.index_copy(dim, to_device(way.inside, rows.device), rows)


def give_back(gradient: torch.Tensor, dim: int, owners: Owners, axis: Axis, wanted: Wanted) -> Part:
    """Returns a part with, at its owner, the sum of all ranks' gradients of an index: `fetch`'s adjoint. Collective.

    gradient   on each rank, of the shape that `fetch` gave it;  dim, owners, axis   how the result is cut
    """
    if isinstance(gradient, Distributed):
        inner = gradient.settled()
        if isinstance(inner, Part) and inner.dim_cut == dim:  # of what was whole over that axis
            return give_back(gathered(inner), dim, owners, axis, wanted)
        if isinstance(inner, Part):
            back = give_back(inner.local, dim, owners, axis, wanted)
            return Part(inner.with_local(back.local), dim, owners, axis)
        return give_back(inner, dim, owners, axis, wanted)
    way = way_of(owners, wanted, axis.index)
    shape = list(gradient.shape)
    # `fill` outside the dim has no owner, and so no gradient
    blocks = gradient.narrow(dim, way.around[0], shape[dim] - sum(way.around))
    if way.inside is not None:
        blocks = blocks.index_select(dim, to_device(way.inside, blocks.device))
    if way.order is not None:
        blocks = blocks.index_select(dim, to_device(np.argsort(way.order), blocks.device))
    sizes = [len(places) for places in way.send]
    pieces = Passing(list(blocks.split(list(way.counts), dim)), shape, dim, sizes, axis, way.alone).pieces()
    local = gradient.new_zeros(with_size(shape, dim, owners.counts[axis.index]))
    for piece, places in zip(pieces, way.send, strict=True):
        if _in_a_row(places):
            # the same sum as by index, without reading an index from memory
            local.narrow(dim, int(places[0]), len(places)).add_(piece)
        elif len(places):
            local.index_add_(dim, to_device(places, local.device), piece)
    return Part(local, dim, owners, axis)


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
        if any(dim in ctx.dims for dim, _, _ in (*ctx.outside, *arrived)):  # indices of `axis` are those of a share
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
    """Returns the owners of a dim over the axis further in that cuts it; None where none does."""
    inner = part.local.settled() if isinstance(part.local, Distributed) else None
    if not isinstance(inner, Part):
        return None
    return inner.owners if inner.dim_cut == dim else owners_inside(inner, dim)


Layers = tuple[tuple[int, Owners, Axis], ...]  # (dim, owners, axis), outermost first


def _outside(tensor: torch.Tensor, axis: Axis) -> Layers:
    """Returns how axes further out than `axis` cut a tensor."""
    layers: list[tuple[int, Owners, Axis]] = []
    while isinstance(tensor, Part) and tensor.axis.depth < axis.depth:
        layers.append((tensor.dim_cut, tensor.owners, tensor.axis))
        tensor = tensor.settled_local()
    return tuple(layers)


def _dealt(gradient: torch.Tensor, layers: Layers) -> torch.Tensor:
    """Returns a gradient cut by these layers. Collective where it is a sum or cut otherwise."""
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
    """Returns what a tensor is from `axis` on inwards, with a sum over it taken."""
    while isinstance(tensor, Distributed) and tensor.axis.depth < axis.depth:
        tensor = tensor.settled_local()
    return tensor.settled() if isinstance(tensor, Distributed) else tensor


def replaced_from_axis(tensor: Any, axis: Axis, inner: torch.Tensor) -> Any:
    """Returns the tensor with `inner` in the place of what it is from `axis` on inwards."""
    if isinstance(tensor, Distributed) and tensor.axis.depth < axis.depth:
        return tensor.like(replaced_from_axis(tensor.settled_local(), axis, inner))
    return inner


@dataclass(frozen=True)
class _Way:
    """What one rank sends and receives in a fetch."""

    send: tuple[np.ndarray, ...]  # to each rank: places among this rank's own indices
    counts: tuple[int, ...]  # received from each rank
    order: np.ndarray | None  # (found,) places of what is received, in the order in which it was wanted
    inside: np.ndarray | None  # (found,) where among the wanted ones those lie that exist; None where side by side
    around: tuple[int, int]  # wanted ones that do not exist, before and behind those that do and are in order
    wanted: int
    alone: bool  # no rank wants anything of another


@lru_cache(REMEMBERED)
def way_of(owners: Owners, wanted: Wanted, me: int) -> _Way:
    """Returns what rank `me` sends and receives in a fetch, where each rank wants the ranges `wanted[rank]`."""
    mine = owners.indices(me)
    send, alone = [], True
    for rank in range(owners.ranks):
        indices = _existing(wanted[rank], owners.size)
        theirs = _owner(owners, indices)
        send.append(np.searchsorted(mine, indices[theirs == me]))
        alone = alone and bool((theirs == rank).all())
    everything = _expanded(wanted[me])
    exists = (everything >= 0) & (everything < owners.size)
    indices = everything[exists]
    who = _owner(owners, indices)
    counts = tuple(int((who == rank).sum()) for rank in range(owners.ranks))
    # pieces arrive rank by rank, each in the order in which it was wanted: `order` undoes that
    by_rank = np.argsort(who, kind="stable")
    order = np.empty_like(by_rank)
    order[by_rank] = np.arange(len(by_rank))
    in_order = bool((order == np.arange(len(order))).all())
    inside, around = np.flatnonzero(exists), (0, 0)
    # what exists lies in one run (halos at an edge): it needs no index, zeros are put around it
    if in_order and (not len(inside) or inside[-1] - inside[0] + 1 == len(inside)):
        before = int(inside[0]) if len(inside) else 0
        around = before, len(everything) - len(inside) - before
    kept = None if exists.all() or any(around) else inside
    return _Way(tuple(send), counts, None if in_order and kept is None else order, kept, around, len(everything), alone)


def _expanded(ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
    return np.concatenate([np.arange(a, b) for a, b in ranges]) if ranges else np.zeros(0, dtype=np.int64)


def _existing(ranges: tuple[tuple[int, int], ...], size: int) -> np.ndarray:
    indices = _expanded(ranges)
    return indices[(indices >= 0) & (indices < size)]


def _owner(owners: Owners, indices: np.ndarray) -> np.ndarray:
    return owners.who[np.searchsorted(owners.stops, indices, side="right")]


def _ranges(places: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Returns indices in any order as ranges (start, stop)."""
    if not len(places):
        return ()
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    starts, stops = np.append(0, breaks), np.append(breaks, len(places))
    return tuple((int(places[a]), int(places[b - 1]) + 1) for a, b in zip(starts, stops, strict=True))


def _in_a_row(places: np.ndarray) -> bool:
    """Whether there are some, each one behind the other."""
    return bool(len(places)) and places[-1] - places[0] + 1 == len(places) and bool((np.diff(places) == 1).all())


def picked(local: torch.Tensor, dim: int, places: np.ndarray) -> torch.Tensor:
    """Returns a share's indices at these places along `dim`: a view where they lie in a row."""
    if _in_a_row(places):
        return local.narrow(dim, int(places[0]), len(places))
    return local.index_select(dim, to_device(places, local.device))


class Passing:
    """Blocks along `dim` under way between the ranks of an axis, `received` indices from each. Collective.

    alone   no rank has anything for another, so nothing is sent
    """

    def __init__(
        self, blocks: list[torch.Tensor], shape: list[int], dim: int, received: Sequence[int], axis: Axis, alone: bool
    ):  # fmt: skip
        me, rest = axis.index, _elements(shape, dim)
        self.mine, self.me = blocks[me], me
        # a rank's own block is not sent
        counts = [0 if rank == me else count for rank, count in enumerate(received)]
        self.sizes, self.shapes = [count * rest for count in counts], [with_size(shape, dim, n) for n in counts]
        empty = self.mine.new_empty(0)
        others = [empty if rank == me else block for rank, block in enumerate(blocks)]
        self.coming = None if alone else _Exchange(others, self.sizes, axis)

    def pieces(self) -> list[torch.Tensor]:
        """Returns the block from each rank; its own is the tensor that it gave. Waits."""
        flat = self.mine.new_empty(0) if self.coming is None else self.coming.wait()
        pieces = [piece.view(shape) for piece, shape in zip(flat.split(self.sizes), self.shapes, strict=True)]
        pieces[self.me] = self.mine
        return pieces


class _Exchange:
    """An all-to-all under way: one block to each rank, flat. Collective."""

    def __init__(self, blocks: list[torch.Tensor], received: list[int], axis: Axis):
        self.kind = blocks[0].dtype
        sent = torch.cat([block.reshape(-1) for block in blocks])
        sent = sent.to(UNSENT.get(self.kind, self.kind))
        if self.kind.is_complex:  # as rows of two numbers, which every backend sends
            sent = torch.view_as_real(sent.resolve_conj())
        # kept until the messages are over: they read this memory
        self.sent = sent.view(torch.uint8) if self.kind is torch.bool else sent
        self.flat = self.sent.new_empty((sum(received), *self.sent.shape[1:]))
        sizes = [block.numel() for block in blocks]
        self.pending = all_to_all(self.flat, self.sent, received, sizes, axis, TAG, wait=False)

    def wait(self) -> torch.Tensor:
        """Returns what arrived, flat, one sender after another; waits for it."""
        self.pending.wait()
        del self.sent
        if self.kind.is_complex:
            return torch.view_as_complex(self.flat)
        return self.flat.view(self.kind) if self.kind is torch.bool else self.flat.to(self.kind)


def _elements(shape: list[int], without: int) -> int:
    n = 1
    for dim, size in enumerate(shape):
        n *= size if dim != without else 1
    return n


def with_size(shape: list[int], dim: int, size: int) -> list[int]:
    return [size if d == dim else n for d, n in enumerate(shape)]
