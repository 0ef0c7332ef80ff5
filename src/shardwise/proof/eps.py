"""Raise the eps of Adam-like optimizers on both sides of a proof, and find the updates that this changes.

An update divides by sqrt(v) + eps. If a true gradient is zero, the computed one is rounding error, which differs
between one process and N ranks. With an eps near that error it becomes an update of full size and random sign, and the
proof would blame the plan. So both sides raise eps to `LEAST_EPS`. A second optimizer with the user's eps, given the
same gradients, shows which parameters' updates that changes.

What this does not do: watch an optimizer that needs a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from shardwise.proof.literal import optimizer_of
from shardwise.proof.settings import LEAST_EPS, raise_eps

CHANGED = 0.1  # fraction of a parameter's largest update beyond which the update counts as changed
ROUNDING = 1e-12  # fraction of the model's largest gradient (float64) below which a gradient is rounding error


class EpsWatch:
    """Raises the eps of `optimizer` and compares its updates with those of a second one that keeps the user's eps.

    named  (name, parameter) of what `optimizer` updates
    make   parameter groups -> a new optimizer, as `Task.optimizer`

    Call `begin` before each update and `end` after it; `changed` then has the names of parameters whose update differs.
    """

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
        """Copies the gradients and values that the coming update uses to the second optimizer."""
        # no eps was raised: there is no second optimizer to feed
        if not self.others:
            return
        for name, param in self.named:
            if param.grad is not None:
                # a sparse gradient has no abs().max(); rows that it does not list are zeros
                gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
                size = float(gradient.abs().max()) if gradient.numel() else 0.0
                self.gradients[name] = max(self.gradients.get(name, 0.0), size)
                self.largest = max(self.largest, size)
            if name in self.others:
                self.others[name].grad = None if param.grad is None else param.grad.detach().clone()
                self._before[name] = param.detach().clone()

    @torch.no_grad()
    def end(self) -> None:
        """Updates the copies by the second optimizer and adds to `changed` whose update differs."""
        if not self.others:
            return
        before = {name: other.detach().clone() for name, other in self.others.items()}
        self.own.step()
        for name, param in self.named:
            # without a gradient the optimizer leaves it alone; without elements there is no largest update
            if name not in self.others or param.grad is None or not param.numel():
                continue
            with_own, raised = self.others[name] - before[name], param - self._before[name]
            # relative to the update under the user's eps, which is the one that a run takes
            if float((with_own - raised).abs().max()) > CHANGED * float(with_own.abs().max()):
                self.changed.add(name)

    def notes(self) -> list[str]:
        """Returns notes for the user: which eps was raised, whose updates that changes, whose gradients are noise."""
        if not self.raised:
            return []
        note = f"Adam-family eps raised from {min(self.raised):g} to {LEAST_EPS:g} on both sides"
        if self.changed:
            note += f"; of {len(self.others)} parameters that changes the update of {_names(self.changed)} by over 10%"
        noise = {name for name, size in self.gradients.items() if size <= ROUNDING * self.largest}
        # updates from gradients of rounding size are random under the user's eps
        if not noise:
            return [note]
        return [note, of_rounding(noise, min(self.raised))]


def of_rounding(names: Collection[str], eps: float) -> str:
    """Returns the note on parameters `names` whose gradient is zero but for rounding, under an Adam of this eps."""
    return (
        f"the gradient of {_names(names)} is zero but for rounding, which Adam's own eps of {eps:g} can turn into "
        "updates of up to the learning rate, other ones on one process and on N: behind a batch norm they show in "
        "evaluations alone, as its running mean lags; leave the parameter out (bias=False), or give an eps of 1e-4"
    )


def _names(names: Collection[str]) -> str:
    first, *more = sorted(names)
    return f"'{first}'" + (f" and {len(more)} more" if more else "")
