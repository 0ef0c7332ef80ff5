"""`StepResult`: what a step returns, the same numbers on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same numbers on every rank.

    step       from 0
    loss       global sum / global weight, extra terms added; NaN where nothing counts
    weight     global weight
    extras     each extra term as it entered the loss
    grad_norm  global norm of the gradient before clipping
    lr         learning rate of the first parameter group in this step; NaN where it has none
    skipped    the update was left out because a value was not finite
    samples    samples that counted, over all ranks
    metrics    those of Task.metrics over the step's samples
    """

    step: int
    loss: float
    weight: float
    grad_norm: float
    lr: float
    samples: int
    skipped: bool = False
    extras: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
