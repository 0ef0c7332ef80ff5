"""How much a loss counts in its step: by the weight that the script gives, or as an equal part.

backward(sum, weight)           divided by the weights of all ranks and micro-batches
backward(mean, mean_over=n)     the mean over all ranks, of this micro-batch
backward(mean)                  over this rank's samples; over all of them, of this micro-batch
backward(sum, summed=True)      a sum that nothing divides

Backward runs at the scale that one process has, but for `weight`, whose sum over ranks is known after it.

What this does not do: see whether a loss is what it is said to be; `shardwise verify` does.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.errors import InputError
from shardwise.layout.dealing import Share
from shardwise.scripts.gradients import Earlier
from shardwise.scripts.over_ranks import OverRanks


class Weighing(OverRanks):
    """The part of `Stepping` that weighs losses."""

    _form: str | None  # the form of this step's losses: "weight", "mean_over", "mean" or "sum"
    _micro: int  # calls of backward in it
    _earlier: Earlier | None  # whole gradients of its backwards before

    def _loss_of(self, total: torch.Tensor, weight: torch.Tensor | float | None) -> torch.Tensor:
        """One micro-batch's loss over all ranks."""
        whole, divisor = self._sum(total.detach(), self._once() if self._form != "weight" else float(weight or 0.0))
        return torch.tensor(whole / divisor if divisor else float("nan"), dtype=torch.float64)

    def _once(self) -> float:
        """This rank's part of a total weight of 1; where every rank has the whole loss, an equal part."""
        return 1.0 if self._of_whole_batches else float(self.engine.mesh.data.index == 0)

    def _share_of(
        self, loss: torch.Tensor, form: str, over: torch.Tensor | float | None, part: Share | None
    ) -> torch.Tensor:  # fmt: skip
        """This rank's summand of the loss over all ranks; of a sum, as it is. Collective for means over n."""
        if self._of_whole_batches or form in ("weight", "sum"):
            return loss
        if form == "mean_over":
            (total,) = self._sum(over or 0.0)
            return loss * (float(over or 0.0) / total if total else 0.0)
        if part is None or self._apart == 1:
            return loss
        return loss * (part.count / part.total if part.total else 0.0)

    def _weight(self, form: str, weight: torch.Tensor | float | None, stands_in: bool) -> torch.Tensor | float:
        """The weight that is counted; without one, the losses of a step share one of 1."""
        if form == "weight" and self._earlier is not None and not self._earlier.stepped:
            self._refuse_weights()
        if self._form not in (None, form):
            raise InputError(
                "prepared.backward: the losses of a step are given in one way: each with its weight, each with "
                "mean_over, or none"
            )
        self._form = form
        if form != "weight":
            return self._once() if self._micro == 0 else 0.0
        if stands_in or weight is None:
            return 0.0
        return weight.detach().reshape(()) if isinstance(weight, torch.Tensor) else float(weight)

    def _refuse_weights(self) -> None:
        k = self.engine.plan.accumulate
        raise InputError(
            f"prepared.backward(loss, weight) was called {k + 1} times before optimizer.step(): a step's sums are "
            f"divided by all of its weights: say in the plan how many there are in a step (accumulate={k + 1}; an "
            "earlier step() is fine), or give means, which add up as in one process: prepared.backward(loss, "
            "mean_over=n)"
        )


def form_of(weight: object, mean_over: object, summed: bool) -> str:
    """Returns how a loss is given; raises `InputError` where it is given in two ways."""
    forms = [name for name, there in (("weight", weight is not None), ("mean_over", mean_over is not None),
                                      ("sum", summed)) if there]  # fmt: skip
    if len(forms) > 1:
        raise InputError(
            "prepared.backward: give weight (what a sum is divided by), mean_over (what a mean is over) or summed=True "
            "(a sum that nothing divides), and not two of them"
        )
    return forms[0] if forms else "mean"


def check_loss(loss: Any) -> None:
    """Raise `InputError` unless a loss is one number that depends on the model's parameters."""
    what = "prepared.backward: the loss must be one number that depends on the model's parameters"
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"{what}, got {type(loss).__name__}: give the tensor, before .item()")
    if loss.numel() != 1:
        raise InputError(f"{what}, got shape {tuple(loss.shape)}: give its .mean(), or its .sum() and how many count")
    if not loss.requires_grad:
        raise InputError(f"{what}, and this one does not: compute it outside no_grad, without .detach()")


def check_number(value: Any, name: str) -> None:
    """Raise `InputError` unless a weight is one number, and not below 0."""
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    if math.prod(shape) != 1:
        raise InputError(f"prepared.backward: {name} must be one number, got shape {shape}: give its .sum()")
    if isinstance(value, int | float) and value < 0:
        raise InputError(f"prepared.backward: {name} is {value:g}, which turns the loss around: give how many count")
