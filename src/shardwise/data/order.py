"""The sample order: which sample is at a position, computed from the seed and the position alone.

Position p belongs to epoch p // length, and within an epoch every sample is at exactly one position. So
the order does not depend on ranks, batches or workers, and a run can continue from any position.

How: each epoch's permutation is a Feistel network over a grid of a x b cells, a and b close to the square root
of the length (Black and Rogaway 2002). Rounds add a keyed hash of one coordinate to the other. A result beyond
the length is permuted again until it lies within it (cycle walking). No table is stored,
so a length of 2**40 costs what a length of 40 does.

What it does not do: resist an adversary. The mixing is for training, not for secrets.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwise.errors import InputError

ROUNDS = 16  # enough for every permutation of 7 samples to be equally likely
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Order:
    """The order of `length` samples over endless epochs.

    seed      of the permutations; `shuffle`: whether each epoch is permuted, else it has the source's order
    """

    length: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.length < 2**62:
            raise InputError(f"an order needs at least one sample and fewer than 2**62, got {self.length}")
        if not isinstance(self.seed, int):
            raise InputError(f"the seed of an order is an int, got {type(self.seed).__name__}")

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Returns the samples' indices at positions [start, stop), int64 (stop - start,); may span several epochs."""
        if start < 0:
            raise InputError(f"positions start at 0, got {start}")
        pieces = [np.empty(0, dtype=np.int64)]
        while start < stop:
            epoch, low = divmod(start, self.length)
            high = min(low + stop - start, self.length)
            pieces.append(self._within(epoch, np.arange(low, high, dtype=np.uint64)))
            start += high - low
        return np.concatenate(pieces)

    def _within(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if self.shuffle:
            places = permuted(places, self.length, epoch_keys(self.seed, epoch))
        return places.astype(np.int64)


@lru_cache(maxsize=8)
def epoch_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Returns `ROUNDS` 64-bit keys, one for each round of an epoch's permutation."""
    digest = hashlib.shake_256(f"order/{seed}/{epoch}".encode()).digest(8 * ROUNDS)
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def permuted(places: np.ndarray, length: int, keys: tuple[int, ...]) -> np.ndarray:
    """Returns the images (uint64) of `places` (uint64, below `length`) under a keyed permutation of [0, length)."""
    rows = math.isqrt(length - 1) + 1
    rows += rows % 2  # if rows and columns were both odd, only even permutations would occur
    columns = -(-length // rows)
    out = _feistel(places, rows, columns, keys)
    outside = np.flatnonzero(out >= length)
    while outside.size:
        out[outside] = _feistel(out[outside], rows, columns, keys)
        outside = outside[out[outside] >= length]
    return out


def _feistel(cells: np.ndarray, rows: int, columns: int, keys: tuple[int, ...]) -> np.ndarray:
    """Returns the images of `cells` under a permutation of [0, rows * columns).

    A cell is row * columns + column; each key shifts rows, or columns, in turn by a hash of the other.
    """
    row, column = np.divmod(cells, np.uint64(columns))
    for index, key in enumerate(keys):
        if index % 2 == 0:
            row = (row + _hash(column, key) % np.uint64(rows)) % np.uint64(rows)
        else:
            column = (column + _hash(row, key) % np.uint64(columns)) % np.uint64(columns)
    return row * np.uint64(columns) + column


def _hash(values: np.ndarray, key: int) -> np.ndarray:
    """Returns a 64-bit hash of each value: the finaliser of splitmix64 (Steele, Lea and Flood 2014) with a key."""
    mixed = values * _GOLDEN + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))
