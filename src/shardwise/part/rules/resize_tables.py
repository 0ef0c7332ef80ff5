"""Nearest and linear interpolation along one dim: which inputs each output reads, and with which weights.

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
    """Parameters of an interpolation along one dim from `n` inputs to `size` outputs (a `tiles.maps.Map`).

    linear  Whether an output is interpolated between two inputs, not copied from the nearest one
    align   Whether corners are aligned (`align_corners`)
    scale   the factor by which kernels compute indices; None: size / n
    double  Whether indices and weights are computed in float64, as for a float64 tensor, not in float32
    on_cpu  Whether the CPU's kernels run, whose "nearest" rounds differently in forward and backward
    """

    n: int
    size: int
    linear: bool
    align: bool = False
    scale: float | None = None
    double: bool = True
    on_cpu: bool = True

    @property
    def same(self) -> bool:
        """Whether each output along the dim is the input at the same index."""
        return self.size == self.n and self.scale in (None, 1.0)

    @property
    def one_way(self) -> bool:
        """Whether backward's kernel writes to the inputs that forward's read; a CPU's "nearest" may round otherwise."""
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
        """Returns 0; not used, because the local operation computes this rank's outputs alone."""
        return 0


@lru_cache(256)
def entries(table: Table) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns ((size, K) indices of the inputs that each output reads, ascending, their (size, K) weights or None).

    K is 2 if linear; else 1, without weights.
    """
    if not table.linear:
        return _behind(table)[:, None], None
    # computed in the kernels' own dtype, because a position that is rounded otherwise reads another input
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
    """Returns (size,) the nearest input of each output, rounded as in backward, and on accelerators in forward.

    These kernels compute in float32, and treat equal and doubled sizes by themselves.
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


Rows = tuple[np.ndarray, np.ndarray | None]  # ((outputs, K) indices of inputs, (outputs, K) weights or None: 1)


def opened_for(tensor: torch.Tensor, cut: CutDim, table: Table) -> tuple[torch.Tensor, CutDim, Rows]:
    """Returns (the inputs that this rank's outputs read, the cut of the outputs, `Rows` of this rank's outputs).

    The indices in `Rows` count within these inputs. Differentiable. Collective if inputs of other ranks are read.
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
    """Returns (…, outputs, …), the sums over k of weights[:, k] times the tile at index places[:, k] along `dim`."""
    read = [tile.index_select(dim, _on(places[:, k], tile.device)) for k in range(places.shape[1])]
    if weights is None:
        return read[0]
    shape = [-1 if d == dim else 1 for d in range(tile.dim())]
    low, high = (_on(weights[:, k], tile.device).to(tile.dtype).view(shape) for k in range(2))
    return read[0] * low + read[1] * high


def _on(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(np.ascontiguousarray(numbers), device)
