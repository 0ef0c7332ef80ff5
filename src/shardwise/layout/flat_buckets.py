"""Flat buckets: sizes of buckets and positions of parameters in them; for comm/buckets and forecasts.

bucket 0 |  w4  | b4 |pad|      each bucket is a multiple of the shard degree, so shards are equal:
bucket 1 |   w3     | b3 |      rank r holds [r*size/N, (r+1)*size/N) of every bucket

Each parameter begins at an even element, so that pairs of its elements can be read as complex numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's
FIRST_BUCKET_BYTES = 2**20
ELEMENTS_PER_RANK = 10**6  # as Megatron's


def most_elements(width: int, ranks: int) -> int:
    """Returns the most elements, of `width` bytes each, of a bucket whose gradients `ranks` ranks sum.

    It grows with the ranks, because around a ring a message takes as many hops as there are ranks.
    """
    return max(BUCKET_BYTES // width, ELEMENTS_PER_RANK * ranks)


@dataclass(frozen=True)
class BucketEntry:
    """A parameter in a bucket: its index in the list given to `lay_out`, its elements [start, stop) of the bucket."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of a bucket in order, with padding between them, and up to `size` elements in all."""

    entries: tuple[BucketEntry, ...]
    size: int

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Returns [start, stop) of elements of each stretch of padding."""
        starts = [*(entry.start for entry in self.entries[1:]), self.size]
        return [(entry.stop, start) for entry, start in zip(self.entries, starts, strict=True) if entry.stop < start]

    def shard(self, ranks: int, rank: int) -> tuple[int, int]:
        """Returns [start, stop) of the bucket's elements that are this rank's."""
        size = self.size // ranks
        return size * rank, size * (rank + 1)

    def pieces(self, ranks: int, rank: int) -> list[tuple[BucketEntry, int, int]]:
        """Returns (entry, first, last) of each parameter that overlaps this rank's shard, in bucket coordinates."""
        low, high = self.shard(ranks, rank)
        overlaps = ((e, max(e.start, low), min(e.stop, high)) for e in self.entries)
        return [(entry, first, last) for entry, first, last in overlaps if first < last]


def lay_out(sizes: list[int], cap: int, ranks: int, first_cap: int | None = None, align: int = 2) -> list[BucketLayout]:
    """Returns buckets of at most `cap` elements (one larger parameter fills its own), last parameter first.

    sizes      elements of each parameter, in the order of the model
    ranks      a bucket's size is padded to a multiple of it, which may exceed `cap`
    first_cap  most elements of the first bucket, so that communication starts early in backward; None: `cap`
    align      each parameter begins at a multiple of so many elements
    """
    buckets: list[BucketLayout] = []
    entries: list[BucketEntry] = []
    filled = 0

    def close() -> None:
        nonlocal entries, filled
        if entries:
            buckets.append(BucketLayout(tuple(entries), -(-filled // ranks) * ranks))  # equal shards
        entries, filled = [], 0

    for index in reversed(range(len(sizes))):  # the order in which backward makes gradients, roughly
        limit = first_cap if first_cap is not None and not buckets else cap
        start = -(-filled // align) * align
        if entries and start + sizes[index] > limit:
            close()  # with the entries before this one, which begins the next bucket
            start = 0
        filled = start + sizes[index]
        entries.append(BucketEntry(index, start, filled))
    close()
    return buckets
