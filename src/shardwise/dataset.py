"""`Source`, of which a rank reads only its samples, and a map-style torch `Dataset` wrapped as one.

How: the samples asked for are fetched one by one (or together, where the dataset has `__getitems__`) and
joined by torch's `default_collate`, or by a function of the user's. Who reads seeds the generators before each sample
(`random.reading_seeds`), so that what a dataset draws does not depend on who fetches it.

What it does not do: wrap iterable-style datasets, which have no indices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

from shardwise.errors import InputError


class Seeds(Protocol):
    """The reader's seeds: told which sample is read next, or that several are joined, and by a user's function."""

    def sample(self, index: int) -> None: ...
    def samples(self, pads: bool = False) -> None: ...


READING: ContextVar[Seeds | None] = ContextVar("READING", default=None)


@runtime_checkable
class Source(Protocol):
    """Large data: a rank reads only its samples.

    `read(indices, region)` returns a batch (a pytree, batch dim first) of the samples at `indices`. A source with a
    `global_shape`, the extents of space, is asked for a rank's own tile where a plan cuts space: `region` is then
    (start, stop) along each of its dims. Both are in the order in which a sample's tensors have these dims. It is None
    for whole samples, and always for sources without one.
    """

    def __len__(self) -> int: ...

    def read(self, indices: list[int], region: Any = None) -> Any: ...


class DatasetSource:
    """Samples of `dataset`, joined into a batch by `collate`; None: torch's `default_collate`.

    pads    a sample may look otherwise beside others (padded to the longest); without `collate` none does
    """

    def __init__(self, dataset: Any, collate: Callable[[list], Any] | None = None, pads: bool = True) -> None:
        self.dataset = dataset
        self.collate = collate
        self.pads = pads and collate is not None
        self._first: tuple[int, dict[str, str]] | None = None  # a sample's index, and its fields' shapes and dtypes

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: list[int], region: Any = None) -> Any:
        """Returns the batch of these samples, joined by `collate` or torch's own; `region` is not used.

        Raises `InputError` for a sample that cannot be read, and for samples that cannot be joined.
        """
        from torch.utils.data import default_collate

        samples = self._fetch(indices)
        reading = READING.get()
        # whoever reads (`random.reading_seeds`) wants to know whether samples hang on those beside them
        if reading is not None:
            reading.samples(self.pads)
        if self.collate is None:
            self._compare(indices, samples)
        try:
            return (self.collate or default_collate)(samples)
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            raise InputError(
                f"{len(samples)} samples of {type(self.dataset).__name__} cannot be joined into a batch: "
                f"{error}; give as_source(dataset, collate=...) a function that joins a list of samples"
            ) from error

    def _fetch(self, indices: list[int]) -> list:
        together = getattr(self.dataset, "__getitems__", None)
        if callable(together):
            return list(together(indices))
        return [self._sample(index) for index in indices]

    def _sample(self, index: int) -> Any:
        """Returns one sample of the dataset; `InputError`, with its index, where that fails."""
        reading = READING.get()
        if reading is not None:
            reading.sample(index)
        try:
            return self.dataset[index]
        except (LookupError, OSError, ValueError) as error:
            raise InputError(
                f"{type(self.dataset).__name__}: sample {index} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _compare(self, indices: list[int], samples: list) -> None:
        """Raises `InputError` naming a sample whose shape or dtype differs from the first sample's."""
        for index, sample in zip(indices, samples, strict=True):
            fields = _fields(sample)
            if self._first is None:
                self._first = index, fields
            first, expected = self._first
            for name in (fields.keys() | expected.keys()) if fields != expected else ():
                here, there = fields.get(name, "absent"), expected.get(name, "absent")
                if here != there:
                    what = f"field {name or '(the sample)'} is {here}, but {there} in"
                    if ("" in fields) != ("" in expected):  # one of them is one value
                        what = f"it is {_made_of(fields)}, but {_made_of(expected)} in"
                    raise InputError(
                        f"{type(self.dataset).__name__}: sample {index}: {what} sample {first}: mend the dataset, or "
                        "give as_source(dataset, collate=...) a function that joins unequal samples"
                    )


def _made_of(fields: dict[str, str]) -> str:
    """Returns a sample's fields as text; of one without fields what it is."""
    return fields.get("", f"fields {', '.join(fields)}").replace("NoneType", "None")


