"""How much a loss counts in its step: by the weight that the script gives, or as an equal part.

backward(sum, weight)       divided by the weights of all ranks and micro-batches
backward(mean, mean_over)   the mean over all ranks, of this micro-batch
backward(loss)              read from its graph: a mean, or a sum that nothing divides
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from shardwise.errors import InputError
from shardwise.scripts.all_samples import scaled
from shardwise.scripts.divisor import Divisor, divisor_of, refuse_division
from shardwise.scripts.earlier import Earlier
from shardwise.scripts.over_ranks import OverRanks
from shardwise.scripts.penalties import IN_A_SUM, refuse_in_sum


class Weighing(OverRanks):
    """The part of `Stepping` that weighs losses."""

    _forms: list[tuple[Divisor, int]]  # what losses are means over, and the samples that ranks hold
    _given: str | None  # the form of this step's losses
    _micro: int  # calls of backward in it
    _earlier: Earlier | None  # whole gradients of its backwards before

    def _loss_of(self, total: torch.Tensor, weight: torch.Tensor | float | None) -> torch.Tensor:
        """One micro-batch's loss over all ranks."""
        whole, divisor = self._sum(total.detach(), self._once() if self._given != "weight" else float(weight or 0.0))
        return torch.tensor(whole / divisor if divisor else float("nan"), dtype=torch.float64)

    def _once(self) -> float:
        """This rank's part of a total weight of 1: an equal part for a mean, all on one rank for a sum."""
        return 1.0 if self._given == "mean" or self._of_whole_batches else float(self.engine.mesh.data.index == 0)

    def _given_scaled(self, scale: float, weight: torch.Tensor | float | None) -> AbstractContextManager[None]:
        """Context of a backward: gradients of what the model is given, which nobody divides later, become the mean's.
        Collective where there are some.
        """
        leaves = self.calls.kept.leaves() if self.calls.kept is not None else []
        if not leaves:
            return nullcontext()
        of_all = {"mean": float(self._apart), "weight": 0.0}.get(self._given or "", 1.0)
        (total,) = self._sum(float(weight or 0.0)) if not of_all else (of_all,)
        return scaled(leaves, 1.0 / (scale * total) if total else 0.0)

    def _weight(
        self, loss: torch.Tensor, weight: torch.Tensor | float | None, mean: bool, stands_in: bool
    ) -> torch.Tensor | float:
        """The weight that is counted; without one, the losses of a step share one of 1."""
        if weight is not None and mean:
            raise InputError("prepared.backward: give weight (of a sum) or mean_over (of a mean), not both")
        if weight is not None:
            form = "weight"
            if self._earlier is not None and not self._earlier.stepped:
                self._refuse_weights()
            if self._apart > 1:
                refuse_in_sum(loss, float(weight))
            if self.engine.plan.accumulate > 1:
                refuse_division(loss, float(weight), self.engine.plan.accumulate)
        elif mean:
            form = "mean_over"
            held = replace(self.calls.held_by(loss), suspects=set())  # which are not compared
            if self._apart > 1 and divisor_of(loss, held).kind == "sum":
                raise InputError(
                    "prepared.backward: the loss is a sum over samples, which nothing divides, and mean_over says what "
                    "a mean is over: give the sum without it, or its weight, prepared.backward(loss, n), for the mean"
                )
        else:
            dealt = self.calls.of_loss
            held = self.calls.held_by(loss)
            divisor = divisor_of(loss, held) if self._apart > 1 else Divisor("mean")
            if divisor.kind == "penalised":
                raise InputError(IN_A_SUM)
            if not self._of_whole_batches:
                self._forms.append((divisor, dealt.held.count if dealt is not None else 1))
            form = divisor.kind
        if self._given not in (None, form):
            raise InputError("prepared.backward: give the weight with every micro-batch of a step, or with none")
        self._given = form
        if weight is None:
            return self._once() if self._micro == 0 else 0.0
        if stands_in:
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
