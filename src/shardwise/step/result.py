"""`StepResult`: what a step returns, the same numbers on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same numbers on every rank.

    step       from 0
    loss       global sum / global weight, extra terms added; NaN if the weight is 0
    weight     global weight (number of samples or tokens that count, as Task.loss says)
    extras     name of an extra term -> its part of the loss
    grad_norm  global norm of the gradient before clipping
    lr         learning rate of the first parameter group in this step; NaN if it has none
    samples    samples that counted, over all ranks
    skipped    whether the update was left out because loss or gradients were not finite
    metrics    name -> value of Task.metrics over the step's samples
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
