"""Reading a field of tiles at places that are computed (`grid_sample`): every tile gathers the field.

x (B, C, H, W) over d0, d1     grid (B, H', W', 2)     each rank: all of x, its own places, its own outputs
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardwise.parallel.domain.gathers import noted
from shardwise.parallel.domain.tiles import CutDim, answers, cuts, fetched, opened, placed, used
from shardwise.part import Owners, Uncut


@answers(F.grid_sample)
def grid_sample(
    input: torch.Tensor, grid: torch.Tensor, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """`F.grid_sample` of a field, a grid of places, or both, of which any spatial dim may be cut."""
    of_field, of_grid = cuts(input, range(2, input.dim())), cuts(grid, range(1, grid.dim() - 1))
    if not of_field and not of_grid:
        return F.grid_sample(input, grid, mode, padding_mode, align_corners)
    for cut in of_field:
        noted("a field that grid_sample reads", input, cut)
        input = fetched(input, cut, ((((0, cut.owners.size),),) * cut.axis.size))
    grid = opened(grid, of_grid)
    by_grid = {cut.axis.name for cut in of_grid}
    input_of = [cut for cut in of_grid if cut.axis.name not in {each.axis.name for each in of_field}]
    input = used(input, input_of) if input_of else input
    after = [CutDim(cut.axis, cut.dim + 1, cut.owners) for cut in of_grid]
    for cut in of_field:
        if cut.axis.name not in by_grid:  # places that all ranks have: each takes its own
            dim = _free(grid, {each.dim - 1 for each in after}, cut.dim - 1)
            owners = Owners.blocks(grid.shape[dim], cut.axis.size)
            start, count = owners.span(cut.axis.index) or (0, 0)
            whole = used(grid, [cut])
            assert whole is not None
            grid = whole.narrow(dim, start, count)
            after.append(CutDim(cut.axis, dim + 1, owners))
    output = F.grid_sample(input, grid, mode, padding_mode, align_corners)
    return placed(output, sorted(after, key=lambda cut: cut.axis.depth))


def _free(grid: torch.Tensor, taken: set[int], wanted: int) -> int:
    """A dim of places along which ranks can share them."""
    free = [dim for dim in (wanted, *range(1, grid.dim() - 1)) if dim not in taken]
    if not free:
        raise Uncut(f"grid_sample of {tuple(grid.shape[1:-1])} places over more tiled dims than they have")
    return free[0]


__all__ = ["grid_sample"]
