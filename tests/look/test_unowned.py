"""Weights that get a gradient and that no optimizer sees are told by name; others are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise import Task, parallelize
from shardwise.look.unowned import not_trained

HEAD = nn.Linear(3, 1)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.kind, self.scale = kind, torch.ones(3, requires_grad=kind == "a tensor")
        self.below = {"layers": [nn.Linear(3, 3)]} if kind != "registered" else [self.first]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        if self.kind == "a list":
            return self.below["layers"][0](x)
        return x.detach() + self.below["layers"][0](x).detach() + x if self.kind == "detached" else x


def loss(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(output)


def with_head(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return HEAD(output).square().sum(), len(output)


@pytest.mark.parametrize(
    ("kind", "of", "name"),
    [
        ("a list", loss, "'below['layers'][0].weight' and 1 more got a gradient"),
        ("a tensor", loss, "'scale' got a gradient"),
        ("plain", with_head, "'HEAD.weight' and 1 more got a gradient"),
        ("registered", loss, None),
        ("detached", loss, None),
    ],
)
def test_weights_that_no_optimizer_sees(kind, of, name) -> None:
    HEAD.zero_grad()
    engine = parallelize(Task(model=lambda: Net(kind), loss=of, batch=lambda step: torch.ones(5, 4)))
    assert not not_trained(engine.module, (of,))
    for step in range(2):
        engine.step(engine.task.batch(step))
    told = [notice for notice in engine.notices if "no optimizer trains it" in notice]
    assert len(told) == (name is not None) and all(name in each for each in told)
