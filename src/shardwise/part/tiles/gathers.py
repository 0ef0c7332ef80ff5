"""Note every tensor that tiles gather whole, and its bytes, in a rehearsal; engine/find_positions tells or refuses.

Nothing is gathered in silence. What mixes positions and has no rule is refused; `whole` is how a model asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shardwise.part.levels import Distributed
from shardwise.part.sums import whole_over_axis
from shardwise.part.tensor import GATHERS, Part
from shardwise.part.tiles.saved_halos import CutDim


@dataclass(frozen=True)
class Gather:
    """One tensor that every tile gathers over one axis. `elements`: received by a rank for each sample."""

    what: str  # operation and tensor, in words
    axis: str
    ranks: int  # of the axis
    elements: int


_SEEN: list[list[Gather]] = []


@contextmanager
def watching() -> Iterator[list[Gather]]:
    """Context: yields a list to which everything that is gathered inside is added."""
    _SEEN.append([])
    try:
        yield _SEEN[-1]
    finally:
        _SEEN.pop()


def noted(what: str, tensor: torch.Tensor, cut: CutDim, samples: int | None = None) -> None:
    """Note that a tensor is gathered over the axis of a cut. `samples`: in it; None: its first dim are samples."""
    samples = tensor.shape[0] if samples is None else samples
    elements = tensor.numel() // max(samples, 1) * (cut.axis.size - 1) // cut.axis.size
    for seen in _SEEN:
        seen.append(Gather(what, cut.axis.name, cut.axis.size, elements))


def _noted(what: str, part: Part) -> None:
    """Note that a rule below autograd gathers a part over its own axis."""
    samples = part.shape[0]
    if part.dim_cut == 0:  # positions first, or joined with the samples before them
        samples = part.factors[0] if part.factors is not None else part.shape[1] if part.dim() > 1 else 1
    noted(what, part, CutDim(part.axis, part.dim_cut, part.owners), samples)


GATHERS.append(_noted)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as one process has it, on every rank: tiles are gathered. Differentiable. Collective.

    For operations that mix positions and have no rule (`torch.linalg.svdvals(whole(x))`). Each rank receives the
    others' tiles and holds all of it, which a run tells before its first step. Without tiles, and in one process, the
    tensor itself.
    """
    here = tensor  # walks inwards, past axes that cut no positions (tp's channels stay cut)
    while isinstance(here, Distributed):
        if isinstance(here, Part) and here.axis.positions:
            noted("a field that the model asks for whole", tensor, CutDim(here.axis, here.dim_cut, here.owners))
            tensor = whole_over_axis(tensor, here.axis)
        here = here.settled_local()
    return tensor


def explained(seen: Sequence[Gather]) -> list[str]:
    """Returns a line of text for each kind of tensor that is gathered."""
    return [
        f"{what} is gathered over {axis}={ranks}: in a forward a rank receives "
        f"{sum(g.elements for g in seen if (g.what, g.axis) == (what, axis)):,} elements for a sample, and "
        "holds all of it"
        for what, axis, ranks in dict.fromkeys((g.what, g.axis, g.ranks) for g in seen)
    ]
