"""Which rank owns which index of a cut dim. Pure arithmetic, the same on every rank.

A dim of n indices is dealt by a vector of n owners, kept as runs of equal owners. Slicing, splitting and merging dims
are then the same operations on that vector, whatever the layout: heads, heads inside a fused (3, heads, head_dim),
unequal q|k|v sections, blocks of a long sequence.

    (3, heads=4, head_dim=2) flat, two ranks   0000 1111 | 0000 1111 | 0000 1111     six runs
    after view(3, 4, 2)                        cut along dim 1 by 00 11              two runs

What is computed from owners (their indices, slices, views) is remembered in caches of bounded size.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

import numpy as np
import torch

from shardwise.errors import RefusedPlan
from shardwise.host import to_device
from shardwise.layout.view_dims import NoView, groups

REMEMBERED = 4096  # entries of each cache; a dim of a million indices costs what its runs do


class Uncut(RefusedPlan):
    """Raised if an operation cannot be computed on parts. `origins`: names of the weights whose cuts led to it."""

    origins: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """Returns the message and the plan key (`tp_whole=NAME`) that keeps the weight whole whose cut led to it."""
        said, first = super().__str__(), min(self.origins, default="")
        remedy = f": the cut of '{first}' led here, which tp_whole={first} leaves out"
        return said if not first or remedy in said else said + remedy


class Owners:
    """The owner of each index of a dim, as runs: indices `stops[i-1]` to `stops[i]` belong to rank `who[i]`."""

    __slots__ = ("__dict__", "__weakref__", "_hash", "_key", "ranks", "stops", "who")

    def __init__(self, stops: np.ndarray, who: np.ndarray, ranks: int):
        """`stops` (runs,) ascending, the last one the dim's size; `who` (runs,) the rank that owns each run."""
        # empty runs are dropped and neighbours of one owner joined: equal owners have equal bytes, by which they are
        # compared and remembered
        lengths = np.diff(stops, prepend=0)
        stops, who = stops[lengths > 0], who[lengths > 0]
        last = np.append(who[1:] != who[:-1], True) if len(who) else np.zeros(0, dtype=bool)
        self.stops: np.ndarray = np.ascontiguousarray(stops[last], dtype=np.int64)
        self.who: np.ndarray = np.ascontiguousarray(who[last], dtype=np.int16)
        self.ranks = ranks
        self._key = (ranks, self.stops.tobytes(), self.who.tobytes())
        self._hash = hash(self._key)

    @classmethod
    def of(cls, array: np.ndarray, ranks: int) -> Owners:
        """Returns the `Owners` of a vector `array` (size,) that holds the rank that owns each index."""
        array = np.asarray(array, dtype=np.int16)
        return cls(np.arange(1, len(array) + 1), array, ranks)

    @classmethod
    def blocks(cls, n: int, ranks: int) -> Owners:
        """Returns owners of `n` indices, one block a rank; the first n % ranks blocks are larger by one."""
        sizes = [n // ranks + (r < n % ranks) for r in range(ranks)]
        return cls(np.cumsum(sizes), np.arange(ranks), ranks)

    @classmethod
    def zigzag(cls, n: int, ranks: int) -> Owners:
        """Returns owners of `n` indices, two blocks a rank, one from either end, to balance causal attention."""
        stops = cls.blocks(n, 2 * ranks).stops
        # blocks without indices were dropped from the end of `stops`
        counts = np.diff(np.concatenate([stops, np.full(2 * ranks - len(stops), n)]), prepend=0)
        return cls(np.cumsum(counts), np.concatenate([np.arange(ranks), np.arange(ranks)[::-1]]), ranks)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Owners) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Owners(size={self.size}, counts={self.counts}, runs={len(self.who)})"

    @cached_property
    def size(self) -> int:
        """Returns the dim's global length."""
        return int(self.stops[-1]) if len(self.stops) else 0

    @property
    def array(self) -> np.ndarray:
        """Returns (size,) the rank of each index."""
        return np.repeat(self.who, np.diff(self.stops, prepend=0))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Returns how many indices each rank has."""
        lengths = np.diff(self.stops, prepend=0)
        return tuple(int(lengths[self.who == rank].sum()) for rank in range(self.ranks))

    def indices(self, rank: int) -> np.ndarray:
        """Returns (counts[rank],) the rank's indices, ascending."""
        return _indices(self, rank)

    def span(self, rank: int) -> tuple[int, int] | None:
        """Returns (first, count) of the rank's indices; None if they are not contiguous, (0, 0) if it has none."""
        runs = np.flatnonzero(self.who == rank)
        if not len(runs):
            return 0, 0
        if len(runs) > 1:  # `take` then reads index by index
            return None
        first = int(self.stops[runs[0] - 1]) if runs[0] else 0
        return first, int(self.stops[runs[0]]) - first

    @cached_property
    def in_rank_order(self) -> bool:
        """Whether the ranks' shares, concatenated in rank order, give the dim in its own order."""
        return bool((np.diff(self.who) >= 0).all())

    @property
    def order(self) -> np.ndarray | None:
        """Returns (size,) the position of each index in the concatenated shares; None if `in_rank_order`."""
        return None if self.in_rank_order else _order(self)

    def take(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Returns the rank's share of a whole tensor along `dim`; a view if the rank's indices are contiguous."""
        span = self.span(rank)
        if span is not None:
            return tensor.narrow(dim, *span)
        return tensor.index_select(dim, to_device(self.indices(rank), tensor.device))

    def sliced(self, start: int, stop: int, step: int = 1) -> Owners:
        """Returns owners of the dim after `[start:stop:step]`, with `0 <= start`, `stop <= size`."""
        return _sliced(self, start, max(stop, start), step)

    def local_slice(self, rank: int, start: int, stop: int, step: int = 1) -> np.ndarray:
        """Returns the positions within the rank's share, ascending, of the indices in `[start:stop:step]`."""
        return _local_slice(self, rank, start, stop, step)


@lru_cache(REMEMBERED)
def _indices(owners: Owners, rank: int) -> np.ndarray:
    starts = owners.stops - np.diff(owners.stops, prepend=0)
    mine = owners.who == rank
    runs = [np.arange(a, b) for a, b in zip(starts[mine], owners.stops[mine], strict=True)]
    return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)


