"""Several optimizers of one model: each steps over its own parameters, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from small_scripts import back, batches, begin, equals_one_process, mse, net, refused_with_its_line, weights_of, whole
from torch.optim import Optimizer

from shardwise.errors import InputError, RefusedPlan


class Rotating(Optimizer):
    """Momentum, made orthogonal: an update of whole matrices, as Muon's."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                kept = self.state[param].setdefault("kept", torch.zeros_like(param))
                kept.mul_(group["momentum"]).add_(param.grad)
                param.sub_(group["lr"] * kept / (1e-3 + torch.linalg.matrix_norm(kept)))


def adam(params: Any) -> Optimizer:
    return torch.optim.Adam([{"params": [param]} for param in params], lr=1e-2, eps=1e-4)


def stepping(plan: str | None, of_matrices: Callable, order: str) -> tuple:
    """Matrices and the rest by optimizers of their own, with a schedule each; both states out and in between epochs."""
    model = net()
    matrices = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() == 1]
    optimizers = (of_matrices(matrices), adam(rest))
    prepared, model, (first, second), loader = begin(plan, model, batches(10, shuffle=True), optimizers)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (first, second)]
    torch.manual_seed(7)
    losses, seen = [], list[float]()
    for _ in range(2):
        for x, y in loader:
            losses.append(back(prepared, mse(model, x, y)))
            if order == "each by itself":
                second.step()
                second.zero_grad()
                first.step()
                first.zero_grad()
            else:
                if order == "in whole":
                    with whole(prepared, state=True):
                        for state in first.state.values():
                            seen += [value.sum().item() for value in state.values()]
                        for state in second.state.values():
                            state["exp_avg"].mul_(0.9)
                first.step()
                second.step()
                model.zero_grad()
            for schedule in schedules:
                schedule.step()
        states = [copy.deepcopy(one.state_dict()) for one in (first, second)]
        for one, state in zip((first, second), states, strict=True):
            one.load_state_dict(state)
    return losses, weights_of(prepared or model), states, seen


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def refused(plan: str, how: str) -> None:
    model = net()
    weight, *rest = model.parameters()
    optimizers: Any = [sgd([weight]), adam(rest)]
    if how == "one of none":
        optimizers[1] = adam
    _, _, (first, _), _ = begin(plan, model, batches(8), optimizers)
    if how == "added":
        first.add_param_group({"params": rest[:1]})


test_a_script_equals_one_process = equals_one_process(
    [
        (stepping, "dp_shard=2,zero=3", Rotating, "together"), (stepping, "dp_shard=2,zero=1", sgd, "each by itself"),
        (stepping, "dp_replicate=2", Rotating, "each by itself"), (stepping, "tp=2", Rotating, "together"),
        (stepping, "dp_shard=2,zero=3", sgd, "in whole"),
    ],
    [
        (stepping, "dp_shard=2,zero=2", Rotating, "in whole"), (stepping, "tp=2", sgd, "in whole"),
        (stepping, "dp_shard=2,zero=3", sgd, "each by itself"), (stepping, "dp_replicate=2", sgd, "in whole"),
    ],
)  # fmt: skip
test_a_script_is_refused_with_its_line = refused_with_its_line(
    [
        (refused, "dp_shard=2,zero=1,offload=optimizer", "moved", RefusedPlan, "beside several optimizers"),
        (refused, "dp_replicate=2", "added", InputError, r"one of several optimizers.*before prepare"),
        (refused, "dp_replicate=2", "one of none", InputError, "expected a torch Optimizer, or a list"),
    ]
)
