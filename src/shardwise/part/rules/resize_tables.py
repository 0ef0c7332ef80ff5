"""Resizing along one dim, nearest and linear: which inputs each output reads, and their weights.

    linear, 4 -> 8     output 3 = 0.75 * input 1 + 0.25 * input 2

Indices and weights are computed in the dtype and order in which torch's kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shardwise.host import to_device
from shardwise.part.tiles.maps import reads
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import fetched, opened


@dataclass(frozen=True)
class Table:
    """The inputs that each output along one dim reads: `n` inputs, `size` outputs.

    linear  of two inputs, else of the nearest one
    align   corners are aligned
    scale   the factor that was asked for; None: size / n
    double  indices and weights are computed in float64, as for a float64 tensor
    """

    n: int
    size: int
    linear: bool
    align: bool = False
    scale: float | None = None
    double: bool = True
    on_cpu: bool = True  # where forward and backward of "nearest" round in ways of their own

    @property
    def same(self) -> bool:
        """Returns whether each output along the dim is the input at the same index."""
        return self.size == self.n and self.scale in (None, 1.0)

    @property
    def one_way(self) -> bool:
        """Whether backward's kernel adds to the inputs that forward's reads; for "nearest" each rounds in its way."""
        return self.linear or not self.on_cpu or bool((_ahead(self) == _behind(self)).all())

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Returns (first, last + 1) input that outputs `start` to `stop` read."""
        rows = entries(self)[0][start:stop]
        return int(rows.min()), int(rows.max()) + 1

    def centre(self, outputs: np.ndarray) -> np.ndarray:
        """Returns the input in the middle of what each output reads."""
        sources, _ = entries(self)
        return (sources[outputs].min(1) + sources[outputs].max(1)) // 2

    def first(self, low: int) -> int:
        """Returns 0, which is not read: the local operation gives a rank's outputs alone."""
        return 0


@lru_cache(256)
def entries(table: Table) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns (size, K) inputs that each output reads, ascending, and their weights (None: 1)."""
    if not table.linear:
        return _behind(table)[:, None], None
    # in the kernels' own dtype: a place that is rounded otherwise is another input
    kind: Any = np.float64 if table.double else np.float32
    outputs: Any = np.arange(table.size)
    n = table.n
    if table.align:
        ratio = kind(n - 1) / kind(table.size - 1) if table.size > 1 else kind(0)
        source = ratio * outputs.astype(kind)
    else:
        # one rounding, as of a fused product
        source = (np.float64(_ratio(table, kind)) * (outputs + 0.5) - 0.5).astype(kind)
    source = np.maximum(source, kind(0))
    first = np.minimum(source.astype(np.int64), n - 1)
    weight = np.clip(source - first, 0, 1).astype(kind)
    return np.stack([first, np.minimum(first + 1, n - 1)], 1), np.stack([1 - weight, weight], 1)


def _ratio(table: Table, kind: Any) -> Any:
    if table.scale is not None and table.scale > 0:
        return kind(1.0 / table.scale)
    return kind(table.n) / kind(table.size)


def _behind(table: Table) -> np.ndarray:
    """Returns (size,) the nearest input of each output, as backward (on accelerators forward too) rounds it.

    It computes in float32, and has a way of its own for equal and doubled sizes.
    """
    outputs: Any = np.arange(table.size)
    if table.size in (table.n, 2 * table.n):
        return outputs // (table.size // table.n)
    places = np.floor(outputs.astype(np.float32) * _ratio(table, np.float32))
    return np.minimum(places.astype(np.int64), table.n - 1)


def _ahead(table: Table) -> np.ndarray:
    """Returns (size,) the nearest input of each output, rounded as a CPU's forward kernel does."""
    kind: Any = np.float64 if table.double else np.float32
    outputs: Any = np.arange(table.size)
    source = (np.float64(_ratio(table, kind)) * outputs).astype(kind)
    return np.minimum(np.floor(source.astype(np.float32)).astype(np.int64), table.n - 1)


Rows = tuple[np.ndarray, np.ndarray | None]  # (outputs, K) places, and their weights


def opened_for(tensor: torch.Tensor, cut: CutDim, table: Table) -> tuple[torch.Tensor, CutDim, Rows]:
    """Returns (the inputs that this rank's outputs read, the outputs' cut, their table rows: places among these).

    Differentiable. Collective where inputs of other ranks are read.
    """
    sources, weights = entries(table)
    if table.same:
        return opened(tensor, [cut]), cut, (sources, weights)
    plan, me = reads(cut.owners, table), cut.axis.index
    start, count = plan.owners.span(me) or (0, 0)
    rows = slice(start, start + count)
    places = sources[rows] - plan.wanted[me][0][0]
    then = CutDim(cut.axis, cut.dim, plan.owners)
    return fetched(tensor, cut, plan.wanted), then, (places, None if weights is None else weights[rows])


def applied(tile: torch.Tensor, dim: int, places: np.ndarray, weights: np.ndarray | None) -> torch.Tensor:
    """Returns (…, outputs, …): sums over k of weights[:, k] times the tile at places[:, k] along `dim`."""
    read = [tile.index_select(dim, _on(places[:, k], tile.device)) for k in range(places.shape[1])]
    if weights is None:
        return read[0]
    shape = [-1 if d == dim else 1 for d in range(tile.dim())]
    low, high = (_on(weights[:, k], tile.device).to(tile.dtype).view(shape) for k in range(2))
    return read[0] * low + read[1] * high


def _on(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(np.ascontiguousarray(numbers), device)
