"""Save for backward a tile's halo and the tile, which other operations save anyway, in place of a window of both.

    forward     window = halo of others | tile, one tensor              the operation reads it and is done
    kept        the halo's strips, and the tile as it lies in memory    the window is gone
    backward    window put together again                               nothing is sent

A convolution saves its input. In one process that is the result of the activation before it, which saves it too. The
window is a copy of it, and saving that would take half as much memory again in a net of convolutions, norms and ReLU.
Under recompute, or hooks of the user's own, these decide what is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import Axis
from shardwise.part.cuts import Owners
from shardwise.part.exchanges import Wanted
from shardwise.part.levels import Distributed


@dataclass(frozen=True)
class CutDim:
    """One cut of a tensor: `dim`, dealt by `owners` over `axis`, an axis of positions."""

    axis: Axis
    dim: int
    owners: Owners


@dataclass
class _Apart:
    """A saved window, as strips around a view of the tile. `version`: the tile's `_version` when it was made."""

    strips: list[tuple[int, torch.Tensor, torch.Tensor]]  # (dim, in front, behind), the outermost first
    tile: torch.Tensor
    version: int

    def together(self) -> torch.Tensor:
        """Returns the tile with its halos, as it was read in forward."""
        if self.tile._version != self.version:  # autograd would say so of a tensor that it keeps itself
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tile {tuple(self.tile.shape)} that a convolution or pooling has read"
            )
        window = self.tile
        for dim, front, behind in reversed(self.strips):
            window = torch.cat([front, window, behind], dim)
        return window


@contextmanager
def kept_apart(window: torch.Tensor, tensor: torch.Tensor, fetched: Sequence[tuple[CutDim, Wanted]]) -> Iterator[None]:
    """Context in which autograd saves strips of the halo and the tile in place of the window.

    window   what this rank's outputs read of `tensor`, with its halo
    fetched  (cut, wanted) of each dim along which it was fetched, the outermost first
    """
    places = [_own(cut, wanted) for cut, wanted in fetched]
    tile, around = _innermost(tensor), []
    # an axis further in may have cut the tile once more along one of these dims, softly: it was gathered on the way
    other = any(tile.shape[cut.dim] != cut.owners.counts[cut.axis.index] for cut, _ in fetched)
    # no plain window, no tile that lies in it as one block, or other hooks (recompute, offload) say what is kept
    if isinstance(window, Distributed) or other or not all(places) or not nothing_hooked():
        yield
        return
    for (cut, _), place in zip(fetched, places, strict=True):
        assert place is not None
        at, start, count = place
        around.append((cut.dim, at, window.shape[cut.dim] - at - count))
        tile = tile.narrow(cut.dim, start, count)

    # a list, emptied below: autograd keeps `pack` with what it packed, and through its closure would keep the window
    windows = [window]

    def pack(saved: torch.Tensor) -> Any:
        if not windows or not _same(saved, windows[0]):  # something else that the operation keeps
            return saved
        strips, inside = [], saved.detach()
        for dim, front, behind in around:
            n = inside.shape[dim]
            # copies, since a view of the window keeps all of its memory
            ends = inside.narrow(dim, 0, front).clone(), inside.narrow(dim, n - behind, behind).clone()
            strips.append((dim, *ends))
            inside = inside.narrow(dim, front, n - front - behind)
        return _Apart(strips, tile, tile._version)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
            yield
    finally:
        windows.clear()


def _unpacked(kept: Any) -> torch.Tensor:
    """Returns the window of an `_Apart`; any other saved tensor unchanged."""
    return kept.together() if isinstance(kept, _Apart) else kept


def _own(cut: CutDim, wanted: Wanted) -> tuple[int, int, int] | None:
    """Returns (position in the window, position in the tile, length) of the own indices that this rank wants.

    None if it wants more than one range, or none of its own indices.
    """
    mine, span = wanted[cut.axis.index], cut.owners.span(cut.axis.index)
    if len(mine) != 1 or span is None:
        return None
    (low, high), (start, count) = mine[0], span
    first, last = max(low, start), min(high, start + count)
    return (first - low, first - start, last - first) if last > first else None


def nothing_hooked() -> bool:
    """Whether no hooks on saved tensors are in force (of recompute, offload, the user), which choose what is saved."""
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()
    return enabled and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor that this rank holds."""
    while isinstance(tensor, Distributed):
        tensor = tensor.settled_local()
    return tensor.detach()


def _same(saved: torch.Tensor, window: torch.Tensor) -> bool:
    """Whether two tensors have the same memory, shape and strides; they may be different objects."""
    if isinstance(saved, Distributed) or saved.shape != window.shape or saved.stride() != window.stride():
        return False
    same = saved.untyped_storage()._cdata == window.untyped_storage()._cdata
    return same and saved.storage_offset() == window.storage_offset()
