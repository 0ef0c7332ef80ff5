"""Samples of the package's own sources, read again for the one process of a run, one at a time.

    Blend        of the source that a number falls into
    TokenSource  a window of its file, counted through the files from the first
    ArraySource  one row of each array

How many samples each of them has is counted again too.

Both sides of a proof read the user's source, which is given. One that the package has would be wrong on both.

What this does not do: read `FieldSource`, of whose files a mean and a lead are taken, or what a user has written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from shardwise.data.arrays import ArraySource
from shardwise.data.blend import Blend
from shardwise.data.tokens import TokenSource
from shardwise.trace.double import as_written, default_dtype


def one_by_one(data: Any, indices: list[int]) -> Any:
    """Returns these samples of what a proof reads (`First`), joined; None where the source is none of the package's."""
    source: Any = getattr(data, "source", None)
    read = _reader(source)
    if read is None:
        return None
    with as_written(), default_dtype(torch.float32):
        rows = [read(source, len(source) * index // len(data)) for index in indices]
        return tree_map(lambda *leaves: torch.cat([torch.as_tensor(leaf) for leaf in leaves]), *rows)


def miscounted(task: Any) -> list[str]:
    """Returns a sentence for each of a task's sources that has another number of samples than it tells."""
    told = []
    for name in ("data", "eval_data"):
        source = getattr(task, name)
        count = _count(source)
        if count is not None and count != len(source):
            told.append(f"{name} has {count} samples, and tells {len(source)}")
    return told


def _count(source: Any) -> int | None:
    if isinstance(source, Blend):
        counts = [(_count(one), one) for one in source.sources]
        return sum(len(one) if count is None else count for count, one in counts)
    if isinstance(source, TokenSource):
        return source.span[1] - source.span[0]
    if isinstance(source, ArraySource):
        return len(_read(next(iter(source.sources.values()))))
    return None


def _reader(source: Any) -> Callable[[Any, int], Any] | None:
    """Returns (source, index) -> a batch of that sample; None for what is read as it is."""
    if isinstance(source, Blend):
        return _of_blend
    if isinstance(source, TokenSource):
        return _of_tokens
    return _of_arrays if isinstance(source, ArraySource) else None


def _of_blend(blend: Blend, index: int) -> Any:
    for source, length in zip(blend.sources, blend.lengths, strict=True):
        if index < length:
            read = _reader(source)
            return source.read([index]) if read is None else read(source, index)
        index -= length
    raise IndexError(index)


def _of_tokens(source: TokenSource, index: int) -> Any:
    window = source.span[0] + index
    for path in source.paths:
        tokens = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, source.dtype, "r")
        count = (len(tokens) - 1) // source.seq_len
        if window < count:
            first = window * source.seq_len
            row = np.array(tokens[first : first + source.seq_len + 1], dtype=np.int64)
            return {"tokens": torch.from_numpy(row)[None]}
        window -= count
    raise IndexError(index)


def _of_arrays(source: ArraySource, index: int) -> Any:
    return {name: torch.from_numpy(np.array(_read(array)[index])[None]) for name, array in source.sources.items()}


def _read(array: Any) -> Any:
    return np.load(array, mmap_mode="r") if isinstance(array, str | Path) else array
