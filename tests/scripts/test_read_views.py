"""Views of weights that a script reads where ranks hold pieces: as in one process, and a write into one raises."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from small_scripts import batches, begin, equals_one_process, made, mse, net, refused_with_its_line, stepped, weights_of
from torch import nn
from torch.nn import functional as F

from shardwise.errors import RefusedPlan


class Policy(nn.Module):
    """A spread of its own beside the mean, which a method expands to the mean's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.logstd = nn.Parameter(torch.linspace(-0.5, 0.5, 2).view(1, 2))

    def judged(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean = self.mean(x)
        return torch.distributions.Normal(mean, self.logstd.expand_as(mean).exp()).log_prob(y).sum(1)


def acting(plan: str) -> tuple:
    """A method that expands a weight is called without gradients, and with them."""
    prepared, model, optimizer, loader = begin(plan, made(Policy), batches(12))
    losses, seen = [], []
    for x, y in loader:
        with torch.no_grad():
            seen.append(model.judged(torch.ones(3, 6).double(), torch.zeros(3, 2).double()).sum().item())
        losses.append(stepped(prepared, optimizer, -model.judged(x, y).mean()))
    return losses, seen, weights_of(prepared or model)


def looked_at(plan: str) -> tuple:
    """Norms, histograms and an average of weights, as scripts take them, and a difference of two steps."""
    model = net()
    average = copy.deepcopy(model)
    prepared, model, optimizer, loader = begin(plan, model, batches(12))
    shadow = {name: param.data.clone() for name, param in average.named_parameters()}
    losses, seen = [], list[Any]()
    for x, y in loader:
        before = [param.detach().clone() for param in model.parameters()]
        losses.append(stepped(prepared, optimizer, mse(model, x, y)))
        for name, param in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * param.data
            seen.append(param.data.norm(2).item() + param.detach().cpu().numpy().std().item())
        seen.append(sum((b - p.data).abs().sum().item() for b, p in zip(before, model.parameters(), strict=True)))
        with torch.no_grad():
            row = model.layers[0].weight[0].view(-1, 2)
            seen += [row[1].sum().item(), F.linear(torch.ones(2, dtype=row.dtype), row.t().contiguous().t()).sum()]
            seen.append(float(np.linalg.svd(model.head.weight.detach().numpy())[1].max()))
            seen.append(copy.deepcopy(model.head.weight.data))
    return losses, seen, shadow, weights_of(prepared or model)


def mistaken(plan: str, case: str) -> None:
    prepared, model, optimizer, loader = begin(plan, net(), batches(12))
    weight, seen = model.head.weight, None
    for x, y in loader:
        stepped(prepared, optimizer, mse(model, x, y))
        if seen is not None:
            seen.sum()
        if case == "data":
            weight.data.mul_(0.9)
        if case == "row of a view":
            row = weight.detach()[0]
            row[1:] = 0.0
        if case == "out":
            torch.add(x[0, 0], 1.0, out=weight.data.view(-1)[0])
        if case == "numpy":
            weight.detach().numpy()[0, 0] = 1.0
        if case == "kept":
            seen = weight.data


PIECES = ["dp_shard=2,zero=3", "tp=2"]
test_a_script_equals_one_process = equals_one_process(
    [*((acting, plan) for plan in PIECES), *((looked_at, plan) for plan in PIECES)]
)
test_a_script_is_refused_with_its_line = refused_with_its_line([
    (mistaken, "dp_shard=2,zero=3", "data", RefusedPlan, r"mul_ into a weight.*prepared.whole.*line \d+: weight"),
    (mistaken, "tp=2", "row of a view", RefusedPlan, r"__setitem__ into a weight.*line \d+: row"),
    (mistaken, "dp_shard=2,zero=3", "out", RefusedPlan, r"add into a weight.*line \d+: torch"),
    (mistaken, "tp=2", "kept", RefusedPlan, r"taken before weights changed.*line \d+: seen"),
    (mistaken, "dp_shard=2,zero=3", "kept", RefusedPlan, r"taken before weights changed.*line \d+: seen"),
    (mistaken, "dp_shard=2,zero=3", "numpy", Exception, "read-only"),
])  # fmt: skip
