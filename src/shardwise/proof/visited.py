"""The order that a source defines, in a proof: a few places of it, each read by both sides.

    positions of the proof   batch 0   batch 1             batch 2         batch 3              batch 4
    positions of the order   first     around block 2's    in the last     across the epoch's   in the next epoch
                             ones      begin               block           end

The ranks ask the source's own order (`Visited`), a blend's in every other batch as a run finds it that goes on there.
The one process deals a blend by itself (`literal`): it counts how many samples each source has given before.
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

BLOCK = 4096  # places that a blend deals at a time: its order hangs on it, so it is written here again
MOST_BLOCKS = 512  # that the one process counts through


@dataclass(frozen=True)
class Visited(Order):
    """An order of samples in which each batch of a proof starts elsewhere: at `starts`, `batch` samples each."""

    own: Order | None = None
    starts: tuple[int, ...] = ()
    batch: int = 1

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Returns the source's samples, (stop - start,), at the places that stand for positions [start, stop)."""
        places = _places(self.starts, self.batch, start, stop)
        return np.concatenate([self._at(start + at, place) for at, place in enumerate(places)])

    def _at(self, position: int, place: int) -> np.ndarray:
        """Returns the sample at a place, (1,); every other batch of a blend as a resumed run would find it."""
        own = self.own
        assert own is not None
        if isinstance(own, BlendOrder) and position // self.batch % 2:
            own = own.continued(own.state(place), place)
        return own.indices(place, place + 1)


def starts_of(length: int, batch: int) -> tuple[int, ...]:
    """Returns where the batches of a proof begin in an order of `length` positions an epoch."""
    last = min(length, MOST_BLOCKS * BLOCK)
    return (0, BLOCK - batch // 2, last // BLOCK * BLOCK, max(0, last - batch // 2), last + last // 2)


def _places(starts: tuple[int, ...], batch: int, start: int, stop: int) -> list[int]:
    """Returns the positions in the source's order that stand for positions [start, stop) of the proof."""
    return [starts[min(p // batch, len(starts) - 1)] + p - min(p // batch, len(starts) - 1) * batch
            for p in range(start, stop)]  # fmt: skip


def visiting(source: Any, seed: int, starts: tuple[int, ...], batch: int) -> Order | None:
    """Returns the source's own order as the ranks of a proof read it; None for a source without one."""
    ask = getattr(source, "order", None)
    own = ask(seed) if callable(ask) else None
    return Visited(len(source), seed, own=own, starts=starts, batch=batch) if isinstance(own, Order) else None


def literal(source: Any, seed: int, starts: tuple[int, ...], batch: int) -> Callable[[int, int], list[int]]:
    """Returns a function from positions [start, stop) of a proof to samples, as the one process has them.

    starts  where each batch of `batch` samples begins in the source's order
    A source's own order is asked for them; a blend is dealt here, by counting.
    """
    if not isinstance(source, Blend):
        own = source.order(seed)
        return lambda start, stop: [int(own.indices(p, p + 1)[0]) for p in _places(starts, batch, start, stop)]
    return lambda start, stop: [_blended(source, seed, place) for place in _places(starts, batch, start, stop)]


def _blended(blend: Blend, seed: int, place: int) -> int:
    """Returns the sample of a blend at a position, by counting through the blocks before it."""
    counts = _counts(blend.weights)
    ends = np.cumsum(counts)
    block, at = divmod(place, BLOCK)
    dealt = [int(np.searchsorted(ends, cell, side="right")) for cell in _cells(seed, block)[: at + 1]]
    one = dealt.pop()
    taken = block * counts[one] + dealt.count(one)  # each cell of a block before stands once in it
    name = f"blend/{seed}/{blend.names[one]}".encode()
    own = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")
    return sum(blend.lengths[:one]) + sample_at(blend.lengths[one], own, taken)


@lru_cache(maxsize=16)
def _cells(seed: int, block: int) -> list[int]:
    """Returns the places of a blend's block in their shuffled order."""
    return [shuffled(BLOCK, f"order/{seed}/{block}", cell) for cell in range(BLOCK)]


def _counts(weights: tuple[float, ...]) -> list[int]:
    """Returns how many of a block's places each source of a blend gets, at least one; remainders go to the largest."""
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    counts = [max(1, int(value)) for value in exact]
    for index in sorted(range(len(exact)), key=lambda i: int(exact[i]) - exact[i]):
        counts[index] += sum(counts) < BLOCK
    while sum(counts) > BLOCK:
        counts[counts.index(max(counts))] -= 1
    return counts
