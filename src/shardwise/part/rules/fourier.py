"""Fourier transforms: on tiles the cut moves to a dim that is not transformed, and back, by all-to-alls.

    x (B, C, H, W) cut along H over d0, along W over d1; rfft2 over H and W
    moved       d0 and d1 cut channels (or samples)         the transform is local
    moved back  d0 cuts H, d1 cuts the W/2 + 1 frequencies

Of all dims the field is gathered. Received by a rank: (p-1)/p of its share each way.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.dimwise import over
from shardwise.part.gathering import gathered
from shardwise.part.tensor import Part, no_rule
from shardwise.part.tiles.entire import Needs, needs_whole

for _kind in ("fft", "rfft"):
    for _name in (_kind, f"i{_kind}"):
        needs_whole(_name, Needs("n dim norm", behind=True))
        needs_whole(f"{_name}2", Needs("s dim norm", (-2, -1), behind=True))
        needs_whole(f"{_name}n", Needs("s dim norm", None, behind=True))


def _of_a_whole_field(func: Any, part: Part, dims: set[int], keepdim: bool, arguments: dict[str, Any]) -> torch.Tensor:
    """Returns the transform of a gradient that arrives in tiles: every rank did the transform of a whole field."""
    if not part.axis.positions:
        raise Uncut(no_rule(func, [part]))
    return func(gathered(part), *list(arguments.values())[1:])


over("_fft_c2c", "_fft_r2c", "_fft_c2r", along=_of_a_whole_field)
needs_whole("stft", Needs("n_fft", gone=True, behind=True))
needs_whole("istft", Needs("n_fft", (-2, -1), gone=True, behind=True))
