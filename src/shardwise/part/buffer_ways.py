"""Ways to combine a buffer after forwards over parts of the samples (sum, mean), and which match the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.part.pairs import as_pairs
from shardwise.part.sums import plain

# (buffer before (n,), after each part's forward (p, n), samples of each part (p, 1), 0 for none) -> combined (n,)
_Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _of_parts(after: torch.Tensor, samples: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
    """Returns `after` (p, n) with `other` in place of the values of parts that have no samples."""
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
    """Returns the names in `WAYS` that combine a buffer's values in `parts` to `whole`; [] if shapes differ.

    before  the buffer before the forwards;  whole  after a forward over all samples
    parts   the buffer after a forward over each part alone, each from `before`
    sizes   samples of each part
    bar     tolerance, times the largest absolute value in `whole`, or 1 if that is less
    """
    if len({tensor.shape for tensor in (before, whole, *parts)}) > 1:
        return []
    old, new, *rows = (numbers(tensor) for tensor in (before, whole, *parts))
    samples = torch.tensor(sizes, dtype=new.dtype, device=new.device)[:, None]
    least = bar * max([1.0, *new.abs().tolist()])
    found = {name: way(old, torch.stack(rows), samples) for name, way in WAYS.items()}
    return [name for name, value in found.items() if torch.allclose(value, new, rtol=0.0, atol=least)]


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a buffer's real numbers (n,), two for a complex element, in float64, which holds counts exactly."""
    return as_pairs(plain(tensor.detach())).reshape(-1).double()
