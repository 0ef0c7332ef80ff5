"""Logical pieces of a global batch, and the binary tree in which their sums are added on any number of ranks.

    leaves   0 1 2 3 4 5             one piece each, in the order of samples
    tree     ((0 (1 2)) (3 (4 5)))   the sum over [low, high) is that over [low, middle) plus that over [middle, high)

Leaves are dealt contiguously, first over micro-batches, then over the ranks of each.

A collective that sums in a fixed order gives the same bits for one number of ranks alone, since with another number
kernels get batches of another size. So the batch is first divided into pieces whose number does not depend on ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout.dealing import cut

Run = tuple[int, int]  # [low, high) of leaves


def middle(low: int, high: int) -> int:
    """Returns the leaf at which the node over [low, high), of at least two leaves, splits into its children."""
    return (low + high) // 2


def sibling(low: int, high: int, count: int) -> tuple[Run, Run] | None:
    """Returns (the other child of [low, high)'s parent, the parent); None for the root."""
    node = (0, count)
    while node != (low, high):
        part = middle(*node)
        inside = (node[0], part) if high <= part else (part, node[1])  # down towards [low, high)
        if inside == (low, high):
            return ((part, node[1]) if high <= part else (node[0], part)), node
        node = inside
    return None


@dataclass(frozen=True)
class BatchPieces:
    """A global batch of `count` pieces, dealt evenly over `accumulate` micro-batches and `ranks` data ranks each."""

    count: int
    accumulate: int
    ranks: int

    @property
    def per_rank(self) -> int:
        """Returns the number of pieces that one rank has in one micro-batch."""
        return self.count // (self.accumulate * self.ranks)

    def first(self, micro_batch: int, rank: int) -> int:
        """Returns the leaf of a rank's first piece in a micro-batch."""
        return (micro_batch * self.ranks + rank) * self.per_rank

    def samples(self, total: int, rank: int) -> list[Run]:
        """Returns [start, stop) of samples of each piece of a rank in a micro-batch of `total`; some may be empty."""
        pieces = self.per_rank * self.ranks
        return [cut(total, pieces, rank * self.per_rank + place) for place in range(self.per_rank)]

    def runs(self, rank: int) -> list[Run]:
        """Returns [low, high) of leaves of the largest tree nodes that contain pieces of this rank alone, in order."""
        firsts = [self.first(index, rank) for index in range(self.accumulate)]
        mine = {leaf for first in firsts for leaf in range(first, first + self.per_rank)}

        def within(low: int, high: int) -> list[Run]:
            count = sum(leaf in mine for leaf in range(low, high))
            # all leaves below are this rank's, so it can compute the node's sum without the others
            if count == high - low:
                return [(low, high)]
            part = middle(low, high)
            return within(low, part) + within(part, high) if count else []

        return within(0, self.count)
