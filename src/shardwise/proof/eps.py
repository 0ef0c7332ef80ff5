"""Raise the eps of Adam-like optimizers on both sides of a proof; find the updates that this changes.

An update divides by sqrt(v) + eps. Where a true gradient is zero, what arrives is rounding, another one on one process
and on N ranks; with eps near the rounding it becomes an update of full size and random sign. A proof would find the
plan at fault for it, so both sides raise eps to `LEAST_EPS`. A second optimizer with its own eps, fed with the same
gradients, shows which parameters that changes.

What this does not do: watch an optimizer that needs a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from shardwise.proof.literal import optimizer_of
from shardwise.proof.settings import LEAST_EPS, raise_eps

CHANGED = 0.1  # of the largest update of a parameter
ROUNDING = 1e-12  # of the model's largest gradient in float64: a gradient below it is zero but for rounding


class EpsWatch:
    """Raises the eps of `optimizer`, and compares its updates with those of a second optimizer that keeps its eps."""

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        make: Callable[[list[dict]], torch.optim.Optimizer],
    ):
        self.named = named
        self.raised = raise_eps(optimizer)
        self.others: dict[str, torch.nn.Parameter] = {}
        if self.raised:
            self.others = {name: torch.nn.Parameter(param.detach().clone()) for name, param in named}
            self.own = optimizer_of(make, list(self.others.values()))
        self.changed: set[str] = set()
        self.largest = 0.0
        self.gradients: dict[str, float] = {}
        self._before: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Take over the gradients and values that the update will use. Called before it."""
        # no eps was raised: there is no second optimizer to feed
        if not self.others:
            return
        for name, param in self.named:
            if param.grad is not None:
                # a sparse gradient has no abs().max(), and unlisted rows are zeros
                gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
                size = float(gradient.abs().max()) if gradient.numel() else 0.0
                self.gradients[name] = max(self.gradients.get(name, 0.0), size)
                self.largest = max(self.largest, size)
            if name in self.others:
                self.others[name].grad = None if param.grad is None else param.grad.detach().clone()
                self._before[name] = param.detach().clone()

    @torch.no_grad()
    def end(self) -> None:
        """Update the copies with the optimizer's own eps, and note whose update differs. Called after the update."""
        if not self.others:
            return
        before = {name: other.detach().clone() for name, other in self.others.items()}
        self.own.step()
        for name, param in self.named:
            # without a gradient the optimizer leaves it alone; without elements there is no largest update
            if name not in self.others or param.grad is None or not param.numel():
                continue
            with_own, raised = self.others[name] - before[name], param - self._before[name]
            # both updates are compared by the size of the one that the user's eps makes
            if float((with_own - raised).abs().max()) > CHANGED * float(with_own.abs().max()):
                self.changed.add(name)

    def notes(self) -> list[str]:
        """Returns the notes for the user: which eps was raised, and whose update that changes."""
        if not self.raised:
            return []
        note = f"Adam-family eps raised from {min(self.raised):g} to {LEAST_EPS:g} on both sides"
        if self.changed:
            note += f"; of {len(self.others)} parameters that changes the update of {_names(self.changed)} by over 10%"
        noise = {name for name, size in self.gradients.items() if size <= ROUNDING * self.largest}
        # gradients of rounding size: their updates are chance, whatever eps is
        if not noise:
            return [note]
        return [note, of_rounding(noise, min(self.raised))]


def of_rounding(names: Collection[str], eps: float) -> str:
    """Returns what to say of parameters whose gradient is zero but for rounding, under an Adam of this eps."""
    return (
        f"the gradient of {_names(names)} is zero but for rounding, which Adam's own eps of {eps:g} can turn into "
        "updates of up to the learning rate, other ones on one process and on N: behind a batch norm they show in "
        "evaluations alone, as its running mean lags; leave the parameter out (bias=False), or give an eps of 1e-4"
    )


def _names(names: Collection[str]) -> str:
    first, *more = sorted(names)
    return f"'{first}'" + (f" and {len(more)} more" if more else "")
