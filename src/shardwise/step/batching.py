"""Split a global batch into this rank's parts: every tensor along its first dimension, as layout/dealing says.

How: the batch is flattened as a pytree (dicts, lists, tuples, named tuples, dataclasses registered with
torch), its tensors and numpy arrays are sliced by the dealing of `layout.dealing`, and the tree is put
together again. Slices are views, nothing is copied. Plain values (numbers, strings, None, dtypes, 0-dim
tensors) have no samples in them and go to every rank whole; so does each string of a list of strings.

What it does not do: guess. A leaf of any other kind might hide tensors that every rank would then use whole,
so it is refused by name; so are tensors whose first dimensions differ.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from shardwise.errors import InputError, ShardwiseError
from shardwise.layout.dealing import Share, deal
from shardwise.task_names import where

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    enum.Enum,
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
)


def samples_in(batch: Any, *, name: str = "batch") -> int:
    """Returns the number of samples in a batch; `InputError` if its tensors disagree or none has a batch dim.

    name  what messages call the batch, before a leaf's path, as in "batch['tokens']"
    """
    paths, leaves, _ = _flatten(batch, name)
    return _common_size(paths, leaves, name)[1]


def check_samples(batch: Any, expected: int, *, name: str = "batch") -> None:
    """Raise `InputError`, naming the leaf, unless the batch holds exactly `expected` samples."""
    paths, leaves, _ = _flatten(batch, name)
    first, size = _common_size(paths, leaves, name)
    if size != expected:
        raise InputError(
            f"{paths[first]} has {size} samples where {expected} were asked for: the first dimension of every tensor "
            "must count the samples, one for each index"
        )


def parts_of(batch: Any, *, accumulate: int = 1, data_rank: int = 0, data_ranks: int = 1) -> list[Share]:
    """Returns this rank's `Share` of each micro-batch of a GLOBAL batch.

    accumulate  number of micro-batches;  data_rank, data_ranks  this rank's index among those that split each
    A rank with no sample in a micro-batch gets the micro-batch's first sample as a stand-in, with count 0.
    The parts of all ranks that count, joined in rank order, are the batch again. Raises `InputError` for a leaf that
    cannot be cut, and for fewer samples than micro-batches.
    """
    check_ranks(data_rank, data_ranks)
    if accumulate < 1:
        raise InputError(f"accumulate must be at least 1, got {accumulate}")
    paths, leaves, spec = _flatten(batch, "batch")
    _, samples = _common_size(paths, leaves, "batch")
    parts = []
    for first, last, start, total in deal(samples, accumulate, data_ranks, data_rank):
        # A rank without samples runs one all the same: the others would wait for it in collectives of the module.
        low, high = (first, last) if last > first else (first - start, first - start + 1)
        cut = pytree.tree_unflatten([_slice(leaf, low, high) for leaf in leaves], spec)
        parts.append(Share(batch=cut, count=last - first, start=start, total=total))
    return parts


def pieces_of(part: Share, samples: list[tuple[int, int]]) -> list[Share]:
    """Returns a `Share` for each (first, last) in `samples`, a copy of samples [first, last) of the micro-batch.

    part  this rank's samples of the micro-batch, which must contain them
    A piece with first == last holds the part's first sample, with count 0.
    """
    pieces = []
    for first, last in samples:
        low = first - part.start if last > first else 0
        alone = slice_samples(part.batch, low, low + max(1, last - first))
        alone = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), alone)
        pieces.append(Share(batch=alone, count=last - first, start=first, total=part.total))
    return pieces


def check_ranks(data_rank: int, data_ranks: int) -> None:
    """Raise `InputError` unless 0 <= data_rank < data_ranks."""
    if data_ranks < 1 or not 0 <= data_rank < data_ranks:
        raise InputError(f"data_rank must be in [0, {data_ranks}), got {data_rank} (data_ranks={data_ranks})")


class _Paths:
    """List of names of a batch's leaves ("batch['tokens']"), each made only when a message indexes it, to save time."""

    def __init__(self, batch: Any, name: str):
        self.batch, self.name = batch, name

    def __getitem__(self, index: int) -> str:
        keyed, _ = pytree.tree_flatten_with_path(self.batch, is_leaf=_is_leaf)
        return self.name + pytree.keystr(keyed[index][0])


def path_of(batch: Any, index: int) -> str:
    """Returns the name of the `index`-th leaf of a batch for messages, such as "batch['tokens']"."""
    return _Paths(batch, "batch")[index]


def _is_leaf(node: Any) -> bool:
    return isinstance(node, PackedSequence)  # a named tuple, whose rows mix samples: refused by name, not cut


def _flatten(batch: Any, name: str) -> tuple[_Paths, list[Any], Any]:
    """Returns (names, leaves, pytree spec) of a batch; `InputError` unless leaves are tensors, arrays, plain values."""
    leaves, spec = pytree.tree_flatten(batch, is_leaf=_is_leaf)
    paths = _Paths(batch, name)
    for index, leaf in enumerate(leaves):
        _check_leaf(paths, index, leaf)
    return paths, leaves, spec


