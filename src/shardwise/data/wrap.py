"""A map-style torch `Dataset` as a `Source`.

How: the samples asked for are fetched one by one (or together, where the dataset has `__getitems__`) and
joined by torch's `default_collate`, or by a function of the user's.

What it does not do: tame randomness. A dataset that draws random numbers in `__getitem__` gives a sample that
depends on more than its index, and the run is then no longer equal to that of one process: draw from a
generator seeded by the index. Iterable-style datasets have no indices and cannot be wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from shardwise.errors import InputError
from shardwise.task import Source


class DatasetSource:
    """Samples of `dataset`, joined into a batch by `collate`."""

    def __init__(self, dataset: Any, collate: Callable[[list], Any] = default_collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: list[int], region: Any = None) -> Any:
        samples = self._fetch(indices)
        try:
            return self.collate(samples)
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            raise InputError(
                f"{len(samples)} samples of {type(self.dataset).__name__} cannot be joined into a batch: "
                f"{error}; give as_source(dataset, collate=...) a function that joins a list of samples"
            ) from error

    def _fetch(self, indices: list[int]) -> list:
        together = getattr(self.dataset, "__getitems__", None)
        if callable(together):
            return list(together(indices))
        return [self.dataset[index] for index in indices]


def as_source(dataset: Any, collate: Callable[[list], Any] = default_collate) -> Source:
    """`dataset` as a `Source`; a source is returned as it is."""
    if isinstance(dataset, Source):
        return dataset
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not indexed or isinstance(dataset, IterableDataset):
        raise InputError(
            f"{type(dataset).__name__} cannot be a source: only a map-style dataset, with __len__ and "
            "__getitem__, gives a sample by its index"
        )
    return DatasetSource(dataset, collate)
