"""Operations along one dim whose outputs each read a few inputs with fixed weights: resizing, adaptive windows.

    bilinear, 4 -> 8     output 3 = 0.75 * input 1 + 0.25 * input 2
    adaptive, 7 -> 3     outputs are over inputs 0..2, 2..4, 4..6

Indices and weights are computed in the dtype and order in which torch's kernels do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shardwise.host import to_device
from shardwise.part.cuts import Uncut
from shardwise.part.tiles.maps import reads
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import fetched, opened


@dataclass(frozen=True)
class Table:
    """What each output along one dim reads: `n` inputs to `size` outputs.

    kind    nearest, nearest-exact, linear, or windows (adaptive pooling)
    align   corners are aligned
    scale   the factor that was asked for; None: size / n
    double  indices and weights are computed in float64, as for a float64 tensor
    """

    n: int
    size: int
    kind: str
    align: bool = False
    scale: float | None = None
    double: bool = True
    on_cpu: bool = True

    @property
    def same(self) -> bool:
        """Returns whether each output along the dim is the input at the same index."""
        return self.size == self.n and self.scale in (None, 1.0)

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """As in `Map`."""
        sources, _ = entries(self)
        rows = sources[start:stop]
        return int(rows.min()), int(rows.max()) + 1

    def centre(self, outputs: np.ndarray) -> np.ndarray:
        """As in `Map`."""
        sources, _ = entries(self)
        return (sources[outputs].min(1) + sources[outputs].max(1)) // 2

    def first(self, low: int) -> int:
        """Unused: the local operation gives a rank's outputs alone."""
        return 0


@lru_cache(256)
def entries(table: Table) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns (size, K) inputs that each output reads, ascending, and their weights (None: 1)."""
    if table.kind == "windows":
        return _windows(table)
    # in the kernels' own dtype: a place that is rounded otherwise is another input
    kind: Any = np.float64 if table.double else np.float32
    if table.kind.startswith("nearest"):
        return _nearest(table, kind)[:, None], None
    outputs: Any = np.arange(table.size)
    n = table.n
    if table.align:
        ratio = kind(n - 1) / kind(table.size - 1) if table.size > 1 else kind(0)
        source = ratio * outputs.astype(kind)
    else:
        ratio = _ratio(table, kind)
        source = (np.float64(ratio) * (outputs + 0.5) - 0.5).astype(kind)  # one rounding, as of a fused product
    source = np.maximum(source, kind(0))
    first = np.minimum(source.astype(np.int64), n - 1)
    weight = np.clip(source - first, 0, 1).astype(kind)
    return np.stack([first, np.minimum(first + 1, n - 1)], 1), np.stack([1 - weight, weight], 1)


def _ratio(table: Table, kind: Any) -> Any:
    if table.scale is not None and table.scale > 0:
        return kind(1.0 / table.scale)
    return kind(table.n) / kind(table.size)


def _nearest(table: Table, kind: Any) -> np.ndarray:
    """Returns the input of each output, as the forward kernel has it; refused where the backward kernel has another."""
    outputs: Any = np.arange(table.size)
    n = table.n
    exact = table.kind == "nearest-exact"
    half, single = (0.5 if exact else 0.0), np.float32
    # as the backward kernel has it, which computes in float32 and has a way of its own for equal and doubled sizes
    behind = np.floor((outputs.astype(single) + single(half)) * _ratio(table, single))
    if not exact and table.size in (n, 2 * n):
        behind = outputs // (table.size // n)
    behind = np.minimum(behind.astype(np.int64), n - 1)
    if not table.on_cpu:
        return behind
    source = (np.float64(_ratio(table, kind)) * (outputs + half) - half).astype(kind)
    ahead = np.minimum(np.floor((source + kind(half)).astype(single)).astype(np.int64), n - 1)
    if (ahead != behind).any():
        raise Uncut(
            f"interpolate(mode={table.kind!r}) from {n} to {table.size}: torch's backward reads other places than its "
            "forward here, and tiles have one set of places; use a size that divides, or mode='bilinear'"
        )
    return ahead


def _windows(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Returns, as `entries`, windows of adaptive pooling: output j is over floor(j n / size) to ceil((j + 1) n / size).

    Weights are 0 behind a window that is shorter than the longest.
    """
    outputs = np.arange(table.size)
    start, stop = outputs * table.n // table.size, -(-(outputs + 1) * table.n // table.size)
    places = start[:, None] + np.arange((stop - start).max())
    inside = places < stop[:, None]
    return np.minimum(places, (stop - 1)[:, None]), inside / (stop - start)[:, None]


Rows = tuple[np.ndarray, np.ndarray | None]  # (outputs, K) places, and their weights


def opened_for(tensor: torch.Tensor, cut: CutDim, table: Table) -> tuple[torch.Tensor, CutDim, Rows]:
    """Returns (what this rank's outputs read, the cut of the outputs, their rows with places in the former).

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
    if weights is None:
        return tile.index_select(dim, _on(places[:, 0], tile.device))
    # few outputs of long windows: one mean for each, not one product of the outputs for each of many k
    if places.shape[1] > max(2 * len(places), 4) and _of_means(weights):
        return _by_output(tile, dim, places, weights)
    shape = [-1 if d == dim else 1 for d in range(tile.dim())]
    total = None
    for k in range(places.shape[1]):
        term = tile.index_select(dim, _on(places[:, k], tile.device))
        weight = to_device(np.ascontiguousarray(weights[:, k]), tile.device)
        term = term * weight.to(tile.dtype).view(shape)
        total = term if total is None else total + term
    assert total is not None
    return total


def _of_means(weights: np.ndarray) -> bool:
    """Returns whether each output is the mean of what it reads."""
    return bool(((weights == 0) | (weights == weights.max(1, keepdims=True, initial=0))).all())


def _by_output(tile: torch.Tensor, dim: int, places: np.ndarray, weights: np.ndarray) -> torch.Tensor:
    """Returns one mean of the tile for each window, of equal weights. Without outputs, none of the tile."""
    means = []
    for row, weight in zip(places, weights, strict=True):
        # a window is a range of inputs, and weights of 0 behind it fill up its row
        means.append(tile.narrow(dim, int(row[0]), int((weight > 0).sum())).mean(dim, keepdim=True))
    return torch.cat(means, dim) if means else tile.narrow(dim, 0, 0)


def _on(places: np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(np.ascontiguousarray(places), device)


def output_size(n: int, scale: float) -> int:
    """Returns the number of outputs along a dim of `n` that is resized by a factor."""
    return math.floor(n * scale)
