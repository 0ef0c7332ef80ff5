"""`Piece`: the elements of an unsharded tensor that a rank holds, and copying between pieces. Without torch.

A piece is an interval of the row-major flattening of a product of runs of indices, one list of runs for each dim:

    unsharded (6, 4), runs of dim 0: [0, 2) and [4, 6)    rows 0 1 4 5: a tp share, interleaved
    its flattening has 16 elements; interval [6, 16)       the part of one rank if flat ZeRO shards this share

Every share that a plan makes has this form: unsharded tensors, FSDP2's boxes, tp shares, experts, flat pieces.
An interval consists of a few boxes, each contiguous in memory, so that the elements that two pieces share can be copied
by a few strided copies, whatever the two layouts are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.errors import InputError

Run = tuple[int, int]  # [start, stop)
Runs = tuple[Run, ...]
FEW = 16  # up to so many runs of a dim are copied one by one; more are copied by index arrays


@dataclass(frozen=True)
class Box:
    """A part of a piece that is a product of index runs.

    offset  place of its first element among the piece's elements, where its `count` elements are contiguous
    runs    for each dim of the unsharded tensor, the indices of the box as ((start, stop), ...)
    """

    offset: int
    runs: tuple[Runs, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns how many indices the box has in each dim."""
        return tuple(length(runs) for runs in self.runs)

    @property
    def count(self) -> int:
        """Returns how many elements the box has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """The elements of an unsharded tensor that a rank holds, as in this module's docstring.

    shape        of the unsharded tensor
    runs         for each dim, the indices of the share as ((start, stop), ...), ascending
    first, last  the piece is elements [first, last) of the row-major flattening of the product of `runs`

    Raises `InputError` for runs that are not ascending within the shape, or an interval outside of their product.
    """

    shape: tuple[int, ...]
    runs: tuple[Runs, ...]
    first: int
    last: int

    def __post_init__(self) -> None:
        if len(self.runs) != len(self.shape):
            raise InputError(f"a piece of a tensor of shape {self.shape} has runs for {len(self.runs)} dims")
        for size, runs in zip(self.shape, self.runs, strict=True):
            at = 0
            for start, stop in runs:
                if not at <= start < stop <= size:
                    raise InputError(
                        f"a piece has runs {runs[:3]} of a dim of {size}: they are not ascending within it"
                    )
                at = stop
        if not 0 <= self.first <= self.last <= self.share_count:
            raise InputError(f"a piece has elements [{self.first}, {self.last}) of {self.share_count}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Piece:
        """Returns the piece that contains every element of a tensor of this shape."""
        runs = tuple(((0, size),) if size else () for size in shape)
        return cls(tuple(shape), runs, 0, math.prod(shape))

    @property
    def share(self) -> tuple[int, ...]:
        """Returns the shape of the product of `runs`: the number of kept indices of each dim."""
        return tuple(length(runs) for runs in self.runs)

    @cached_property
    def share_count(self) -> int:
        """Returns how many elements the product of `runs` has, of which the piece is an interval."""
        return math.prod(self.share)

    @property
    def count(self) -> int:
        """Returns how many elements the piece has."""
        return self.last - self.first

    @property
    def is_whole(self) -> bool:
        """Whether the piece contains every element of the tensor."""
        return self.count == math.prod(self.shape)

    def part(self, first: int, last: int) -> Piece:
        """Returns the sub-piece of elements [first, last), counted from the start of this piece."""
        return Piece(self.shape, self.runs, self.first + first, self.first + last)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Returns the piece as boxes, in the order of its elements.

        For a 2-d share these are at most three: the end of a row, complete rows, and the beginning of a row.
        """
        return tuple(
            Box(offset - self.first, tuple(narrowed(runs, *span) for runs, span in zip(self.runs, spans, strict=True)))
            for offset, spans in _interval(self.share, self.first, self.last, 0)
        )


def length(runs: Runs) -> int:
    """Returns how many indices the runs of one dim contain."""
    return sum(stop - start for start, stop in runs)


def runs_of(indices: Sequence[int] | np.ndarray) -> Runs:
    """Returns the runs ((start, stop), ...) of consecutive ones of ascending `indices`: 0, 1, 4 -> (0, 2), (4, 5)."""
    array = np.asarray(indices, dtype=np.int64)
    if not array.size:
        return ()
    breaks = np.flatnonzero(np.diff(array) != 1)
    starts, stops = array[np.concatenate(([0], breaks + 1))], array[np.concatenate((breaks, [array.size - 1]))] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def narrowed(runs: Runs, first: int, last: int) -> Runs:
    """Returns the runs of the `first`-th up to (not with) the `last`-th index that `runs` contain."""
    kept, at = [], 0
    for start, stop in runs:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            kept.append((start + low, start + high))
        at += stop - start
    return tuple(kept)


def _interval(shape: tuple[int, ...], first: int, last: int, base: int) -> Iterator[tuple[int, list[Run]]]:
    """Yields the boxes that elements [first, last) of a row-major tensor of this shape consist of, in order.

    Each is (base + place of its first element, [(start, stop) of each dim]). `base`: added to every place.
    """
    if first >= last:
        return
    # a 0-d tensor is one box, without dims
    if not shape:
        yield base, []
        return
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row  # [top, bottom): complete rows
    if top > bottom:  # the interval lies within one row
        for offset, spans in _interval(shape[1:], first - bottom * row, last - bottom * row, base + bottom * row):
            yield offset, [(bottom, bottom + 1), *spans]
        return
    for offset, spans in _interval(shape[1:], first - (top - 1) * row, row, base + (top - 1) * row):
        yield offset, [(top - 1, top), *spans]
    if top < bottom:
        yield base + top * row, [(top, bottom), *((0, size) for size in shape[1:])]
    for offset, spans in _interval(shape[1:], 0, last - bottom * row, base + bottom * row):
        yield offset, [(bottom, bottom + 1), *spans]


