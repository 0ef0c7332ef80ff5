"""`sketch(tensor)`: a few numbers in place of a large tensor, so that every step of a large model can be compared.

Up to `WHOLE` elements a tensor is kept. A larger one is laid out as `BLOCKS` rows; each row is added up with signs that
are drawn once for each length:

    sketch_i = sum_j sign_j * row_ij          rows of ceil(elements / BLOCKS), the last ones filled with zeros

The sum is linear, so that factors and sums of tensors show in their sketches. Two tensors that differ have different
sketches unless the signed sum of a row's differences cancels to within rounding. One element's difference shows in
full; many independent ones show as the root of the sum of their squares (Alon, Matias, Szegedy 1996).

What this does not do: say which element of a large tensor differs.
"""

from __future__ import annotations

import numpy as np
import torch

WHOLE = 1024
BLOCKS = 256


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Returns float64 on the CPU: a copy of a small tensor in its shape, else `BLOCKS` sums of signed elements."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.numel() <= WHOLE:
        return values.cpu().to(torch.complex128 if values.is_complex() else torch.float64, copy=True)
    flat = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).reshape(-1)
    length = -(-flat.numel() // BLOCKS)
    signs = _signs(length).to(flat.device)
    full = flat.numel() // length
    sums = torch.zeros(BLOCKS, dtype=torch.float64)
    sums[:full] = (flat[: full * length].view(full, length).to(torch.float64) @ signs).cpu()
    if rest := flat.numel() - full * length:
        sums[full] = (flat[full * length :].to(torch.float64) @ signs[:rest]).cpu()
    return sums


def _signs(length: int) -> torch.Tensor:
    """Returns `length` numbers of +1 and -1, the same in every process; by NumPy: torch's draws are followed."""
    bits = np.random.default_rng(20_250_101).integers(0, 2, length)
    return torch.from_numpy(bits * 2.0 - 1.0)