@lru_cache(REMEMBERED)
def _order(owners: Owners) -> np.ndarray:
    beside = np.concatenate([_indices(owners, rank) for rank in range(owners.ranks)])
    places = np.empty(owners.size, dtype=np.int64)
    places[beside] = np.arange(owners.size)
    return places


@lru_cache(REMEMBERED)
def _sliced(owners: Owners, start: int, stop: int, step: int) -> Owners:
    # how many of the kept indices lie in front of each stop, rounded up
    return Owners(-((start - np.clip(owners.stops, start, stop)) // step), owners.who, owners.ranks)


@lru_cache(REMEMBERED)
def _local_slice(owners: Owners, rank: int, start: int, stop: int, step: int) -> np.ndarray:
    mine = owners.indices(rank)
    low, high = np.searchsorted(mine, (start, stop))
    places = np.arange(low, high)
    return places if step == 1 else places[(mine[low:high] - start) % step == 0]


def _as_if_full(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (before, after) of a view of an empty tensor with its zeros replaced by sizes that fit each other.

    Raises `Uncut` if the shapes have different numbers of zeros.
    """
    full, goal = list(before), list(after)
    zeros = [[d for d, n in enumerate(shape) if n == 0] for shape in (full, goal)]
    # zeros but the last become 2; the last is set such that both shapes have as many elements
    for shape, places in zip((full, goal), zeros, strict=True):
        for d in places[:-1]:
            shape[d] = 2
    if len(zeros[0]) != len(zeros[1]):
        raise Uncut(f"a view of a tensor without elements from {before} to {after}")
    left, right = 0, 0  # dims on either side that the view leaves alone
    while full[left] == goal[left] and full[left]:
        left += 1
    while full[-1 - right] == goal[-1 - right] and full[-1 - right]:
        right += 1
    inner = [math.prod(n for n in shape[left : len(shape) - right] if n) for shape in (full, goal)]
    full[zeros[0][-1]], goal[zeros[1][-1]] = 2 * inner[1], 2 * inner[0]
    return tuple(full), tuple(goal)


def group_size(before: tuple[int, ...], dim: int, after: tuple[int, ...]) -> int:
    """Returns how many consecutive indices of `dim` must share an owner for a view `before` -> `after` to stay cut.

    The largest such number. Raises `Uncut` if no share of the dim consists of whole indices of the result.
    """
    # shapes with a 0 say nothing of groups: the same view of full ones does
    if 0 in before:
        before, after = _as_if_full(before, after)
    try:
        run, to = next(pair for pair in groups(before, after) if dim in pair[0])
    except NoView as error:
        raise Uncut(str(error)) from None
    behind = math.prod(before[d] for d in run if d > dim)
    sizes = [1]
    for d in reversed(to[1:]):
        sizes.append(sizes[-1] * after[d])
    # the coarsest boundary of the view's dims that lies inside the dim
    inside = [n // behind for n in sizes if n % behind == 0 and n // behind <= before[dim]]
    fitting = [n for n in inside if n and before[dim] % n == 0]
    # no boundary of the view lies within the dim: a share would be no whole part of its result
    if not fitting:
        raise Uncut(f"a view from {before} to {after} has no groups of whole indices of dim {dim}")
    return max(fitting)


@lru_cache(REMEMBERED)
def in_whole_groups(owners: Owners, group: int) -> Owners:
    """Returns owners rounded to whole groups of `group` indices, a divisor of the size, so that none is divided."""
    count = owners.size // group
    # a group goes where its middle index lies, so the fewest indices move
    middle = owners.array[np.arange(count) * group + group // 2]
    near = Owners.of(middle, owners.ranks) if owners.in_rank_order else Owners.blocks(count, owners.ranks)
    return repeated(near, group)


@lru_cache(REMEMBERED)
def of_other_rows(owners: Owners, old: int, new: int) -> Owners:
    """Returns owners after rows of `old` elements are regrouped into rows of `new` elements.

    Each new row goes to the owner of the old row that holds its middle element.
    """
    middle = (np.arange(owners.size * old // new) * new + new // 2) // old
    return Owners.of(owners.who[np.searchsorted(owners.stops, middle, side="right")], owners.ranks)


def runs_of(owners: Owners, rank: int) -> tuple[tuple[int, int], ...]:
    """Returns (start, stop) of each run of a rank's indices."""
    starts = np.concatenate([[0], owners.stops[:-1]])
    mine = owners.who == rank
    return tuple((int(a), int(b)) for a, b in zip(starts[mine], owners.stops[mine], strict=True))


@lru_cache(REMEMBERED)
def unsliced(owners: Owners, size: int, start: int, step: int) -> Owners:
    """Returns owners of a dim of `size` indices whose slice `[start::step]` has `owners`; blocks if that is empty.

    An index that is not in the slice gets the owner of the last one before it that is, else of the first one.
    """
    if not owners.size:
        return Owners.blocks(size, owners.ranks)
    nearest = np.clip((np.arange(size) - start) // step, 0, owners.size - 1)
    return Owners.of(owners.array[nearest], owners.ranks)


@lru_cache(REMEMBERED)
def joined(parts: tuple[Owners, ...]) -> Owners:
    """Returns owners of the concatenation (`cat`) of dims with these owners."""
    before = np.cumsum([0] + [part.size for part in parts[:-1]])
    stops = np.concatenate([part.stops + shift for part, shift in zip(parts, before, strict=True)])
    return Owners(stops, np.concatenate([part.who for part in parts]), parts[0].ranks)


def blocks_within(n: int, ranks: int, inside: Owners | None) -> Owners:
    """Returns owners of `n` indices, one block a rank.

    inside  owners of the same indices over an inner axis: each inner rank's indices are then divided into blocks
    """
    if inside is None:
        return Owners.blocks(n, ranks)
    dealt = np.empty(n, dtype=np.int16)
    for rank in range(inside.ranks):
        mine = inside.indices(rank)
        dealt[mine] = Owners.blocks(len(mine), ranks).array
    return Owners.of(dealt, ranks)


@lru_cache(REMEMBERED)
def repeated(owners: Owners, times: int) -> Owners:
    """Returns owners of the dim after every index is repeated `times` times in a row (`repeat_interleave`)."""
    return Owners(owners.stops * times, owners.who, owners.ranks)


@lru_cache(REMEMBERED)
def tiled(owners: Owners, times: int) -> Owners:
    """Returns owners of the dim after all of it is repeated `times` times (`repeat`)."""
    shifts = np.repeat(np.arange(times) * owners.size, len(owners.stops))
    return Owners(np.tile(owners.stops, times) + shifts, np.tile(owners.who, times), owners.ranks)


@lru_cache(REMEMBERED)
def regrouped(
    before: tuple[int, ...], dim: int, owners: Owners, after: tuple[int, ...], goal: int | None = None
) -> tuple[int, Owners]:  # fmt: skip
    """Returns (dim, owners) of a view's result, where dim `dim` of a tensor of shape `before` is cut.

    goal  the result's dim that has to be the cut one; None: the first dim that the shares fit
    Raises `Uncut` if the ranks' elements are no shares of one dim of the result.
    """
    if 0 in before:  # a tile without elements: cut as its neighbours are
        full, filled = _as_if_full(before, after)
        # a cut dim that is empty itself has no owners: blocks stand in for them while the view is followed
        owners = owners if before[dim] else Owners.blocks(full[dim], owners.ranks)
        dim, owners = regrouped(full, dim, owners, filled, goal)
        return dim, owners if after[dim] else Owners.blocks(0, owners.ranks)
    # one rank has all indices: there is nothing that has to fit
    if goal is not None and len(owners.who) == 1:
        return goal, Owners(np.asarray([after[goal]]), owners.who, owners.ranks)
    try:
        run, to = next(pair for pair in groups(before, after) if dim in pair[0])
    except NoView as error:
        raise Uncut(str(error)) from None
    sizes = [before[d] for d in run]
    place = list(run).index(dim)
    # the owners of the dims that the view rearranges, seen as one flat dim
    merged = tiled(repeated(owners, math.prod(sizes[place + 1 :])), math.prod(sizes[:place]))
    places = list(enumerate(to))
    if len(merged.who) == 1 and to and to[0] == 0:  # one rank has all, so any dim would do: samples last
        places = [*places[1:], places[0]]
    for place, d in places:
        inner, outer = math.prod(after[e] for e in to[place + 1 :]), math.prod(after[e] for e in to[:place])
        dealt = merged.sliced(0, after[d] * inner, inner)
        # a dim of one index fits wherever one rank has all of them, and is not the one that was cut
        fits = d == goal if goal is not None else after[d] > 1 or merged.size == 1
        if fits and tiled(repeated(dealt, inner), outer) == merged:
            return d, dealt
    raise Uncut(f"a view from {before} to {after} mixes indices of dim {dim} that lie on different ranks")
