"""Ways to join buffers that a forward made of parts of its samples or rows, a sum or a mean; which of them fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.part.pairs import as_pairs
from shardwise.part.sums import plain

# (before (elements,), after each part's forward (p, elements), samples of each part (p, 1), 0 for none)
_Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _of_parts(after: torch.Tensor, samples: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
    """Returns `after` with `other` in the rows of parts without samples."""
    return torch.where(samples > 0, after, other)


WAYS: dict[str, _Way] = {
    "added": lambda before, after, samples: before + (_of_parts(after, samples, before) - before).sum(0),
    "fresh": lambda before, after, samples: _of_parts(after, samples, 0.0).sum(0),  # set anew, by a sum over samples
    "mean": lambda before, after, samples: (_of_parts(after, samples, 0.0) * samples).sum(0) / samples.sum(),
}

SUMS = ("added", "fresh")


def ways(
    before: torch.Tensor, whole: torch.Tensor, parts: Sequence[torch.Tensor], sizes: Sequence[int], bar: float
) -> list[str]:
    """Returns the names in `WAYS` by which what the parts' forwards left gives what the whole's did.

    [] where shapes differ.

    sizes  samples of each part
    bar    error allowed, times the largest absolute value that the whole left, or 1 if that is less
    """
    if len({tensor.shape for tensor in (before, whole, *parts)}) > 1:
        return []
    old, new, *rows = (numbers(tensor) for tensor in (before, whole, *parts))
    samples = torch.tensor(sizes, dtype=new.dtype, device=new.device)[:, None]
    least = bar * max([1.0, *new.abs().tolist()])
    found = {name: way(old, torch.stack(rows), samples) for name, way in WAYS.items()}
    return [name for name, value in found.items() if torch.allclose(value, new, rtol=0.0, atol=least)]


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a buffer's real numbers (n,), two of a complex one, in float64, which counts whole numbers exactly."""
    return as_pairs(plain(tensor.detach())).reshape(-1).double()
