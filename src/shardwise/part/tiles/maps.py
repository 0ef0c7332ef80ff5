"""Which inputs each output of an operation along one dim reads, and hence what each rank fetches. Pure arithmetic.

    convolution, kernel 3, stride 2, padding 1, 10 inputs on two ranks

    inputs        0 1 2 3 4 | 5 6 7 8 9
    outputs       0   1   2     3   4        output j belongs to the owner of its middle input, 2 j
    rank 0        -1 ...... 5                outputs 0..2 read inputs -1..5: zero, its own, one from rank 1
    rank 1                  5 ...... 9       outputs 3..4 read inputs 5..9

Stride, dilation, even kernels, uneven, tiny and empty tiles, and halos over several neighbours need no other rule.
Every rank computes it for all ranks alike, so no sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from shardwise.part.cuts import REMEMBERED, Owners
from shardwise.part.exchanges import Wanted


class Map(Hashable, Protocol):
    """Protocol of a map from outputs along one dim to the inputs that they read; inputs may lie outside the dim."""

    @property
    def size(self) -> int:
        """Returns how many outputs there are in all."""

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Returns (first, last + 1) input that outputs `start` to `stop` read, at least one; some may lie outside."""

    def centre(self, outputs: np.ndarray) -> np.ndarray:
        """Returns the input, possibly outside, in the middle of what each output reads."""

    def first(self, low: int) -> int:
        """Returns the first output that the operation gives on inputs from `low` on, without padding."""


@dataclass(frozen=True)
class Sliding:
    """A sliding window: output j of `size` reads inputs j * stride - before + t * dilation, for 0 <= t < kernel.

    before  padding in front of the dim
    """

    size: int
    kernel: int
    stride: int = 1
    before: int = 0
    dilation: int = 1

    @property
    def extent(self) -> int:
        """Returns the number of inputs from the first to the last that one output reads."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def needed(self) -> int:
        """Returns the number of inputs from the first to the last that any output reads, those outside included."""
        return (self.size - 1) * self.stride + self.extent

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Returns (first, last + 1) input that outputs `start` to `stop` read; some may lie outside."""
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.extent

    def centre(self, outputs: np.ndarray) -> np.ndarray:
        """Returns the input in the middle of what each output reads; it may lie outside."""
        return outputs * self.stride - self.before + (self.extent - 1) // 2

    def first(self, low: int) -> int:
        """Returns the first output that the operation gives on inputs from `low` on, without padding."""
        return (low + self.before) // self.stride


@dataclass(frozen=True)
class Spreading(Sliding):
    """A transposed window: input i adds to outputs i * stride - before + t * dilation, for 0 <= t < kernel."""

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Returns (first, last + 1) of inputs such that what they add to covers outputs `start` to `stop`."""
        # from the first input that adds to an output, rounded up, to the last, rounded down; where the stride is longer
        # than the kernel, outputs lie between what two inputs add to, and both are read
        far, behind = self.dilation * (self.kernel - 1), stop + self.before
        low = min(-((far - start - self.before) // self.stride), (start + self.before) // self.stride)
        return low, max((behind - 1) // self.stride + 1, -((far + 1 - behind) // self.stride) + 1, low + 1)

    def centre(self, outputs: np.ndarray) -> np.ndarray:
        """Returns the input in the middle of what each output reads; it may lie outside."""
        return (outputs + self.before - self.dilation * (self.kernel - 1) // 2) // self.stride

    def first(self, low: int) -> int:
        """Returns the first output that the operation gives on inputs from `low` on, without padding."""
        return low * self.stride - self.before


@dataclass(frozen=True)
class Reads:
    """The exchange of one operation along one dim.

    owners   owners of the outputs
    wanted   for each rank, the ranges of inputs that it fetches
    skip     for each rank, the number of outputs of its local operation in front of the first that it owns
    """

    owners: Owners
    wanted: Wanted
    skip: tuple[int, ...]


@lru_cache(REMEMBERED)
def reads(owners: Owners, along: Map) -> Reads:
    """Returns the `Reads` of an operation `along` a dim whose inputs are dealt by `owners`.

    A rank without outputs fetches inputs outside the dim, which are zeros. Its local operation then has a result, which
    is dropped, but is part of autograd's graph, so that the rank issues the collectives of backward.
    """
    after = owners_after(owners, along.size, along.centre(np.arange(along.size)))
    wanted, skip = [], []  # of all ranks, on each of them: what it sends follows from what others want
    for rank in range(owners.ranks):
        start, count = after.span(rank) or (0, 0)
        if count:
            low, high = along.reach(start, start + count)
            wanted.append(((low, high),))
            skip.append(start - along.first(low))
        else:
            low, high = along.reach(0, 1)  # as many inputs as one output reads, all of them in front of the field
            wanted.append(((low - high, 0),))
            skip.append(0)
    return Reads(after, tuple(wanted), tuple(skip))


def owners_after(owners: Owners, size: int, centre: np.ndarray) -> Owners:
    """Returns contiguous owners of `size` outputs, each owned by the owner of its middle input `centre` (size,).

    Blocks if the inputs are not in rank order, or `centre` is not ascending over ranks.
    """
    # dealt zigzag, a rank's outputs would be no range
    if owners.size == 0 or not owners.in_rank_order:
        return Owners.blocks(size, owners.ranks)
    # the middle of what is read at an edge may lie in the padding: the rank at the edge owns it
    dealt = owners.array[np.clip(centre, 0, owners.size - 1)]
    if (np.diff(dealt) < 0).any():
        return Owners.blocks(size, owners.ranks)
    return Owners.of(dealt, owners.ranks)
