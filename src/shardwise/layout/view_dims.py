"""Find which dims a view splits and merges. Pure arithmetic on shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class NoView(ValueError):
    """Raised for shapes that do not hold the same number of elements."""


def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """Returns the smallest runs (dims before, dims after) of equal product in a view, in order.

    For example (6, 4) -> (2, 3, 4) gives [(range(0, 1), range(0, 2)), (range(1, 2), range(2, 3))]. Raises `NoView`.
    """
    return list(_groups(tuple(before), tuple(after)))


@lru_cache(maxsize=4096)
def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[tuple[range, range], ...]:
    """Returns `groups` as a tuple; a run takes dims from the side of the smaller product until both are equal."""
    runs, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        start_i, start_j = i, j
        # one list may end first, with dims of 1 left in the other
        a = before[i] if i < len(before) else 1
        b = after[j] if j < len(after) else 1
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while a != b:
            if a < b and i < len(before):
                a *= before[i]
                i += 1
            elif a > b and j < len(after):
                b *= after[j]
                j += 1
            else:
                raise NoView(f"no view from {tuple(before)} to {tuple(after)}")
        runs.append((range(start_i, i), range(start_j, j)))
    return tuple(runs)
