"""Linear algebra (`torch.linalg`) of many matrices on tiles: each rank its own, where dims in front of them are cut.

covariances of cells (B, H, W, 3, 3), H cut over d0        inverses of a rank's own cells; nothing is sent
fields as matrices (B, C, H, W), H cut over d0             the cut moves to channels meanwhile, as in `entire`
one matrix (H, W)                                          gathered, and the run says what that costs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.parallel.domain.entire import Needs, answer_of
from shardwise.parallel.domain.tiles import answers, cuts
from shardwise.part import Uncut

ALONE = Needs("", (-2, -1), behind=True, apart=True)
NAMES = (
    "inv", "inv_ex", "det", "slogdet", "svd", "svdvals", "eigh", "eigvalsh", "eig", "eigvals", "qr", "cholesky",
    "cholesky_ex", "matrix_exp", "pinv", "lu", "lu_factor", "lu_factor_ex", "matrix_rank", "cond",
)  # fmt: skip
ALSO = ("inverse", "det", "logdet", "slogdet", "pinverse", "svd", "qr", "cholesky", "matrix_exp")  # outside of linalg
PAIRS = {  # dims of each of two tensors that are not broadcast
    "solve": (2, 2), "solve_ex": (2, 2), "solve_triangular": (2, 2), "lstsq": (2, 2), "householder_product": (2, 1),
    "cross": (0, 0),
}  # fmt: skip
VECTORS = ("solve", "solve_ex", "lstsq")  # of a second argument that may be one for each matrix


def _pairs(plain: Callable, own: tuple[int, int], vectors: bool) -> None:
    """Register a function of two tensors, of which the dims in front of their last `own` ones are broadcast.

    vectors  the second may be one vector for each matrix
    """
    needs = Needs("other", (-2, -1) if own[0] else -1, beside=("other",), behind=True, apart=True)
    answer = answer_of(plain, needs)

    @answers(plain)
    def of_pairs(first: torch.Tensor, other: torch.Tensor, **options: Any) -> Any:
        """What `plain` gives of two tensors, of either of which any dim may be cut."""
        if not any(cuts(tensor, range(tensor.dim())) for tensor in (first, other)):
            return plain(first, other, **options)
        # torch's rule for what is a vector and what a matrix; as columns, both have the dims that `own` counts
        vector = vectors and (other.dim() == 1 or other.shape == first.shape[:-1])
        other = other.unsqueeze(-1) if vector else other
        pair = [(first, first.dim() - own[0]), (other, other.dim() - own[1])]
        # expanded, so that a dim that is cut in one of them has as many indices in the other
        lead = torch.broadcast_shapes(*(tensor.shape[:n] for tensor, n in pair))
        first, other = (tensor.expand(*lead, *tensor.shape[n:]) for tensor, n in pair)
        result = answer(first, other, **options)
        if not vector:
            return result
        if not isinstance(result, torch.Tensor):
            raise Uncut(f"{plain.__name__} of vectors of tiles: give it columns, other.unsqueeze(-1)")
        return result.squeeze(-1)


for _name in NAMES:
    answers(getattr(torch.linalg, _name))(answer_of(getattr(torch.linalg, _name), ALONE))
for _name in ALSO:
    for _plain in (getattr(torch, _name), getattr(torch.Tensor, _name)):
        answers(_plain)(answer_of(_plain, ALONE))
answers(torch.linalg.matrix_norm)(
    answer_of(torch.linalg.matrix_norm, Needs("ord dim keepdim", (-2, -1), gone=True, apart=True))
)
for _name, _own in PAIRS.items():
    _pairs(getattr(torch.linalg, _name), _own, _name in VECTORS)

__all__ = ["ALONE"]
