"""Sums over pieces of a batch in a fixed binary tree (layout/batch_pieces), so that bits do not depend on the ranks.

    rank 0   pieces 0..3  -> partial sums of the tree's nodes within 0..3   \\  all-to-all: each rank gets its N-th
    rank 1   pieces 4..7  -> partial sums of the tree's nodes within 4..7   /  of every partial sum, and adds them up

A piece without samples adds nothing. Bytes on the wire: (N-1)/N P for each node that a rank holds, which is a single
one if the number of pieces is a power of two times the ranks and nothing is accumulated.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from shardwise.comm.collectives import Axis, all_gather, all_to_all
from shardwise.errors import RunError
from shardwise.layout.batch_pieces import BatchPieces, Run, middle, sibling


class TreeSum:
    """Partial sums of one tensor over nodes of the tree of `count` pieces; two siblings are added up at once."""

    def __init__(self, count: int):
        self.count = count
        self.parts: dict[Run, torch.Tensor] = {}  # node [low, high) -> the sum over its pieces

    def add(self, low: int, high: int, value: torch.Tensor) -> None:
        """Adds `value`, the sum over pieces [low, high), a node of the tree. It may be written into from here on."""
        self.parts[low, high] = value
        neighbour = sibling(low, high, self.count)
        while neighbour is not None and neighbour[0] in self.parts:
            other, parent = neighbour
            left, right = sorted([other, (low, high)])
            total = self.parts.pop(left).add_(self.parts.pop(right))
            self.parts[parent] = total
            low, high = parent
            neighbour = sibling(low, high, self.count)

    def value(self, low: int, high: int) -> torch.Tensor | None:
        """Returns the sum over pieces [low, high), a node of the tree; None if no piece of it was added."""
        if (low, high) in self.parts or high - low == 1:
            return self.parts.get((low, high))
        part = middle(low, high)
        left, right = self.value(low, part), self.value(part, high)
        if left is None or right is None:
            return right if left is None else left
        return left + right


class FixedOrder:
    """A step's sums over pieces of the batch, in the fixed tree, one for each key (a bucket's index, a unit).

    pieces  how the batch is split into pieces;  axis  of the data ranks
    leaf    index of the piece that is running;  last  whether it is this rank's last one in the step
    """

    def __init__(self, pieces: BatchPieces, axis: Axis):
        self.pieces = pieces
        self.axis = axis
        self.leaf, self.last = 0, False
        self._sums: dict[Hashable, TreeSum] = {}

    def begin(self, leaf: int, *, last: bool) -> None:
        """Called before a piece's forward; sets `leaf` and `last`."""
        self.leaf, self.last = leaf, last

    def start_step(self) -> None:
        """Drops all sums of the last step."""
        self._sums.clear()

    def add(self, key: Hashable, value: torch.Tensor) -> None:
        """Adds the running piece's tensor, flat, of a size divisible by the ranks, which may be written into."""
        self._sum(key).add(self.leaf, self.leaf + 1, value)

    def add_rows(self, key: Hashable, rows: torch.Tensor) -> torch.Tensor | None:
        """Adds every rank's running piece, `rows` (ranks, n); returns the sum over all pieces if `last`, else None."""
        for rank, row in enumerate(rows):
            leaf = self.leaf + (rank - self.axis.index) * self.pieces.per_rank
            self._sum(key).add(leaf, leaf + 1, row)
        return positive(self._sums.pop(key).value(0, self.pieces.count)) if self.last else None

    def _sum(self, key: Hashable) -> TreeSum:
        return self._sums.setdefault(key, TreeSum(self.pieces.count))

    def shard(self, key: Hashable, like: torch.Tensor) -> torch.Tensor:
        """Returns this rank's slice, 1/N of the elements, of the sum over all pieces; drops the sum. Collective.

        like   a tensor of the size and dtype of those that were added; it is not read
        """
        mine = self._sums.pop(key, None) or TreeSum(self.pieces.count)
        ranks = self.axis.size
        if ranks == 1:
            return positive(mine.value(0, self.pieces.count), like)
        runs = [self.pieces.runs(rank) for rank in range(ranks)]
        # ranks have unequal numbers of nodes but send equal sizes, so unused rows stay zero and are not read
        sent = like.new_zeros(ranks, max(map(len, runs)), like.numel() // ranks)
        for place, run in enumerate(runs[self.axis.index]):
            value = mine.value(*run)
            # no piece of this node had a sample
            if value is not None:
                sent[:, place] = value.view(ranks, -1)
        received = torch.empty_like(sent)
        all_to_all(received, sent, [1] * ranks, [1] * ranks, self.axis, "gradients")
        whole = TreeSum(self.pieces.count)
        for rank, runs_there in enumerate(runs):
            for place, run in enumerate(runs_there):
                whole.add(*run, received[rank, place])
        return positive(whole.value(0, self.pieces.count), like)

    def whole(self, key: Hashable, like: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all pieces, unsharded, on every rank; drops it. `like` as of `shard`. Collective."""
        shard = self.shard(key, like)
        if self.axis.size == 1:
            return shard
        full = torch.empty_like(like)
        all_gather(full, shard.contiguous(), self.axis, "gradients")
        return full

    def finish_step(self) -> None:
        """Raises `RunError` if some sum has pieces but was not read in this step."""
        if self._sums:
            raise RunError(
                "deterministic: a unit of zero=3 had gradients in some pieces of the batch and none in the last one, "
                "so that their sum was not finished: use zero=2"
            )


def positive(value: torch.Tensor | None, like: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `value` with each -0 replaced by 0, in place; zeros like `like` if it is None.

    Adding zeros for empty pieces would turn -0 into 0 on some numbers of ranks only.
    """
    if value is None:
        assert like is not None
        return torch.zeros_like(like)
    return value.add_(0.0)


class ReduceInOrder:
    """Replacement of FSDP2's reduce-scatter of one unit: gives zeros until the step's last piece, then the sum."""

    def __init__(self, order: FixedOrder):
        self.order = order

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a new uninitialised tensor, as FSDP2 asks of such an object."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Writes this rank's shard of the unit's summed gradients, or zeros before the last piece, to `output_tensor`.

        input_tensor  this rank's unsharded gradients of the running piece, flat
        """
        ranks = self.order.axis.size
        rows = torch.empty_like(input_tensor).view(ranks, -1)
        all_to_all(rows, input_tensor.view(ranks, -1), [1] * ranks, [1] * ranks, self.order.axis, "gradients")
        total = self.order.add_rows(self, rows)
        if total is None:  # FSDP2 accumulates the outputs over micro-batches, to which zeros add nothing
            output_tensor.zero_()
        else:
            output_tensor.copy_(total)
