"""`Halo`: indices around a rank's own ones of a cut dim, sent while it computes what does not need them.

    forward     halo = Halo(part, wanted)      own indices alone      front, behind = halo.wait()
    backward    back = HaloBack(front, ...)    own indices alone      back.add_into(gradient)

Bytes, and what is sent to whom, are those of `fetch` and `give_back`.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from shardwise.part.cuts import REMEMBERED, Owners
from shardwise.part.exchanges import Passing, Wanted, picked, way_of, with_size
from shardwise.part.tensor import Part


class Halo:
    """Messages under way with the indices in front of a rank's own ones of a cut dim and behind them. Collective.

    wanted   of each rank one range that meets its own indices, which lie in the order of ranks (`has_halos`)
    """

    def __init__(self, part: Part, wanted: Wanted):
        local, dim, axis = part.local, part.dim_cut, part.axis
        self.dim, self.me, self.shape = dim, axis.index, list(local.shape)
        self.way = way_of(part.owners, wanted, axis.index)
        blocks = [picked(local, dim, places) for places in self.way.send]
        self.passing = Passing(blocks, self.shape, dim, self.way.counts, axis, self.way.alone)

    def wait(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the indices (in front, behind), zeros outside the dim; None where no other rank has any of it."""
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
    """Messages under way with gradients of a halo to the owners of its indices: the adjoint of `Halo`. Collective.

    front, behind   as `Halo` gave them;  like   this rank's gradient of its own indices: its shape and dtype count
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
        """Adds the other ranks' gradients to this rank's one of its own indices, in place. Waits."""
        for rank, (piece, places) in enumerate(zip(self.passing.pieces(), self.way.send, strict=True)):
            if rank != self.me and len(places):
                local.narrow(self.dim, int(places[0]), len(places)).add_(piece)


@lru_cache(REMEMBERED)
def has_halos(owners: Owners, wanted: Wanted) -> bool:
    """Whether each rank wants one range of indices that meets its own, and these lie in the order of ranks."""
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


__all__ = ["Halo", "HaloBack", "has_halos", "wants_own"]
