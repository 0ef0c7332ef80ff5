"""Exchanges of indices of a cut dim between its ranks: `fetch`, its adjoint `give_back`, halos, and their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from shardwise.comm import Axis, all_to_all
from shardwise.host import to_device
from shardwise.part.cuts import REMEMBERED, Owners, Uncut
from shardwise.part.gathering import gather, gathered
from shardwise.part.levels import Distributed
from shardwise.part.tensor import UNSENT, Part

Wanted = tuple[tuple[tuple[int, int], ...], ...]  # of each rank: ranges (start, stop) of global indices, in order
TAG = "activations"


@lru_cache(REMEMBERED)
def shown(owners: Owners, source: tuple[int, ...]) -> Wanted:
    """Returns the ranges that each rank fetches for a result, dealt by `owners`, whose index j is index `source[j]`."""
    places = np.asarray(source, dtype=np.int64)
    return tuple(_ranges(places[owners.indices(rank)]) for rank in range(owners.ranks))


def fetch(part: Part, wanted: Wanted, fill: float = 0.0) -> torch.Tensor:
    """Returns this rank's wanted indices of the cut dim, in order; an index outside the dim (-1, size) gives `fill`.

    Collective. The result differs between ranks and is no part, because several ranks may fetch the same index. Raises
    `Uncut` if an inner axis cuts the dim too and the part may not be gathered over that axis.
    """
    local = part.local
    if isinstance(local, Distributed):
        inner = local.settled()  # messages carry values, not summands
        # cut softly once more along this dim: the plan gathers it anyway
        if isinstance(inner, Part) and inner.dim_cut == part.dim_cut and inner.may_gather:
            inner = gather(inner)
        if not isinstance(inner, Part):
            return fetch(part.with_local(inner), wanted, fill)
        # owners of this axis alone do not tell which indices an inner rank has
        if inner.dim_cut == part.dim_cut:
            raise Uncut(f"indices of a dim that is cut over {inner.axis.name} too cannot be fetched")
        # an inner cut of another dim stays: each of its ranks fetches its own share
        return inner.with_local(fetch(Part(inner.local, part.dim_cut, part.owners, part.axis), wanted, fill))
    axis, dim, shape = part.axis, part.dim_cut, list(local.shape)
    way = way_of(part.owners, wanted, axis.index)
    blocks = [picked(local, dim, places) for places in way.send]
    pieces = Passing(blocks, shape, dim, way.counts, axis, way.alone).pieces()
    before, after = way.around
    # indices outside the dim (padding) hold `fill`
    if before:
        pieces.insert(0, local.new_full(with_size(shape, dim, before), fill))
    if after:
        pieces.append(local.new_full(with_size(shape, dim, after), fill))
    rows = torch.cat(pieces, dim)
    # pieces arrived rank by rank, and that is the order in which they were wanted
    if way.order is None:
        return rows
    rows = rows.index_select(dim, to_device(way.order, rows.device))
    # the wanted indices that exist lie side by side: `before` and `after` were the rest
    if way.inside is None:
        return rows
    whole = rows.new_full(with_size(shape, dim, way.wanted), fill)
    return whole.index_copy(dim, to_device(way.inside, rows.device), rows)


def give_back(gradient: torch.Tensor, dim: int, owners: Owners, axis: Axis, wanted: Wanted) -> Part:
    """Returns a part that holds, at its owner, the sum of all ranks' gradients of each index. Collective.

    The adjoint of `fetch`.

    gradient           on each rank, of the shape that `fetch` with `wanted` returned there
    dim, owners, axis  how the returned part is cut
    """
    if isinstance(gradient, Distributed):
        inner = gradient.settled()
        if isinstance(inner, Part) and inner.dim_cut == dim:  # of what was whole over that axis
            return give_back(gathered(inner), dim, owners, axis, wanted)
        # an inner cut of another dim stays: each of its ranks gives back its own share
        if isinstance(inner, Part):
            back = give_back(inner.local, dim, owners, axis, wanted)
            return Part(inner.with_local(back.local), dim, owners, axis)
        return give_back(inner, dim, owners, axis, wanted)
    way = way_of(owners, wanted, axis.index)
    shape = list(gradient.shape)
    # `fill` outside the dim has no owner, and so no gradient
    blocks = gradient.narrow(dim, way.around[0], shape[dim] - sum(way.around))
    if way.inside is not None:  # those that do not exist lie between the others
        blocks = blocks.index_select(dim, to_device(way.inside, blocks.device))
    # back into the order in which their owners sent them
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


@dataclass(frozen=True)
class _Way:
    """What one rank sends and receives in a fetch. `found`: its wanted indices that lie inside the dim."""

    send: tuple[np.ndarray, ...]  # to each rank: positions within this rank's share
    counts: tuple[int, ...]  # indices received from each rank
    order: np.ndarray | None  # (found,) positions in what is received, in wanted order; None: it arrives in that order
    inside: np.ndarray | None  # (found,) positions among the wanted indices of those inside the dim; None: contiguous
    around: tuple[int, int]  # wanted indices outside the dim, in front of and behind the others, if those are in order
    wanted: int  # number of wanted indices, those outside the dim included
    alone: bool  # whether no rank wants an index of another


@lru_cache(REMEMBERED)
def way_of(owners: Owners, wanted: Wanted, me: int) -> _Way:
    """Returns the `_Way` of rank `me` in a fetch in which each rank wants the ranges `wanted[rank]`."""
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
    """Returns indices, in the order given, as ranges (start, stop) of consecutive ones."""
    if not len(places):
        return ()
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    starts, stops = np.append(0, breaks), np.append(breaks, len(places))
    return tuple((int(places[a]), int(places[b - 1]) + 1) for a, b in zip(starts, stops, strict=True))


def _in_a_row(places: np.ndarray) -> bool:
    """Whether indices ascend by one, and there is at least one."""
    return bool(len(places)) and places[-1] - places[0] + 1 == len(places) and bool((np.diff(places) == 1).all())


def picked(local: torch.Tensor, dim: int, places: np.ndarray) -> torch.Tensor:
    """Returns the indices at positions `places` of `local` along `dim`; a view if the positions are consecutive."""
    if _in_a_row(places):
        return local.narrow(dim, int(places[0]), len(places))
    return local.index_select(dim, to_device(places, local.device))


class Passing:
    """An exchange under way of one block along `dim` between each two ranks of an axis. Collective.

    blocks    what this rank has for each rank, itself included;  shape  of a block, its size along `dim` ignored
    received  number of indices along `dim` that arrive from each rank
    alone     Whether no rank has anything for another, so that nothing is sent
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
        """Waits; returns the block that came from each rank, in rank order, for this rank the one that it passed in."""
        flat = self.mine.new_empty(0) if self.coming is None else self.coming.wait()
        pieces = [piece.view(shape) for piece, shape in zip(flat.split(self.sizes), self.shapes, strict=True)]
        pieces[self.me] = self.mine
        return pieces


