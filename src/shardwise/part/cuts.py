"""Who holds which index of a cut dim. Pure arithmetic, the same on every rank.

A dim of n indices is dealt by a vector of n owners. Slicing, splitting and merging dims are then the same operations
on that vector, whatever the layout: heads, heads inside a fused (3, heads, head_dim), unequal q|k|v sections.

    (3, heads=4, head_dim=2) flat, two ranks   0000 1111 | 0000 1111 | 0000 1111
    after view(3, 4, 2)                        cut along dim 1 by 0 0 1 1
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import ClassVar

import numpy as np
import torch

from shardwise.errors import RefusedPlan
from shardwise.layout.views import NoView, groups


class Uncut(RefusedPlan):
    """An operation that cannot be done on parts. `origins`: the weights whose cuts led there."""

    origins: frozenset[str] = frozenset()


class Owners:
    """The owner of each index of a dim. Interned: equal vectors are the same object."""

    _known: ClassVar[dict[tuple[int, bytes], Owners]] = {}

    array: np.ndarray  # (n,) int16
    ranks: int

    @classmethod
    def of(cls, array: np.ndarray, ranks: int) -> Owners:
        """The one object for this vector."""
        array = np.ascontiguousarray(array, dtype=np.int16)
        key = (ranks, array.tobytes())
        found = cls._known.get(key)
        if found is None:
            found = cls._known[key] = object.__new__(cls)
            found.array, found.ranks = array, ranks
        return found

    @classmethod
    def blocks(cls, n: int, ranks: int) -> Owners:
        """Contiguous blocks, the first ones larger by one where it does not divide."""
        sizes = [n // ranks + (r < n % ranks) for r in range(ranks)]
        return cls.of(np.repeat(np.arange(ranks), sizes), ranks)

    @property
    def size(self) -> int:
        """Indices in all."""
        return len(self.array)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Indices of each rank."""
        return tuple(np.bincount(self.array, minlength=self.ranks).tolist())

    @cache  # noqa: B019 - owners live as long as the process
    def indices(self, rank: int) -> np.ndarray:
        """This rank's indices, ascending."""
        return np.flatnonzero(self.array == rank)

    @cache  # noqa: B019
    def span(self, rank: int) -> tuple[int, int] | None:
        """(first, count) where the rank's indices are contiguous."""
        mine = self.indices(rank)
        if not len(mine):
            return 0, 0
        return (int(mine[0]), len(mine)) if mine[-1] - mine[0] + 1 == len(mine) else None

    @cached_property
    def order(self) -> np.ndarray | None:
        """Where each index lies when the ranks' pieces are put side by side; None where that is its own place."""
        beside = np.argsort(self.array, kind="stable")
        if (beside == np.arange(self.size)).all():
            return None
        return np.argsort(beside, kind="stable")

    def take(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """The rank's share of a whole tensor: a view where contiguous."""
        span = self.span(rank)
        if span is not None:
            return tensor.narrow(dim, *span)
        return tensor.index_select(dim, torch.from_numpy(self.indices(rank)).to(tensor.device))

    @cache  # noqa: B019
    def sliced(self, start: int, stop: int, step: int = 1) -> Owners:
        """Owners of the dim after `[start:stop:step]`."""
        return Owners.of(self.array[start:stop:step], self.ranks)

    @cache  # noqa: B019
    def local_slice(self, rank: int, start: int, stop: int, step: int = 1) -> tuple[int, ...]:
        """Places, among the rank's own indices, of those that the slice keeps."""
        mine = self.indices(rank)
        kept = (mine >= start) & (mine < stop) & ((mine - start) % step == 0)
        return tuple(np.flatnonzero(kept).tolist())


@cache
def joined(parts: tuple[Owners, ...]) -> Owners:
    """Owners of dims put one behind the other."""
    return Owners.of(np.concatenate([part.array for part in parts]), parts[0].ranks)


@cache
def repeated(owners: Owners, each: int) -> Owners:
    """Every index `each` times in a row."""
    return Owners.of(np.repeat(owners.array, each), owners.ranks)


@cache
def regrouped(before: tuple[int, ...], dim: int, owners: Owners, after: tuple[int, ...]) -> tuple[int, Owners]:
    """Which dim of the view's result is cut, and by whom.

    Raises `Uncut` where ranks' shares are no product of whole dims and a share of one.
    """
    if 0 in before:
        raise Uncut("a view of a tensor without elements")
    try:
        run, to = next(pair for pair in groups(before, after) if dim in pair[0])
    except NoView as error:
        raise Uncut(str(error)) from None
    sizes = [before[d] for d in run]
    full = np.broadcast_to(
        owners.array.reshape([-1 if d == dim else 1 for d in run]), sizes
    ).reshape([after[d] for d in to])  # fmt: skip
    for place, d in enumerate(to):
        others = tuple(axis for axis in range(full.ndim) if axis != place)
        vector = full[tuple(slice(None) if axis == place else 0 for axis in range(full.ndim))]
        if (full == np.expand_dims(vector, others)).all() and (full.shape[place] > 1 or full.size == 1):
            return d, Owners.of(vector, owners.ranks)
    raise Uncut(f"a view from {before} to {after} mixes indices of dim {dim} that lie on different ranks")
