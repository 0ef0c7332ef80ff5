"""Linear and bilinear layers on cut positions: products of the channels, in the same order of sums on every rank.

torch adds the bias inside the product, or after it, by how its input lies in memory; a share of one position, or of
none, lies in memory in more than one way, so ranks would come to the sums of a weight's and a bias's gradients in
different orders.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from shardwise.parallel.domain.tiles import answers
from shardwise.part.levels import Distributed


@answers(F.linear, cut_once=False)
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `F.linear` of (..., K) and (N, K): (..., N). The bias beside cut positions is added by itself."""
    # chunks of positions (`turns`) are one rank's; of a matrix torch adds the bias in the product, however it lies
    cut = isinstance(input, Distributed) and input.axis.positions and not input.axis.turns
    if bias is None or not cut or input.dim() < 3:
        return F.linear(input, weight, bias)
    return F.linear(input, weight) + bias


@answers(F.bilinear, cut_once=False)
def bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns `F.bilinear` of tensors of which any dim but the last may be cut."""
    output = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return output if bias is None else output + bias
