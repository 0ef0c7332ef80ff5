"""The order of a source's samples, written again for the one process: place by place, with numbers of Python.

A run's order (`data/order`) deals whole ranges by NumPy. An epoch in the order of another, or in the source's own,
would be on both sides of a proof if both asked it.
"""

from __future__ import annotations

import hashlib
import math

_ROUNDS, _BITS = 16, 2**64 - 1


def sample_at(length: int, seed: int, position: int) -> int:
    """Returns the sample of a source of `length` samples at a position of its shuffled epochs."""
    epoch, place = divmod(position, length)
    return shuffled(length, f"order/{seed}/{epoch}", place)


def shuffled(length: int, name: str, place: int) -> int:
    """Returns the sample at a place of [0, length) in the permutation seeded by `name`."""
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
        if place < length:  # a cell of the grid beyond the samples goes on
            return place


def _mixed(value: int, key: int) -> int:
    value = (value * 0x9E3779B97F4A7C15 + key) & _BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _BITS
    return value ^ (value >> 31)
