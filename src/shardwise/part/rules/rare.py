"""Functions that are rare on tiles: every rank gathers what they read and computes all of it; the user is told.

Received by a rank for each: (p-1)/p of the field over every axis that cuts it, and in backward as much again of the
gradient. Every rank computes what one process computes. A result with as many dims as the field is cut again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.part.dimwise import DimwiseRule, last_two, over
from shardwise.part.sums import plain
from shardwise.part.tensor import FUNCTIONS, rule
from shardwise.part.tiles.entire import apart, done_whole, in_front, of_all, whole_without_rule
from shardwise.part.tiles.windows import answers, cuts, opened, placed

done_whole(  # of diagonals, of places in a flattened field, of patches and points
    "trace", "diag", "diag_embed", "take", "block_diag", "pdist", "cdist", "fold", "bucketize", "searchsorted",
    "histc", "bincount",
)  # fmt: skip
done_whole(  # of matrices
    "inv", "inv_ex", "inverse", "det", "slogdet", "logdet", "svd", "svdvals", "eigh", "eigvalsh", "eig", "eigvals",
    "qr", "cholesky", "cholesky_ex", "matrix_exp", "pinv", "pinverse", "lu", "lu_factor", "lu_factor_ex", "cond",
    "matrix_rank", "matrix_norm", "solve", "solve_ex", "solve_triangular", "lstsq", "householder_product", "cross",
)  # fmt: skip
over("topk", "sort", "argsort")
over("tril", "triu", dims=last_two)
rule("diagonal")(DimwiseRule(lambda x, given: (given["dim1"], given["dim2"])).on_shares)
whole_without_rule(  # of diagonals, distances, places along a dim
    "tril", "triu", "diagonal", "dist", "bilinear", "index_fill", "index_copy", "index_reduce",
    "slice_scatter", "select_scatter",
)  # fmt: skip
whole_without_rule(  # of rows in their order
    "sort", "argsort", "msort", "topk", "kthvalue", "mode", "median", "nanmedian", "quantile", "nanquantile",
)  # fmt: skip

answers(F.unfold, cut_once=False)(of_all(F.unfold))
apart(F.unfold, in_front(3))
apart(torch.isin, in_front(0))
_isin_apart = FUNCTIONS[torch.isin]


@answers(torch.isin, cut_once=False)
def isin(elements: Any, test_elements: Any, **options: Any) -> Any:
    """Returns `torch.isin(elements, test_elements)`, the second gathered if it is cut, the first cut in any way."""
    return _isin_apart(elements, plain(test_elements), **options)


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
