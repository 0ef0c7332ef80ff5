"""`ArraySource`: NumPy arrays as a source; .npy files are memory-mapped, arrays in memory are used as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import InputError


class ArraySource:
    """A source of {name: tensor (B, ...)} from arrays whose first dim counts the samples.

    arrays        name -> array, or path of a `.npy` file, which is mapped read-only
    global_shape  sizes of the dims of space, with which shapes of fields end; under a plan that shards space a rank
                  reads only its tile of these arrays. None: there are no fields
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray | str | Path], global_shape: Sequence[int] | None = None
    ) -> None:  # fmt: skip
        if not arrays:
            raise InputError("ArraySource: give at least one array")
        self.sources = dict(arrays)
        self.global_shape = None if global_shape is None else tuple(global_shape)
        self._open()

    def _open(self) -> None:
        """Opens each array into `arrays`; `InputError` if lengths differ, or no array has `global_shape`."""
        self.arrays = {name: _opened(name, array) for name, array in self.sources.items()}
        lengths = {name: len(array) for name, array in self.arrays.items()}
        # sample i is row i of every array
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise InputError(f"ArraySource: the arrays have other numbers of samples: {told}")
        # otherwise no array would be read by tile
        if self.global_shape is not None and not any(map(self._has_space, self.arrays.values())):
            told = ", ".join(f"{name} {array.shape[1:]}" for name, array in self.arrays.items())
            raise InputError(f"ArraySource: global_shape={self.global_shape}, and no array's samples end in it: {told}")

    def _has_space(self, array: np.ndarray) -> bool:
        space = self.global_shape or ()
        return bool(space) and len(space) < array.ndim and tuple(array.shape[-len(space) :]) == space

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        """Returns {name: tensor (B, ...)} of the samples at `indices`.

        region   (start, stop) along each dim of `global_shape`, to which fields are restricted; None: whole fields
        """
        tensors = {}
        for name, array in self.arrays.items():
            if region is None or not self._has_space(array):
                values = array[indices]
            else:
                inside = (..., *(slice(start, stop) for start, stop in region))
                values = np.stack([array[index][inside] for index in indices])
            # torch has only this machine's byte order
            tensors[name] = torch.from_numpy(np.ascontiguousarray(values, values.dtype.newbyteorder("=")))
        return tensors

    def __getstate__(self) -> dict[str, Any]:
        return {"sources": self.sources, "global_shape": self.global_shape}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()


def _opened(name: str, array: np.ndarray | str | Path) -> np.ndarray:
    """Returns the array, or the memory-mapped .npy file; `InputError` if it is unreadable or holds no numbers."""
    if isinstance(array, str | Path):
        try:
            loaded: np.ndarray = np.load(array, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:  # the last: an empty file
            cut = ", so it was cut short: write or copy it again" if "mmap length" in str(error) else ""
            raise InputError(f"ArraySource: {name}: {array} cannot be read: {error}{cut}") from error
        if not isinstance(loaded, np.ndarray):
            raise InputError(
                f"ArraySource: {name}: {array} holds several arrays ({', '.join(loaded)}), and a file holds one: "
                "write each by np.save, and give that file"
            )
        return _numbers(name, loaded)
    return _numbers(name, array)


def _numbers(name: str, array: np.ndarray) -> np.ndarray:
    """Returns the array unchanged; `InputError` unless it has at least one dim and a numeric dtype."""
    if array.ndim == 0 or array.dtype.kind not in "biufc":
        raise InputError(
            f"ArraySource: {name} is {array.dtype} of shape {array.shape}; expected numbers, samples first"
        )
    return array
