"""The order of a source's samples, implemented again for the one process: one position at a time, in plain Python.

A run's order (`data/order`) computes whole ranges by NumPy. If both sides of a proof used it, a wrong order (that of
another epoch, or unshuffled) would be on both.
"""

from __future__ import annotations

import hashlib
import math

_ROUNDS, _BITS = 16, 2**64 - 1


def sample_at(length: int, seed: int, position: int) -> int:
    """Returns the index of the sample at `position` of the shuffled epochs of a source of `length` samples."""
    epoch, place = divmod(position, length)
    return shuffled(length, f"order/{seed}/{epoch}", place)


def shuffled(length: int, name: str, place: int) -> int:
    """Returns the index at `place` of a permutation of [0, length) that `name` seeds: a Feistel network on a grid."""
    digest = hashlib.shake_256(name.encode()).digest(8 * _ROUNDS)
    keys = [int.from_bytes(digest[8 * turn : 8 * turn + 8], "little") for turn in range(_ROUNDS)]
    rows = math.isqrt(length - 1) + 1
    rows += rows % 2
    columns = -(-length // rows)
    while True:
        row, column = place // columns, place % columns
        for turn in range(0, _ROUNDS, 2):
            row = (row + _mixed(column, keys[turn])) % rows
            column = (column + _mixed(row, keys[turn + 1])) % columns
        place = row * columns + column
        if place < length:  # the grid has more cells than samples; one beyond them is permuted again (cycle walking)
            return place


def _mixed(value: int, key: int) -> int:
    value = (value * 0x9E3779B97F4A7C15 + key) & _BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _BITS
    return value ^ (value >> 31)
