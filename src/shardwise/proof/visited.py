"""The order that a source defines, in a proof: both sides read a few stretches of it, one for each batch.

    positions of the proof   batch 0   batch 1             batch 2         batch 3              batch 4
    positions of the order   first     around block 2's    in the last     across the epoch's   in the next epoch
                             ones      begin               block           end

The ranks use the source's own order (`Visited`), in every other batch as a resumed run would if it is a blend. The one
process computes a blend's order itself (`literal`), by counting how many samples each source has given before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shardwise.data.blend import Blend, BlendOrder
from shardwise.data.order import Order
from shardwise.proof.literal_order import sample_at, shuffled

BLOCK = 4096  # positions that a blend shuffles at a time; its order depends on it, so it is repeated here
MOST_BLOCKS = 512  # blocks that the one process counts through at most


@dataclass(frozen=True)
class Visited(Order):
    """An order of samples in which batch i of a proof begins at position `starts[i]` of the source's order.

    own    the source's order;  batch  samples of a batch
    """

    own: Order | None = None
    starts: tuple[int, ...] = ()
    batch: int = 1

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Returns the indices, (stop - start,), of the source's samples at the proof's positions [start, stop)."""
        places = _places(self.starts, self.batch, start, stop)
        return np.concatenate([self._at(start + at, place) for at, place in enumerate(places)])

    def _at(self, position: int, place: int) -> np.ndarray:
        """Returns the index, (1,), at `place` of the source's order; every other batch of a blend as if resumed.

        position  in the proof
        """
        own = self.own
        assert own is not None
        if isinstance(own, BlendOrder) and position // self.batch % 2:
            own = own.continued(own.state(place), place)
        return own.indices(place, place + 1)


def starts_of(length: int, batch: int) -> tuple[int, ...]:
    """Returns the position, in an order of `length` samples an epoch, at which each batch of a proof begins."""
    last = min(length, MOST_BLOCKS * BLOCK)
    return (0, BLOCK - batch // 2, last // BLOCK * BLOCK, max(0, last - batch // 2), last + last // 2)


def _places(starts: tuple[int, ...], batch: int, start: int, stop: int) -> list[int]:
    """Returns the positions in the source's order that the proof reads as its positions [start, stop)."""
    return [starts[min(p // batch, len(starts) - 1)] + p - min(p // batch, len(starts) - 1) * batch
            for p in range(start, stop)]  # fmt: skip


def visiting(source: Any, seed: int, starts: tuple[int, ...], batch: int) -> Order | None:
    """Returns the source's own order as a proof's ranks read it (`Visited`); None for a source without one."""
    ask = getattr(source, "order", None)
    own = ask(seed) if callable(ask) else None
    return Visited(len(source), seed, own=own, starts=starts, batch=batch) if isinstance(own, Order) else None


def literal(source: Any, seed: int, starts: tuple[int, ...], batch: int) -> Callable[[int, int], list[int]]:
    """Returns a function (start, stop) -> samples at these positions of a proof, as the one process computes them.

    starts, batch  as of `Visited`

    A source's own order is asked; a blend's is computed here, by counting.
    """
    if not isinstance(source, Blend):
        own = source.order(seed)
        return lambda start, stop: [int(own.indices(p, p + 1)[0]) for p in _places(starts, batch, start, stop)]
    return lambda start, stop: [_blended(source, seed, place) for place in _places(starts, batch, start, stop)]


def _blended(blend: Blend, seed: int, place: int) -> int:
    """Returns the sample at position `place` of a blend's order, by counting through the block up to there."""
    counts = _counts(blend.weights)
    ends = np.cumsum(counts)
    block, at = divmod(place, BLOCK)
    dealt = [int(np.searchsorted(ends, cell, side="right")) for cell in _cells(seed, block)[: at + 1]]
    one = dealt.pop()
    taken = block * counts[one] + dealt.count(one)  # samples of this source before: each block has the same count
    name = f"blend/{seed}/{blend.names[one]}".encode()
    own = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")
    return sum(blend.lengths[:one]) + sample_at(blend.lengths[one], own, taken)


@lru_cache(maxsize=16)
def _cells(seed: int, block: int) -> list[int]:
    """Returns the cells of a blend's block, 0 to `BLOCK` - 1, in shuffled order."""
    return [shuffled(BLOCK, f"order/{seed}/{block}", cell) for cell in range(BLOCK)]


def _counts(weights: tuple[float, ...]) -> list[int]:
    """Returns how many cells of a block each source of a blend gets, by weight and at least one.

    Cells that are left over by rounding go to the sources with the largest remainders.
    """
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    counts = [max(1, int(value)) for value in exact]
    for index in sorted(range(len(exact)), key=lambda i: int(exact[i]) - exact[i]):
        counts[index] += sum(counts) < BLOCK
    while sum(counts) > BLOCK:
        counts[counts.index(max(counts))] -= 1
    return counts
