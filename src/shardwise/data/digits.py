"""scikit-learn's handwritten digits as a source: 1797 images of 8 x 8 pixels, without a download.

How: the pixels, 0 to 16 in the original, are scaled to [0, 1] and held in memory (half a megabyte). The split
follows from a fixed permutation (data/order), so it is the same on every rank and machine.

What it does not do: augment. A sample depends on its index alone.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.order import Order
from shardwise.errors import InputError

SPLIT_SEED = 0


class DigitsSource:
    """A source of {"image": float32 (B, 1, 8, 8) in [0, 1], "label": int64 (B,)}.

    rows   indices of the samples to use, in order; None: all 1797
    """

    def __init__(self, rows: list[int] | None = None) -> None:
        images, labels = _load()
        chosen = torch.arange(len(labels)) if rows is None else torch.as_tensor(rows, dtype=torch.int64)
        self.images = images[chosen]
        self.labels = labels[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return {"image": self.images[chosen], "label": self.labels[chosen]}


def digits_split(held_out: float = 0.2) -> tuple[DigitsSource, DigitsSource]:
    """Returns (training source, held-out source), the same split every time; `InputError` if one would be empty.

    held_out   fraction of the samples
    """
    count = len(_load()[1])
    held_rows = round(count * held_out)
    if not 0 < held_rows < count:
        raise InputError(f"held_out={held_out} leaves no sample on one side of the {count} digits")
    rows = Order(count, seed=SPLIT_SEED).indices(0, count).tolist()
    return DigitsSource(rows[held_rows:]), DigitsSource(rows[:held_rows])


@lru_cache(maxsize=1)
def _load() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (images (1797, 1, 8, 8), float32 from 0 to 1; labels (1797,), int64 from 0 to 9).

    scikit-learn's data file is read without importing scikit-learn, which takes seconds in every rank. Raises
    `InputError` if it is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise InputError("the digits need scikit-learn: pip install 'shardwise[images]'")
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    rows = torch.from_numpy(np.loadtxt(file, delimiter=","))  # (1797, 65): the pixels, then the label
    return rows[:, :64].float().reshape(-1, 1, 8, 8) / 16, rows[:, 64].long()
