"""Logical pieces of a global batch, and the one binary tree in which their sums are added on any number of ranks.

    leaves   0 1 2 3 4 5             a piece each, in the order of samples
    tree     ((0 (1 2)) (3 (4 5)))   [low, high) is [low, middle) + [middle, high)

Micro-batches and ranks take leaves in turn: the first micro-batch's are dealt over the ranks, then the second's.

A collective that sums in a fixed order fixes the bits for one number of ranks: on another, kernels see other batches.
So the batch is cut first, into pieces whose number does not depend on the ranks.
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
    """A global batch as `count` pieces, dealt evenly over `accumulate` micro-batches of `ranks` ranks each."""

    count: int
    accumulate: int
    ranks: int

    @property
    def per_rank(self) -> int:
        """Returns how many pieces one rank has in one micro-batch."""
        return self.count // (self.accumulate * self.ranks)

    def first(self, micro_batch: int, rank: int) -> int:
        """Returns the leaf of a rank's first piece in a micro-batch."""
        return (micro_batch * self.ranks + rank) * self.per_rank

    def samples(self, total: int, rank: int) -> list[Run]:
        """Returns [first, last) of each of a rank's pieces in a micro-batch of `total` samples; some may be empty."""
        pieces = self.per_rank * self.ranks
        return [cut(total, pieces, rank * self.per_rank + place) for place in range(self.per_rank)]

    def runs(self, rank: int) -> list[Run]:
        """Returns the largest nodes, [low, high) of leaves, of the tree that hold a rank's pieces alone, in order."""
        firsts = [self.first(index, rank) for index in range(self.accumulate)]
        mine = {leaf for first in firsts for leaf in range(first, first + self.per_rank)}

        def within(low: int, high: int) -> list[Run]:
            count = sum(leaf in mine for leaf in range(low, high))
            # all leaves below are this rank's: the node's sum is its own
            if count == high - low:
                return [(low, high)]
            part = middle(low, high)
            return within(low, part) + within(part, high) if count else []

        return within(0, self.count)
