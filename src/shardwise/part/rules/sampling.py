"""Read a field of tiles at computed places (`grid_sample`, indices): every tile gathers the whole field.

x (B, C, H, W) over d0, d1     grid (B, H', W', 2)     each rank: all of x, its own places, its own outputs
tokens as samples (B H W, C, h, w), a grid for each    each rank: its own samples, nothing is sent
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.part.cuts import Owners, Uncut
from shardwise.part.moves import from_axis
from shardwise.part.tensor import Part
from shardwise.part.tiles.entire import dealt_alike
from shardwise.part.tiles.gathers import noted
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import answers, cuts, fetched, once, opened, placed, used


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
    return once(_grid_sample, (input, grid, *options), {})


def _grid_sample(input: torch.Tensor, grid: torch.Tensor, *options: Any) -> torch.Tensor:
    """Returns the same where no dim is cut over two axes."""
    apart = {cut.axis.name: cut for cut in (*cuts(grid, [0]), *cuts(input, [0, 1]))}
    for cut in apart.values():  # each rank its own samples, or its own channels at the places of all
        input = _own(input, cut)
        grid = _own(grid, cut) if cut.dim == 0 else used(grid, [cut])
    of_field, of_grid = cuts(input, range(2, input.dim())), cuts(grid, range(1, grid.dim() - 1))
    for cut in of_field:  # a place may lie anywhere in the field
        noted("a field that grid_sample reads", input, cut)
        input = fetched(input, cut, ((((0, cut.owners.size),),) * cut.axis.size))
    grid = opened(grid, of_grid)
    by_grid = {cut.axis.name for cut in of_grid}
    # an axis that cuts the places alone: its ranks read one field, whose gradient is a sum over them
    input_of = [cut for cut in of_grid if cut.axis.name not in {other.axis.name for other in of_field}]
    input = used(input, input_of) if input_of else input
    after = [*apart.values(), *(CutDim(cut.axis, cut.dim + 1, cut.owners) for cut in of_grid)]
    for cut in of_field:
        # places that all ranks have: each takes some of them, else every rank would compute all outputs
        if cut.axis.name not in by_grid:
            dim = _free(grid, {other.dim - 1 for other in after}, cut.dim - 1)
            owners = Owners.blocks(grid.shape[dim], cut.axis.size)
            start, count = owners.span(cut.axis.index) or (0, 0)
            whole = used(grid, [cut])
            assert whole is not None
            grid = whole.narrow(dim, start, count)
            after.append(CutDim(cut.axis, dim + 1, owners))
    output = F.grid_sample(input, grid, *options)
    return placed(output, sorted(after, key=lambda cut: cut.axis.depth))


def _own(tensor: torch.Tensor, cut: CutDim) -> torch.Tensor:
    """Returns this rank's indices along the dim of a cut, of a tensor that is cut over its axis or that all have."""
    if isinstance(from_axis(tensor, cut.axis), Part):
        return opened(dealt_alike(tensor, [cut]), [cut])
    whole = used(tensor, [cut])
    assert whole is not None
    return cut.owners.take(whole, cut.dim, cut.axis.index)


def _free(grid: torch.Tensor, taken: set[int], wanted: int) -> int:
    """Returns a dim of places along which ranks can share them: the wanted one where it is free."""
    free = [dim for dim in (wanted, *range(1, grid.dim() - 1)) if dim not in taken]
    if not free:
        raise Uncut(f"grid_sample of {tuple(grid.shape[1:-1])} places over more tiled dims than they have")
    return free[0]
