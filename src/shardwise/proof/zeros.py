"""Set gradient elements of rounding size to zero before each update, on both sides of a proof.

    one process   limit of a step = 512 epsilons of the largest element of any gradient
    both sides    elements no larger than the limit are 0 when the optimizer reads them

What is left of a sum that cancels (a bias before a batch norm, or of keys in attention) is rounding error, which
depends on the order of summation. An optimizer that divides a gradient by its own size, or takes its sign, makes
updates of full size of it, which differ between one process and N ranks without any mistake of the plan.

What this does not do: change elements that are above the limit on either side, sparse gradients, or the gradients of an
optimizer that computes them in a closure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

ZERO = 2**9  # epsilons of the largest gradient element; in float64 less than the bar for gradients can see


def settle_and_note(optimizer: torch.optim.Optimizer, limits: list[float]) -> None:
    """Zeroes gradient elements of rounding size before each step of one process; adds each step's limit to `limits`."""

    def before(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        gradients = _gradients(optimizer)
        sizes = [float(g.abs().max()) * torch.finfo(g.dtype).eps for g in gradients if g.numel()]
        limits.append(ZERO * max(sizes, default=0.0))
        _settle(gradients, limits[-1])

    optimizer.register_step_pre_hook(before)


def settle(engine: Any, limits: Sequence[float]) -> None:
    """Zeroes gradient elements up to `limits[step]` before each step of a rank's engine; nothing without `limits`."""
    if limits:
        engine.optimizer.register_step_pre_hook(lambda own, *_: _settle(_gradients(own), limits[engine.steps_done]))


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the dense gradients that the optimizer reads; of a DTensor this rank's shard."""
    own = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in own if not grad.is_sparse]


@torch.no_grad()
def _settle(gradients: Sequence[torch.Tensor], limit: float) -> None:
    for gradient in gradients:
        gradient.masked_fill_(gradient.abs() <= limit, 0)
