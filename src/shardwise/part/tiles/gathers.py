"""Record every tensor that is gathered over tiles in a rehearsal, and its size; engine/find_positions tells the user.

Nothing is gathered in silence. An operation that mixes positions and has no rule is refused, unless the model gathers
its input by `whole`.
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
    """One gathering of a tensor over one axis."""

    what: str  # description of operation and tensor for the user
    axis: str  # its name
    ranks: int  # size of the axis
    elements: int  # received by a rank for each sample


_SEEN: list[list[Gather]] = []


@contextmanager
def watching() -> Iterator[list[Gather]]:
    """Context that yields a list to which a `Gather` is added for each gathering inside."""
    _SEEN.append([])
    try:
        yield _SEEN[-1]
    finally:
        _SEEN.pop()


def noted(what: str, tensor: torch.Tensor, cut: CutDim, samples: int | None = None) -> None:
    """Records that `tensor` is gathered over the axis of `cut`.

    what     description for the user;  samples  number of samples in it; None: the size of its first dim
    """
    samples = tensor.shape[0] if samples is None else samples
    elements = tensor.numel() // max(samples, 1) * (cut.axis.size - 1) // cut.axis.size
    for seen in _SEEN:
        seen.append(Gather(what, cut.axis.name, cut.axis.size, elements))


def _noted(what: str, part: Part) -> None:
    """Records that a rule below autograd gathers `part` over its own axis."""
    samples = part.shape[0]
    if part.dim_cut == 0:  # positions are the first dim, alone or joined with the samples in front of them
        samples = part.factors[0] if part.factors is not None else part.shape[1] if part.dim() > 1 else 1
    noted(what, part, CutDim(part.axis, part.dim_cut, part.owners), samples)


GATHERS.append(_noted)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with its tiles gathered on every rank. Differentiable. Collective.

    For a model's operation that mixes positions and has no rule (`torch.linalg.svdvals(whole(x))`). Each rank receives
    the others' tiles and holds all of them, which a run tells before its first step. Without tiles, and in one process,
    it returns `tensor` itself.
    """
    here = tensor  # walks inwards, past axes that cut no positions (tp's channels stay cut)
    while isinstance(here, Distributed):
        if isinstance(here, Part) and here.axis.positions:
            noted("a field that the model asks for whole", tensor, CutDim(here.axis, here.dim_cut, here.owners))
            tensor = whole_over_axis(tensor, here.axis)
        here = here.settled_local()
    return tensor


def explained(seen: Sequence[Gather]) -> list[str]:
    """Returns a line for the user for each description and axis in `seen`, with the elements received per sample."""
    return [
        f"{what} is gathered over {axis}={ranks}: in a forward a rank receives "
        f"{sum(g.elements for g in seen if (g.what, g.axis) == (what, axis)):,} elements for a sample, and "
        "holds all of it"
        for what, axis, ranks in dict.fromkeys((g.what, g.axis, g.ranks) for g in seen)
    ]
