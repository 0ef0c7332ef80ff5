"""Dynamic loss scale for fp16: powers of two, which round nothing (made by assemble; proof: own_precision).

Source: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.
"""

from __future__ import annotations

import math

import torch

from shardwise.comm import Axis, gather_rows
from shardwise.host import read, row_of

GROW_AFTER = 2000


class LossScale:
    """`value` multiplies the sum of losses; it halves on overflow and doubles after many steps without one.

    0.0 until `factor` has chosen it.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._good_steps = 0

    def factor(self, weight: torch.Tensor | float, axis: Axis, device: torch.device, micro_batches: int) -> float:
        """Returns the scale; the first call, collective, chooses 2^15 over the global weight, since sums grow with it.

        The weight of the first of a step's micro-batches, over all ranks, stands for each of them, so that the scale
        is the same however a global batch is dealt.
        """
        if not self.value:
            total = read(gather_rows(row_of([weight], device), axis).sum(), "weight for the loss scale")
            total = max(total * micro_batches, 1.0)
            # a weight that is no number is told by the step's own look at it
            self.value = 2.0 ** (15 - round(math.log2(total if math.isfinite(total) else 1.0)))
        return self.value

    def update(self, *, overflow: bool) -> None:
        """Adapt the scale after a step: halved on an overflow, doubled after many good steps."""
        self._good_steps = 0 if overflow else self._good_steps + 1
        if overflow:
            self.value /= 2
        elif self._good_steps % GROW_AFTER == 0:
            self.value *= 2

    def state_dict(self) -> dict[str, float]:
        """Returns the scale and the count of good steps, as `load_state_dict` takes them."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Set the scale and the count of good steps to those of `state_dict`."""
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
