"""`Piece`: the elements of a whole tensor that a rank holds; copying what two pieces have in common. Without torch.

A piece is an interval of the row-major flattening of a product of runs of indices, one list of runs for each dim:

    whole (6, 4), runs of dim 0: [0, 2) and [4, 6)     rows 0 1 4 5: a share of tp, interleaved
    its flattening has 16 elements; interval [6, 16)    what flat ZeRO on top of it leaves to one rank

Every share that a plan makes is of this form: whole tensors, FSDP2's boxes, cut weights, dealt experts, flat pieces.
An interval falls into a few boxes of whole rows, each contiguous in memory, so that what two pieces share is a few
strided copies whatever the two layouts are.
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
FEW = 16  # runs of a dim that are copied one by one; more are copied by index


@dataclass(frozen=True)
class Box:
    """A part of a piece that is a product of runs, and lies at [offset, offset + count) of the piece's elements."""

    offset: int
    runs: tuple[Runs, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """How many indices of each dim."""
        return tuple(length(runs) for runs in self.runs)

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Elements [first, last) of the row-major flattening of the product of `runs` of a tensor of `shape`.

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
        """All of a tensor."""
        runs = tuple(((0, size),) if size else () for size in shape)
        return cls(tuple(shape), runs, 0, math.prod(shape))

    @property
    def share(self) -> tuple[int, ...]:
        """The shape of the product of runs."""
        return tuple(length(runs) for runs in self.runs)

    @cached_property
    def share_count(self) -> int:
        """Elements of the product of runs."""
        return math.prod(self.share)

    @property
    def count(self) -> int:
        """Elements of the piece."""
        return self.last - self.first

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.count == math.prod(self.shape)

    def part(self, first: int, last: int) -> Piece:
        """Returns the piece that holds elements [first, last) of this one."""
        return Piece(self.shape, self.runs, self.first + first, self.first + last)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The interval as boxes in its own order: part of a row, whole rows, part of a row, for each leading dim."""
        return tuple(
            Box(offset - self.first, tuple(narrowed(runs, *span) for runs, span in zip(self.runs, spans, strict=True)))
            for offset, spans in _interval(self.share, self.first, self.last, 0)
        )


def length(runs: Runs) -> int:
    """How many indices the runs have."""
    return sum(stop - start for start, stop in runs)


def runs_of(indices: Sequence[int] | np.ndarray) -> Runs:
    """Returns ascending indices as ((start, stop), ...) of consecutive ones."""
    array = np.asarray(indices, dtype=np.int64)
    if not array.size:
        return ()
    breaks = np.flatnonzero(np.diff(array) != 1)
    starts, stops = array[np.concatenate(([0], breaks + 1))], array[np.concatenate((breaks, [array.size - 1]))] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def narrowed(runs: Runs, first: int, last: int) -> Runs:
    """The runs of the indices at places [first, last) among all of `runs`: a box cut out of a share."""
    kept, at = [], 0
    for start, stop in runs:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            kept.append((start + low, start + high))
        at += stop - start
    return tuple(kept)


def _interval(shape: tuple[int, ...], first: int, last: int, base: int) -> Iterator[tuple[int, list[Run]]]:
    """(offset, [start, stop) of each dim) of the boxes that [first, last) of a row-major tensor falls into."""
    if first >= last:
        return
    if not shape:
        yield base, []
        return
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row  # whole rows
    if top > bottom:  # within one row
        for offset, spans in _interval(shape[1:], first - bottom * row, last - bottom * row, base + bottom * row):
            yield offset, [(bottom, bottom + 1), *spans]
        return
    for offset, spans in _interval(shape[1:], first - (top - 1) * row, row, base + (top - 1) * row):
        yield offset, [(top - 1, top), *spans]
    if top < bottom:
        yield base + top * row, [(top, bottom), *((0, size) for size in shape[1:])]
    for offset, spans in _interval(shape[1:], 0, last - bottom * row, base + bottom * row):
        yield offset, [(bottom, bottom + 1), *spans]


def _common(one: Runs, other: Runs) -> list[tuple[int, int, int]]:
    """(place in one, place in other, length) of each run of indices that both have, ascending."""
    found: list[tuple[int, int, int]] = []
    i = j = at_one = at_other = 0
    while i < len(one) and j < len(other):
        low, high = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if low < high:
            here, there = at_one + low - one[i][0], at_other + low - other[j][0]
            if found and found[-1][0] + found[-1][2] == here and found[-1][1] + found[-1][2] == there:
                found[-1] = (found[-1][0], found[-1][1], found[-1][2] + high - low)
            else:
                found.append((here, there, high - low))
        if one[i][1] <= other[j][1]:
            at_one += one[i][1] - one[i][0]
            i += 1
        else:
            at_other += other[j][1] - other[j][0]
            j += 1
    return found


def common_count(one: Piece, other: Piece) -> int:
    """How many elements two pieces of one tensor have in common."""
    return sum(
        math.prod(sum(run[2] for run in _common(a, b)) for a, b in zip(mine.runs, theirs.runs, strict=True))
        for mine in one.boxes
        for theirs in other.boxes
    )


def copy_common(source: np.ndarray, held: Piece, target: np.ndarray, wanted: Piece) -> int:
    """Copy what both pieces have from `source` (the elements of `held`) to `target` (those of `wanted`).

    Both arrays have one dim and contiguous elements. Returns how many elements were copied.
    """
    done = 0
    for theirs in held.boxes:
        for mine in wanted.boxes:
            runs = [_common(a, b) for a, b in zip(theirs.runs, mine.runs, strict=True)]
            if all(runs):
                given = source[theirs.offset : theirs.offset + theirs.count].reshape(theirs.shape)
                taken = target[mine.offset : mine.offset + mine.count].reshape(mine.shape)
                _copy(given, taken, runs)
                done += math.prod(sum(run[2] for run in one) for one in runs)
    return done


def _copy(given: np.ndarray, taken: np.ndarray, runs: list[list[tuple[int, int, int]]]) -> None:
    """Copy the product of runs; a dim with many of them is copied by index."""
    for dim, found in enumerate(runs):
        if len(found) > FEW and sum(len(other) > 1 for other in runs) == 1:
            theirs = [np.arange(here, here + size) for here, _, size in found]
            mine = [np.arange(there, there + size) for _, there, size in found]
            before = (slice(None),) * dim
            every = (slice(None), slice(None))
            rest = [_span(other[0]) if place != dim else every for place, other in enumerate(runs)]
            source: Any = given[tuple(span[0] for span in rest)]
            target: Any = taken[tuple(span[1] for span in rest)]
            target[(*before, np.concatenate(mine))] = source[(*before, np.concatenate(theirs))]
            return
    for places in _product(runs):
        spans = [_span(place) for place in places]
        taken[tuple(span[1] for span in spans)] = given[tuple(span[0] for span in spans)]


def _span(run: tuple[int, int, int]) -> tuple[slice, slice]:
    here, there, size = run
    return slice(here, here + size), slice(there, there + size)


def _product(runs: list[list[tuple[int, int, int]]]) -> Iterator[list[tuple[int, int, int]]]:
    if not runs:
        yield []
        return
    for first in runs[0]:
        for rest in _product(runs[1:]):
            yield [first, *rest]


# --- as JSON


def to_json(piece: Piece) -> list[Any]:
    """[runs of each dim, None where it has all; first, last]."""
    runs = [
        None if runs == (((0, size),) if size else ()) else [list(run) for run in runs]
        for size, runs in zip(piece.shape, piece.runs, strict=True)
    ]
    return [runs, piece.first, piece.last]


def from_json(shape: tuple[int, ...], value: Any) -> Piece:
    """The piece that `to_json` wrote; `InputError` for anything else."""
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