class _Exchange:
    """An all-to-all under way of one flattened block to each rank. `received`: elements from each rank. Collective."""

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
        """Waits; returns the received elements, 1-d, in the order of the ranks that sent them."""
        self.pending.wait()
        del self.sent
        # undoes what was done for sending: complex as pairs, bool as bytes, integers that are not sent as wider ones
        if self.kind.is_complex:
            return torch.view_as_complex(self.flat)
        return self.flat.view(self.kind) if self.kind is torch.bool else self.flat.to(self.kind)


def _elements(shape: list[int], without: int) -> int:
    n = 1
    for dim, size in enumerate(shape):
        n *= size if dim != without else 1
    return n


def with_size(shape: list[int], dim: int, size: int) -> list[int]:
    """Returns `shape` with `size` along `dim`."""
    return [size if d == dim else n for d, n in enumerate(shape)]


class Halo:
    """An exchange under way of the halo, the indices of a cut dim in front of and behind a rank's own. Collective.

    wanted  each rank's one range, which overlaps its own indices; ranks own blocks in rank order (`has_halos`)
    """

    def __init__(self, part: Part, wanted: Wanted):
        local, dim, axis = part.local, part.dim_cut, part.axis
        self.dim, self.me, self.shape = dim, axis.index, list(local.shape)
        self.way = way_of(part.owners, wanted, axis.index)
        blocks = [picked(local, dim, places) for places in self.way.send]
        self.passing = Passing(blocks, self.shape, dim, self.way.counts, axis, self.way.alone)

    def wait(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Waits; returns the halo (in front, behind), zeros outside the dim; None for a side that no rank has."""
        pieces, (before, after) = self.passing.pieces(), self.way.around
        mine = pieces[self.me]
        front, behind = pieces[: self.me], pieces[self.me + 1 :]
        # outside the dim nobody has anything, and a convolution pads with zeros
        if before:
            front = [mine.new_zeros(with_size(self.shape, self.dim, before)), *front]
        if after:
            behind = [*behind, mine.new_zeros(with_size(self.shape, self.dim, after))]
        counts = self.way.counts
        return (
            torch.cat(front, self.dim) if any(counts[: self.me]) else None,
            torch.cat(behind, self.dim) if any(counts[self.me + 1 :]) else None,
        )


class HaloBack:
    """An exchange under way of a halo's gradients to the owners of its indices, the adjoint of `Halo`. Collective.

    front, behind  gradients of what `Halo.wait` returned;  wanted  as given to `Halo`
    like           a part cut as the halo's tensor, of which only the cut, shape and dtype are read
    """

    def __init__(self, front: torch.Tensor | None, behind: torch.Tensor | None, like: Part, wanted: Wanted):
        local, dim, axis = like.local, like.dim_cut, like.axis
        self.dim, self.way = dim, way_of(like.owners, wanted, axis.index)
        counts, before, me = list(self.way.counts), self.way.around[0], axis.index
        shape = list(local.shape)
        empty = local.new_empty(with_size(shape, dim, 0))
        blocks = [empty] * axis.size
        # zeros outside the dim (`before`) have no owner: their gradient is dropped
        if front is not None:
            blocks[:me] = front.narrow(dim, before, sum(counts[:me])).split(counts[:me], dim)
        if behind is not None:
            blocks[me + 1 :] = behind.narrow(dim, 0, sum(counts[me + 1 :])).split(counts[me + 1 :], dim)
        sizes = [0 if rank == me else len(places) for rank, places in enumerate(self.way.send)]
        self.me, self.passing = me, Passing(blocks, shape, dim, sizes, axis, self.way.alone)

    def add_into(self, local: torch.Tensor) -> None:
        """Waits; adds the gradients that other ranks sent to `local`, this rank's gradient of its own indices."""
        for rank, (piece, places) in enumerate(zip(self.passing.pieces(), self.way.send, strict=True)):
            if rank != self.me and len(places):
                local.narrow(self.dim, int(places[0]), len(places)).add_(piece)


@lru_cache(REMEMBERED)
def has_halos(owners: Owners, wanted: Wanted) -> bool:
    """Whether each rank wants one range that overlaps its own indices, and ranks own blocks in rank order."""
    for rank, mine in enumerate(wanted):
        first, count = owners.span(rank) or (0, 0)
        if len(mine) != 1 or not count or mine[0][0] >= first + count or mine[0][1] <= first:
            return False
    return owners.in_rank_order


@lru_cache(REMEMBERED)
def wants_own(owners: Owners, wanted: Wanted) -> bool:
    """Whether each rank wants all of its own indices in their order, and nothing else."""
    return all(len(mine) == 1 and owners.span(rank) == (mine[0][0], mine[0][1] - mine[0][0])
               for rank, mine in enumerate(wanted))  # fmt: skip
