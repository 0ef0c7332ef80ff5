"""The norm of gradients, by which ranks clip: of large tensors too, whole or in pieces."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.step.normalise import RUN, _sum_of_squares

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(2**12, 2**10), (RUN + 1,), (3, 5), ()])
def test_the_norm_of_a_tensor_is_that_of_its_pieces(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gradient = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.vector_norm(gradient.to(torch.complex128)))
    pieces = [*gradient.reshape(-1).tensor_split(3), torch.empty(0, dtype=dtype)]
    for held in ([gradient], pieces, [gradient.mT] if gradient.dim() == 2 else [gradient]):
        squares = _sum_of_squares(held, CPU)
        assert squares.dtype == torch.float64 and math.sqrt(squares) == pytest.approx(exact, rel=1e-6)


def test_no_gradients_have_a_norm_of_zero() -> None:
    assert float(_sum_of_squares([torch.empty(0)], CPU)) == 0.0
