"""Read a field of tiles at computed places (`grid_sample`): every rank gathers field and places, and computes all.

x (B, C, H, W) over d0, d1     grid (B, H', W', 2)     each rank: all of both; its tile of the result
tokens as samples (B H W, C, h, w), a grid for each    each rank: its own samples, nothing is sent
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardwise.part.tiles.entire import of_all
from shardwise.part.tiles.windows import answers, cuts, opened, placed

_sampled_whole = of_all(F.grid_sample)


@answers(F.grid_sample, cut_once=False)
def grid_sample(
    input: torch.Tensor, grid: torch.Tensor, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `F.grid_sample` of fields, grids of places, or both, of which any dim may be cut."""
    options, cut_dims = (mode, padding_mode, align_corners), cuts(input, range(input.dim()))
    # samples alone are cut, of both alike: each rank reads its own, and nothing is gathered
    if cut_dims and cut_dims == cuts(grid, range(grid.dim())) and all(cut.dim == 0 for cut in cut_dims):
        return placed(F.grid_sample(opened(input, cut_dims), opened(grid, cut_dims), *options), cut_dims)
    return _sampled_whole(input, grid, *options)