def _fields(sample: Any) -> dict[str, str]:
    """Returns, by path, dtype and shape of each tensor or array, the type of anything else."""
    from torch.utils import _pytree as pytree

    kinds = {}
    for path, leaf in pytree.tree_flatten_with_path(sample)[0]:
        shaped = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        dtype = str(getattr(leaf, "dtype", "")).removeprefix("torch.")
        kinds[pytree.keystr(path)] = f"{dtype} {tuple(leaf.shape)}" if shaped else type(leaf).__name__
    return kinds


def name_of(source: Any) -> str:
    """Returns the name of the class that a user knows: that of the dataset where a source wraps one."""
    return type(source.dataset if isinstance(source, DatasetSource) else source).__name__


def as_source(dataset: Any, collate: Callable[[list], Any] | None = None, pads: bool = True) -> Source:
    """Returns `dataset` as a `Source`; a source is returned unchanged.

    pads    what `collate` makes of a sample may hang on those beside it, so ranks read whole batches and keep their
            parts; False: each reads its own samples alone

    Raises `InputError` for what has no samples by index, and for tensors that may be samples or columns.
    """
    # a source is one already: its own `read` joins samples
    if isinstance(dataset, Source):
        return dataset
    # a path is a common mistake, and has a length and indices of its own kind
    if isinstance(dataset, str | bytes | os.PathLike):
        raise InputError(
            f"{dataset!r} cannot be a source: it is a path; give an object that reads it by index, such as "
            "shardwise.data.JsonlSource(path) or a map-style dataset"
        )
    # samples of a stream have no place that could be dealt, or resumed from
    if _is_iterable_style(dataset):
        raise InputError(
            f"{type(dataset).__name__} cannot be a source: an iterable dataset has no samples by index, which a run "
            "needs to deal them over ranks and to continue from a position. Write its samples down (a JSONL file, "
            "arrays, a map-style dataset), give `batch` (step -> global batch), or keep your loop and use "
            "shardwise.prepare, where every rank reads the stream and keeps its part"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"{type(dataset).__name__} cannot be a source: only a map-style dataset, with __len__ and "
            "__getitem__, gives a sample by its index, and it has no read(indices) -> batch either"
            + ("; give its dataset (loader.dataset)" if hasattr(dataset, "batch_sampler") else "")
        )
    # a dataset that reads columns at once is asked for a batch of them
    return DatasetSource(Columns(dataset) if collate is None and _in_columns(dataset) else dataset, collate, pads)


class Columns:
    """Map-style dataset of tensors, or arrays, that have a row for each sample: (x, y), or {"x": x, "y": y}."""

    def __init__(self, columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        values = self.columns.values() if isinstance(self.columns, Mapping) else self.columns
        return len(next(iter(values)))

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.columns, Mapping):
            return {name: column[index] for name, column in self.columns.items()}
        return tuple(column[index] for column in self.columns)


def _in_columns(data: Any) -> bool:
    """Whether data is a tuple or dict of tensors or arrays with a row for each sample.

    Raises `InputError` where their numbers of rows differ, or where a tuple may be one of samples as well.
    """
    columns = list(data.values()) if isinstance(data, Mapping) else list(data) if isinstance(data, tuple) else []
    shapes = [tuple(getattr(column, "shape", ())) for column in columns]
    if not columns or not all(shapes):
        return False
    told = f"data is a {type(data).__name__} of tensors of shapes {', '.join(map(str, shapes[:3]))}"
    # a tuple of like tensors may be (x, y) or be samples; a dict's names say that they are columns
    alike = len({(shape, str(column.dtype)) for shape, column in zip(shapes, columns, strict=True)}) == 1
    if alike and not isinstance(data, Mapping):
        if len(columns) > shapes[0][0]:  # more of them than rows: samples
            return False
        raise InputError(
            f"{told}: samples, or tensors with a row for each? Give a list for samples, "
            "torch.utils.data.TensorDataset(x, y) for rows"
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise InputError(f"{told}: tensors beside each other need one row for each sample, and as many rows")
    return True


def _is_iterable_style(dataset: Any) -> bool:
    """Whether it is torch's `IterableDataset`, whose mark is inherited even where its class defines a length."""
    return any(f"{kind.__module__}.{kind.__name__}" == "torch.utils.data.dataset.IterableDataset"
               for kind in type(dataset).__mro__)  # fmt: skip
