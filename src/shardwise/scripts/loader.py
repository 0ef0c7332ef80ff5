"""A script's loader, cut so that it yields this rank's part of each of its batches.

    script's batches     [7 2 9 4] [0 5 1 3] [6 8]
    rank 0 of 2 reads     7 2       0 5       6
    rank 1 of 2 reads         9 4       1 3     8

A `DataLoader` over a map-style dataset keeps its sampler, collate function and workers; only the indices of each
batch are cut, so a rank reads its own samples. What has no indices (an iterable dataset, any other iterable) is read
whole by every rank and cut afterwards, which costs each of them all the reading.

What this does not do: order what a sampler draws from a generator of its own making. That ranks drew the same
samples is checked in every step.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from shardwise.engine.batching import parts_of
from shardwise.errors import InputError
from shardwise.layout.dealing import Share, cut


class PartLoader:
    """Yields this rank's part of each batch of `loader`. `part` tells which samples it holds, and of how many.

    len(), `dataset`, `batch_size` and the like are the script's loader's own.
    """

    def __init__(self, loader: Any, data_rank: int, data_ranks: int, events: Events | None = None) -> None:
        _refuse(loader, data_ranks)
        self.whole = loader
        self.part: Share | None = None
        self._rank, self._ranks = data_rank, data_ranks
        self.events = events or Events()
        self._cut = _by_indices(loader) and data_ranks > 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Any]:
        self.events.before_epoch()
        batches = self._indexed() if self._cut else self._sliced()
        try:
            for batch, part, checksum in batches:
                self.part = part
                self.events.before_batch(part, checksum)
                yield batch
                self.events.after_batch()
        finally:
            self.events.after_epoch()

    def _indexed(self) -> Iterator[tuple[Any, Share, int]]:
        sampler = PartSampler(self.whole.batch_sampler, self._rank, self._ranks)
        for batch in _like(self.whole, sampler):
            yield (batch, *sampler.dealt.popleft())

    def _sliced(self) -> Iterator[tuple[Any, Share, int]]:
        for number, batch in enumerate(self.whole):
            (part,) = parts_of(batch, data_rank=self._rank, data_ranks=self._ranks)
            mine = part.batch if self._ranks > 1 else batch
            yield mine, Share(None, part.count, part.start, part.total), zlib.crc32(f"{number} {part.total}".encode())


class Events:
    """What a loop does between batches; here nothing."""

    def before_epoch(self) -> None:
        """The script asks for an iterator."""

    def before_batch(self, part: Share, checksum: int) -> None:
        """A batch is handed out; `checksum` is the same on every rank that was given parts of the same samples."""

    def after_batch(self) -> None:
        """The script asks for the next."""

    def after_epoch(self) -> None:
        """The loop has ended, or was left."""


class PartSampler:
    """Batches of this rank's indices. `dealt` has (part, checksum) of each batch that was drawn and not yet read."""

    def __init__(self, batches: Iterable[list[Any]], data_rank: int, data_ranks: int) -> None:
        self.batches = batches
        self.rank, self.ranks = data_rank, data_ranks
        self.dealt: deque[tuple[Share, int]] = deque()

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        self.dealt.clear()
        for batch in self.batches:
            indices = list(batch)
            low, high = cut(len(indices), self.ranks, self.rank)
            part = Share(None, high - low, low, len(indices))
            self.dealt.append((part, zlib.crc32(repr(indices).encode())))
            yield indices[low:high] or indices[:1]  # no sample of its own: a stand-in that will count nothing


def _by_indices(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _like(loader: DataLoader, sampler: PartSampler) -> DataLoader:
    """The script's DataLoader with other indices; made for each epoch, as workers are."""
    kept = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
            "generator", "prefetch_factor", "persistent_workers", "in_order")  # fmt: skip
    settings = {name: getattr(loader, name) for name in kept if hasattr(loader, name)}
    settings["persistent_workers"] = False
    return DataLoader(loader.dataset, batch_sampler=sampler, **settings)


def _refuse(loader: Any, data_ranks: int) -> None:
    if not isinstance(loader, Iterable):
        raise InputError(f"prepare: the loader is of type {type(loader).__name__}, which cannot be iterated")
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    samplers += [getattr(samplers[1], "sampler", None)]
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise InputError(
            "prepare: the loader has a DistributedSampler, which would deal the samples over ranks a second time: give "
            "the loader that one process would use (shuffle=True, or a plain sampler)"
        )
