"""Functions that are rare on tiles, done whole: every rank gathers what they read and computes all of it; noted.

Received by a rank for each: (p-1)/p of the field over every axis that cuts it, and in backward as much again of the
gradient; what is computed is what one process computes. A result with as many dims as the field is cut again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.part.dimwise import over
from shardwise.part.sums import plain
from shardwise.part.tensor import FUNCTIONS
from shardwise.part.tiles.apart import apart, in_front
from shardwise.part.tiles.entire import done_whole, of_all, whole_without_rule
from shardwise.part.tiles.windows import answers

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
whole_without_rule(  # of rows in their order
    "sort", "argsort", "msort", "topk", "kthvalue", "mode", "median", "nanmedian", "quantile", "nanquantile",
)  # fmt: skip

answers(F.unfold, cut_once=False)(of_all(F.unfold))
apart(F.unfold, in_front(3))
apart(torch.isin, in_front(0))
_isin_apart = FUNCTIONS[torch.isin]


@answers(torch.isin, cut_once=False)
def isin(elements: Any, test_elements: Any, **options: Any) -> Any:
    """Asks of each element by itself whether it is among all of the others, also those that other ranks hold."""
    return _isin_apart(elements, plain(test_elements), **options)
