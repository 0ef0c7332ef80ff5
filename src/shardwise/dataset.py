"""`Source`, of which a rank reads only its samples, and a map-style torch `Dataset` wrapped as one.

How: the samples asked for are fetched one by one (or together, if the dataset has `__getitems__`) and
joined by torch's `default_collate`, or by a function of the user's. The reader seeds the RNGs before each sample
(`random.reading_seeds`), so that a dataset's random numbers do not depend on the rank that fetches it.

What it does not do: wrap iterable-style datasets, which have no indices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

from shardwise.errors import InputError


class Seeds(Protocol):
    """The reader's seeds for random numbers, in `READING`.

    `sample` is called before a sample is read, `samples` before samples are joined (`pads`: which may pad them).
    """

    def sample(self, index: int) -> None: ...
    def samples(self, pads: bool = False) -> None: ...


READING: ContextVar[Seeds | None] = ContextVar("READING", default=None)


@runtime_checkable
class Source(Protocol):
    """Large data, of which a rank reads only its samples.

    `len` is the number of samples. `read(indices, region)` returns a batch (a pytree, batch dim first) of the samples
    at `indices`. A source with the attribute `global_shape`, the sizes of the dims of space in their order in a tensor,
    is asked for a rank's tile if a plan shards space; `region` is then (start, stop) along each of these dims. It is
    None for whole samples, and always for sources without `global_shape`.
    """

    def __len__(self) -> int: ...

    def read(self, indices: list[int], region: Any = None) -> Any: ...


class DatasetSource:
    """A `Source` of the samples of a map-style dataset.

    collate  joins a list of samples into a batch; None: torch's `default_collate`
    pads     Whether `collate` may pad samples to the longest, so that a sample depends on those beside it
    """

    def __init__(self, dataset: Any, collate: Callable[[list], Any] | None = None, pads: bool = True) -> None:
        self.dataset = dataset
        self.collate = collate
        self.pads = pads and collate is not None
        self._first: tuple[int, dict[str, str]] | None = None  # a sample's index, and its fields' shapes and dtypes

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: list[int], region: Any = None) -> Any:
        """Returns the batch of the samples at `indices`; `region` is not used.

        Raises `InputError` for a sample that cannot be read, and for samples that cannot be joined.
        """
        from torch.utils.data import default_collate

        samples = self._fetch(indices)
        reading = READING.get()
        # the reader (`random.reading_seeds`) has to know whether a sample depends on those beside it
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
        """Returns one sample of the dataset; `InputError` with its index if that fails."""
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
        """Raises `InputError` that names a sample whose fields, shapes or dtypes differ from the first sample read."""
        for index, sample in zip(indices, samples, strict=True):
            fields = _fields(sample)
            if self._first is None:
                self._first = index, fields
            first, expected = self._first
            for name in (fields.keys() | expected.keys()) if fields != expected else ():
                here, there = fields.get(name, "absent"), expected.get(name, "absent")
                if here != there:
                    what = f"field {name or '(the sample)'} is {here}, but {there} in"
                    if ("" in fields) != ("" in expected):  # one sample is a single value, the other has fields
                        what = f"it is {_made_of(fields)}, but {_made_of(expected)} in"
                    raise InputError(
                        f"{type(self.dataset).__name__}: sample {index}: {what} sample {first}: mend the dataset, or "
                        "give as_source(dataset, collate=...) a function that joins unequal samples"
                    )


def _made_of(fields: dict[str, str]) -> str:
    """Returns a text on a sample's structure: its fields' names, or the type of a single value."""
    return fields.get("", f"fields {', '.join(fields)}").replace("NoneType", "None")


def _fields(sample: Any) -> dict[str, str]:
    """Returns {path of a leaf: "DTYPE SHAPE" of a tensor or array, else name of its type}; path "": a single value."""
    from torch.utils import _pytree as pytree

    kinds = {}
    for path, leaf in pytree.tree_flatten_with_path(sample)[0]:
        shaped = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        dtype = str(getattr(leaf, "dtype", "")).removeprefix("torch.")
        kinds[pytree.keystr(path)] = f"{dtype} {tuple(leaf.shape)}" if shaped else type(leaf).__name__
    return kinds


def name_of(source: Any) -> str:
    """Returns the name of the source's class, or of the dataset's that it wraps, for messages."""
    return type(source.dataset if isinstance(source, DatasetSource) else source).__name__


def as_source(dataset: Any, collate: Callable[[list], Any] | None = None, pads: bool = True) -> Source:
    """Returns `dataset` as a `Source`; a source is returned unchanged.

    dataset  a map-style dataset, or tensors with a row for each sample as a tuple or dict
    collate  joins a list of samples into a batch; None: torch's `default_collate`
    pads     Whether `collate` may pad to the longest sample; ranks then read whole batches and keep their parts, while
             otherwise each reads only its own samples

    Raises `InputError` for data without samples by index, and for tensors that may be samples or columns.
    """
    if isinstance(dataset, Source):
        return dataset
    # a path is a common mistake, and has a length and indices too
    if isinstance(dataset, str | bytes | os.PathLike):
        raise InputError(
            f"{dataset!r} cannot be a source: it is a path; give an object that reads it by index, such as "
            "shardwise.data.JsonlSource(path) or a map-style dataset"
        )
    # samples of a stream have no index by which they could be dealt to ranks or resumed
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
    return DatasetSource(Columns(dataset) if collate is None and _in_columns(dataset) else dataset, collate, pads)


class Columns:
    """A map-style dataset of tensors or arrays with a row for each sample: (x, y), or {"x": x, "y": y}."""

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
    """Whether `data` is a tuple or dict of tensors or arrays with a row for each sample.

    Raises `InputError` if their numbers of rows differ, or if a tuple may also be one of samples.
    """
    columns = list(data.values()) if isinstance(data, Mapping) else list(data) if isinstance(data, tuple) else []
    shapes = [tuple(getattr(column, "shape", ())) for column in columns]
    if not columns or not all(shapes):
        return False
    told = f"data is a {type(data).__name__} of tensors of shapes {', '.join(map(str, shapes[:3]))}"
    # a tuple of equally shaped tensors may be (x, y) or samples; a dict's values are columns
    alike = len({(shape, str(column.dtype)) for shape, column in zip(shapes, columns, strict=True)}) == 1
    if alike and not isinstance(data, Mapping):
        if len(columns) > shapes[0][0]:  # more tensors than rows are samples
            return False
        raise InputError(
            f"{told}: samples, or tensors with a row for each? Give a list for samples, "
            "torch.utils.data.TensorDataset(x, y) for rows"
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise InputError(f"{told}: tensors beside each other need one row for each sample, and as many rows")
    return True


def _is_iterable_style(dataset: Any) -> bool:
    """Whether a dataset's class inherits torch's `IterableDataset`, even if it defines a length."""
    return any(f"{kind.__module__}.{kind.__name__}" == "torch.utils.data.dataset.IterableDataset"
               for kind in type(dataset).__mro__)  # fmt: skip
