"""An optimizer with a mode: schedule-free SGD, whose weights in training are not those that it evaluates."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Averaging(Optimizer):
    """Steps at `y = (1 - beta) z + beta x`, where z goes by gradients and x is the average of all z.

    In training a parameter holds y, in evaluation x; state holds z. As published ones, it begins outside of both.
    """

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "taken": 0, "trains": False})

    def train(self) -> None:
        self._move(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _move(self, trains: bool, weight: Any) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if group["trains"] != trains and "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], weight(group["beta"]))
            group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("a step outside of training")
            group["taken"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                z = self.state[param].setdefault("z", param.clone())
                share, beta, rate = 1 / group["taken"], group["beta"], group["lr"]
                param.lerp_(z, share)
                param.add_(param.grad, alpha=rate * (beta * (1 - share) - 1))
                z.sub_(param.grad, alpha=rate)