def _common(first: Runs, second: Runs) -> list[tuple[int, int, int]]:
    """Returns (place in first, place in second, length) of each run of indices that both contain, ascending.

    A place counts the indices that `first`, or `second`, contains before the run.
    """
    common: list[tuple[int, int, int]] = []
    i = j = at_first = at_second = 0
    while i < len(first) and j < len(second):
        low, high = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if low < high:
            here, there = at_first + low - first[i][0], at_second + low - second[j][0]
            # runs that touch on both sides are one copy
            if common and common[-1][0] + common[-1][2] == here and common[-1][1] + common[-1][2] == there:
                common[-1] = (common[-1][0], common[-1][1], common[-1][2] + high - low)
            else:
                common.append((here, there, high - low))
        # the run that ends first meets no further one of the other's
        if first[i][1] <= second[j][1]:
            at_first += first[i][1] - first[i][0]
            i += 1
        else:
            at_second += second[j][1] - second[j][0]
            j += 1
    return common


def common_count(first: Piece, second: Piece) -> int:
    """Returns how many elements two pieces of one tensor have in common."""
    return sum(
        math.prod(sum(run[2] for run in _common(a, b)) for a, b in zip(mine.runs, theirs.runs, strict=True))
        for mine in first.boxes
        for theirs in second.boxes
    )


def copy_common(source: np.ndarray, source_piece: Piece, target: np.ndarray, target_piece: Piece) -> int:
    """Copies the elements that both pieces contain from `source` to `target`; returns how many elements were copied.

    Each array is 1-d and contiguous, with the elements of its piece in the piece's order.
    """
    done = 0
    for theirs in source_piece.boxes:
        for mine in target_piece.boxes:
            runs = [_common(a, b) for a, b in zip(theirs.runs, mine.runs, strict=True)]
            # no common run in some dim: the pieces share nothing
            if all(runs):
                source_box = source[theirs.offset : theirs.offset + theirs.count].reshape(theirs.shape)
                target_box = target[mine.offset : mine.offset + mine.count].reshape(mine.shape)
                _copy(source_box, target_box, runs)
                done += math.prod(sum(run[2] for run in shared) for shared in runs)
    return done


def _copy(source_box: np.ndarray, target_box: np.ndarray, runs: list[list[tuple[int, int, int]]]) -> None:
    """Copies the product of `runs` from one box to another; runs are, for each dim, as `_common` returns them."""
    for dim, of_dim in enumerate(runs):
        # interleaved shares have a run for every few indices; slice by slice, these would be many tiny copies. This
        # holds for one dim alone, since numpy pairs up two index arrays where their product is meant
        if len(of_dim) > FEW and sum(len(other) > 1 for other in runs) == 1:
            theirs = [np.arange(here, here + size) for here, _, size in of_dim]
            mine = [np.arange(there, there + size) for _, there, size in of_dim]
            before = (slice(None),) * dim
            every = (slice(None), slice(None))
            rest = [_span(other[0]) if place != dim else every for place, other in enumerate(runs)]
            source: Any = source_box[tuple(span[0] for span in rest)]
            target: Any = target_box[tuple(span[1] for span in rest)]
            target[(*before, np.concatenate(mine))] = source[(*before, np.concatenate(theirs))]
            return
    for places in _product(runs):
        spans = [_span(place) for place in places]
        target_box[tuple(span[1] for span in spans)] = source_box[tuple(span[0] for span in spans)]


def _span(run: tuple[int, int, int]) -> tuple[slice, slice]:
    here, there, size = run
    return slice(here, here + size), slice(there, there + size)


def _product(runs: list[list[tuple[int, int, int]]]) -> Iterator[list[tuple[int, int, int]]]:
    """Yields each combination of one run of every dim, in row-major order."""
    if not runs:
        yield []
        return
    for first in runs[0]:
        for rest in _product(runs[1:]):
            yield [first, *rest]


# --- as JSON


def to_json(piece: Piece) -> list[Any]:
    """Returns [[runs of each dim, or None if it keeps all indices], first, last]; the shape is not included."""
    runs = [
        None if runs == (((0, size),) if size else ()) else [list(run) for run in runs]
        for size, runs in zip(piece.shape, piece.runs, strict=True)
    ]
    return [runs, piece.first, piece.last]


def from_json(shape: tuple[int, ...], value: Any) -> Piece:
    """Returns the piece of a tensor of `shape` that `to_json` wrote as `value`; `InputError` for anything else."""
    try:
        runs, first, last = value
        dims = tuple(
            (((0, size),) if size else ()) if kept is None else tuple((_int(start), _int(stop)) for start, stop in kept)
            for size, kept in zip(shape, runs, strict=True)
        )
        return Piece(shape, dims, _int(first), _int(last))
    except (TypeError, ValueError) as error:
        raise InputError(f"a piece is described as {str(value)[:80]}: {error}") from None


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected a whole number, got {str(value)[:20]}")
    return value
