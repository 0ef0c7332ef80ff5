"""Dynamic loss scale for fp16. Scales are powers of two, so that they round nothing.

Source: Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.
"""

from __future__ import annotations

import math

import torch

from shardwise.comm import Axis, gather_rows
from shardwise.host import read, row_of

GROW_AFTER = 2000  # steps without an overflow, as in `torch.amp.GradScaler`


class LossScale:
    """The factor on losses, `value`: halved on an overflow, doubled after `GROW_AFTER` steps without one.

    `value` is 0.0 until the first call of `factor`.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._good_steps = 0

    def factor(self, weight: torch.Tensor | float, axis: Axis, device: torch.device, micro_batches: int) -> float:
        """Returns the scale. The first call is collective, and chooses about 2^15 / (global weight of a step).

        weight         this rank's loss weight of the first micro-batch, which is summed over `axis`
        micro_batches  in a step; the step's weight is taken as that many times the first one's
        Loss sums grow with the weight, so the scale must shrink with it.
        """
        if not self.value:
            total = read(gather_rows(row_of([weight], device), axis).sum(), "weight for the loss scale")
            total = max(total * micro_batches, 1.0)
            # a weight that is not finite is refused by the step itself (`normalise`)
            self.value = 2.0 ** (15 - round(math.log2(total if math.isfinite(total) else 1.0)))
        return self.value

    def update(self, *, overflow: bool) -> None:
        """Adapts the scale after a step. `overflow`: whether gradients were not finite though the loss was."""
        self._good_steps = 0 if overflow else self._good_steps + 1
        if overflow:
            self.value /= 2
        elif self._good_steps % GROW_AFTER == 0:
            self.value *= 2

    def state_dict(self) -> dict[str, float]:
        """Returns {"value": scale, "good_steps": steps since the last overflow}."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores what `state_dict` returned."""
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
