"""What the one process of a proof looks at by itself: initial values, draws, roll-outs, blends."""

from __future__ import annotations

import random
from typing import Any

import pytest
import run_tasks
import torch
from mutations.both_rooms import SHARED
from mutations.plant import planted
from test_rollout import k4
from torch import nn

from shardwise import Task
from shardwise.models.tasks import mlp
from shardwise.proof.literal_draws import CheckedRandom
from shardwise.proof.literal_rollout import literal_rollout
from shardwise.proof.literal_sources import one_by_one
from shardwise.proof.literal_weights import differences
from shardwise.proof.oracle import plain_module
from shardwise.proof.settings import Settings
from shardwise.random import BatchDims, Samples

BUGS = {bug.name: bug for bug in SHARED}


def begun() -> tuple[Task, nn.Module, dict[str, nn.Parameter]]:
    task = mlp()
    module = plain_module(task, Settings())
    return task, module, dict(module.named_parameters())


@torch.no_grad()
def test_weights_that_a_constructor_draws_are_told_from_others() -> None:
    task, module, params = begun()
    assert differences(task, module) == []
    params["layers.1.weight"].copy_(params["layers.0.weight"].reshape(-1).repeat(2)[: 17 * 17].view(17, 17))
    assert "begin with the same numbers" in differences(task, module)[0]
    task, module, params = begun()
    for param in params.values():
        param.mul_(1.5)
    assert differences(task, module) == [
        "drawn weights begin with numbers of another mean or width than their constructor draws"
    ]


@torch.no_grad()
def test_constants_are_those_of_the_constructor() -> None:
    task = run_tasks.classified()
    module = plain_module(task, Settings())
    module.get_parameter("layers.1.weight").add_(1e-3)
    assert differences(task, module) == [
        "'layers.1.weight' does not begin with the constant that its constructor gives it"
    ]


class Placed(nn.Module):
    """Begins with a one in a place of three that Python draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3)[random.randrange(3)])


@torch.no_grad()
def test_a_draw_of_few_values_is_no_constant() -> None:
    task = Task(model=Placed, batch=torch.ones, loss=lambda output, batch: (output.sum(), 1))
    module = Placed()
    for place in range(3):
        module.weight.copy_(torch.eye(3)[place])
        assert not [text for text in differences(task, module) if "constant" in text]


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.rand_like(x).float().to(x.dtype)
        return nn.functional.dropout(x, 0.3) + torch.randn_like(x)


@pytest.mark.parametrize(("name", "told"), [
    ("", ""),
    ("two draws of a module are one", "draws what another operation of the same micro-batch has drawn"),
    ("elements of a row are dropped together", "takes other elements for less than"),
    ("numbers of a row are alike", "draws numbers for elements that are not those of their places"),
])  # fmt: skip
def test_draws_that_are_one_are_told(name: str, told: str) -> None:
    module, random = Twice(), CheckedRandom(BatchDims())

    def run() -> list[str]:
        random.begin(0, 0, 0, Samples(0, 5, 5))
        with random.watching(module):
            module(torch.ones(5, 8))
        return random.differences

    if not name:
        assert run() == []
        return
    with planted(BUGS[name]) as ran:
        assert told in " ".join(run()) and ran()


def test_what_rounds_float64_is_told() -> None:
    module, random = Twice(), CheckedRandom(BatchDims())
    random.begin(0, 0, 0, Samples(0, 5, 5))
    with random.watching(module):
        module(torch.ones(5, 8, dtype=torch.float64))
    assert any("rounds float64 to torch.float32" in sentence for sentence in random.differences)


def test_a_roll_out_and_a_blend_are_those_of_the_rooms() -> None:
    task: Any = k4()
    literal, batch = literal_rollout(task), task.batch(0)
    module, other = plain_module(task, Settings()), plain_module(literal, Settings())
    assert type(module) is not type(other) and module.state_dict().keys() == other.state_dict().keys()
    batch = {name: value.double() for name, value in batch.items()}
    torch.manual_seed(0)
    mine = module(batch)
    torch.manual_seed(0)
    theirs = other(batch)
    assert len(mine) == 4 and all(map(torch.equal, mine, theirs))
    assert task.loss(mine, batch)[0] == literal.loss(theirs, batch)[0]

    class Of:
        source = run_tasks.blended().data

        def __len__(self) -> int:
            return len(self.source)

    chosen = [7003, 5, 7001, 6999, 0]
    apart, together = one_by_one(Of(), chosen), Of.source.read(chosen)
    assert all(torch.equal(apart[name], value) for name, value in together.items())


class CountsThreads(nn.Module):
    """Notes in how many threads torch computes while it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.threads = nn.Linear(2, 2), torch.get_num_threads()


def test_initial_values_are_computed_as_in_a_rank_of_the_proof() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        module = plain_module(mlp().with_(model=CountsThreads), Settings())
        assert (module.threads, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)
