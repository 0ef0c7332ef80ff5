"""NumPy arrays as a source: files stay on disk and are mapped, arrays in memory are taken as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import InputError


class ArraySource:
    """{name: (B, ...)} of arrays whose first dim counts the samples; a path is a `.npy` file, mapped read-only."""

    def __init__(self, arrays: Mapping[str, np.ndarray | str | Path]) -> None:
        if not arrays:
            raise InputError("ArraySource: give at least one array")
        self.given = dict(arrays)
        self._open()

    def _open(self) -> None:
        self.arrays = {name: _opened(name, array) for name, array in self.given.items()}
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise InputError(f"ArraySource: the arrays have other numbers of samples: {told}")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.ascontiguousarray(array[indices])) for name, array in self.arrays.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"given": self.given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()


def _opened(name: str, array: np.ndarray | str | Path) -> np.ndarray:
    if isinstance(array, str | Path):
        try:
            loaded: np.ndarray = np.load(array, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"ArraySource: {name}: {array} cannot be read: {error}") from error
        return _numbers(name, loaded)
    return _numbers(name, array)


def _numbers(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim == 0 or array.dtype.kind not in "biufc":
        raise InputError(
            f"ArraySource: {name} is {array.dtype} of shape {array.shape}; expected numbers, samples first"
        )
    return array