def _check_leaf(paths: _Paths, index: int, leaf: Any) -> None:
    """Raises `InputError`, with the leaf's path in the batch, for a leaf that cannot be sliced along samples."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided:
            raise InputError(
                f"{paths[index]} is a tensor of layout {leaf.layout}: only dense (strided) tensors are cut over "
                "samples; pad it or call .to_dense() where the batch is made"
            )
        return
    if isinstance(leaf, (np.ndarray, *PLAIN)):
        return
    raise InputError(
        f"{paths[index]} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which cannot be cut over samples: "
        "give the batch as dicts, lists or tuples of tensors (dict(x) for a mapping), or register its class "
        "as a pytree (torch.export.register_dataclass for a dataclass)"
    )


def _has_samples(leaf: Any) -> bool:
    """Whether a leaf has a batch dim: a tensor or array with at least one dim."""
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _common_size(paths: _Paths, leaves: list[Any], name: str) -> tuple[int, int]:
    """Returns (index of the first leaf with a batch dim, the number of samples); `InputError` if leaves disagree."""
    sized = [(index, int(leaf.shape[0])) for index, leaf in enumerate(leaves) if _has_samples(leaf)]
    if not sized:
        raise InputError(
            f"{name} needs a tensor whose first dimension counts samples; it has none: give tensors, as "
            "torch.tensor(...)"
        )
    first, size = sized[0]
    for other, other_size in sized[1:]:
        if other_size != size:
            raise InputError(
                f"{paths[first]} has {size} samples but {paths[other]} has {other_size}: the first dimension of every "
                "tensor counts samples; expand a tensor shared by all samples, or make it part of the model"
                + _merged_graphs(paths, sized, leaves)
            )
    return first, size


def _merged_graphs(paths: _Paths, sized: list[tuple[int, int]], leaves: list[Any]) -> str:
    """Returns advice to append if a leaf looks like edges of merged graphs (indices of another leaf's rows), else "".

    sized  (index, length of the first dim) of each leaf with a batch dim
    """
    for index, size in sized:
        leaf = leaves[index]
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biu":  # of text and dates torch has no tensors
            continue
        edges = torch.as_tensor(leaf)
        # edges are whole numbers in two rows or columns
        if edges.ndim < 2 or edges.is_floating_point() or edges.is_complex() or not edges.numel():
            continue
        low, high = int(edges.long().min()), int(edges.long().max())  # unsigned ones have no least element in torch
        for other, rows in sized:
            # all of its numbers are valid rows of another tensor of another length: edges, most probably
            if other != index and rows != size and low >= 0 and high < rows:
                return (
                    f". If {paths[index]} are edges between rows of {paths[other]}, several graphs merged into one: "
                    "give each graph apart, padded to one size, as nodes (B, N, features) and edges (B, E, 2), and "
                    "merge them in the forward, or give dense adjacencies (B, N, N)"
                )
    return ""


def _slice(leaf: Any, low: int, high: int) -> Any:
    return leaf[low:high] if _has_samples(leaf) else leaf


def slice_samples(batch: Any, low: int, high: int) -> Any:
    """Returns samples [low, high) of a batch: every tensor sliced along its first dimension, as views."""
    _, leaves, spec = _flatten(batch, "batch")
    return pytree.tree_unflatten([_slice(leaf, low, high) for leaf in leaves], spec)


def fields_of(batch: Any) -> dict[str, str]:
    """Returns {leaf's name: description}, as {"batch['x']": "float32 (B, 3, 32)"}; of plain values their type."""
    keyed, _ = pytree.tree_flatten_with_path(batch, is_leaf=_is_leaf)
    return {"batch" + pytree.keystr(path): _kind(leaf) for path, leaf in keyed}


def _kind(leaf: Any) -> str:
    if not _has_samples(leaf):
        return type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')} ({', '.join(['B', *map(str, leaf.shape[1:])])})"


@contextmanager
def told_beside_first(first: dict[str, str], batch: Any, step: int) -> Iterator[None]:
    """Context: an error inside on a batch whose fields differ from the first batch's becomes an `InputError`.

    first   `fields_of` the first batch;  batch  the present one;  step  its step, from 0
    Other errors are raised as they are.
    """
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        now = fields_of(batch)
        names = [name for name in {**first, **now} if first.get(name) != now.get(name)]
        if not names:  # the batch is like the first: the error has another cause
            raise
        unlike = [f"{name} was {first.get(name, 'absent')}, now {now.get(name, 'absent')}" for name in names]
        raise InputError(
            f"step {step + 1} fails on a batch unlike the first: {where(error)}. {'; '.join(unlike)}: give each batch "
            "the same fields"
        ) from error
