"""A module that was there before its task's constructor was called is copied, and stays as it is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise
from shardwise import Task
from shardwise.errors import InputError
from shardwise.ranks import RankPool
from shardwise.task_names import resolve_task
from shardwise.trace.deferred import build, named_tensors


class Tied(nn.Module):
    """A large and a small weight, each under two names, a buffer, and a view of a weight's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(96, 64), nn.Linear(4, 2)
        self.again = self.large
        self.register_buffer("counts", torch.arange(3.0))
        self.part = self.small.weight.detach()[:1]


def _there(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module)}


def test_the_module_itself_stays_as_it_is() -> None:
    net = Tied()
    net.large.weight.lr_scale = 0.5  # type: ignore[assignment]
    before, built = _there(net), build(lambda: net, 0)
    assert built.module is not net and built.given is net and not built.notice
    copy: Any = built.module
    assert copy.again is copy.large and copy.large.weight.lr_scale == 0.5
    assert copy.part.untyped_storage().data_ptr() == copy.small.weight.untyped_storage().data_ptr()
    for name, tensor in named_tensors(copy):
        assert torch.equal(built.value(name), before[name])
        tensor.data = torch.zeros(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(net))
    assert build(lambda: net, 1).value("large.weight").equal(before["large.weight"])


def test_new_weights_around_it_are_made_later() -> None:
    net = nn.Linear(96, 64)
    built = build(lambda: nn.Sequential(net, nn.Linear(64, 96)), 0)
    assert built.value("0.weight").equal(net.weight) and built.module.get_submodule("0") is not net
    fresh = build(lambda: nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 96)), 0)
    assert built.value("1.weight").equal(fresh.value("1.weight"))


def test_one_that_reads_its_weights_is_copied_too() -> None:
    net = nn.Linear(96, 64)

    def model() -> nn.Module:
        torch.rand(5000).numpy()  # of a large tensor, which has no values while a constructor is recorded
        return net

    built = build(model, 0)
    assert built.notice and built.module is not net and built.value("weight").equal(net.weight)


def test_a_script_s_own_is_changed_itself() -> None:
    net = nn.Linear(96, 64)
    assert build(lambda: net, 0, own=False).module is net


def test_what_cannot_be_copied_is_told() -> None:
    net = nn.Linear(4, 2)
    net.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"there before the call.*cannot be copied .*_thread.lock"):
        build(lambda: net, 0)


with torch.random.fork_rng():
    torch.manual_seed(0)
    NET = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 2))


def _loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


def _penalised(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return _loss(output, batch)[0] + NET[0].weight.square().sum() * len(output), len(output)


def before_the_call() -> Task:
    data = TensorDataset(torch.rand(16, 96), torch.rand(16, 2))
    return Task(model=lambda: NET, loss=_loss, inputs=lambda batch: ((batch[0],), {}), data=data)


def penalised() -> Task:
    return before_the_call().with_(loss=_penalised)


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", "tp=2"])
def test_it_is_equal_to_one_process(plan: str, pool: RankPool) -> None:
    for _ in range(2):  # each time of the weights of before
        parity = shardwise.verify(before_the_call, plan, pool=pool, steps=1)
        assert parity.equal, parity.text()


def weights_of_others(rank: int = 0) -> list[float]:
    """Returns the sum of each weight at start, where each rank has drawn others."""
    task = resolve_task(before_the_call)
    torch.manual_seed(torch.distributed.get_rank())
    net = nn.Linear(96, 64)
    engine = shardwise.parallelize(task.with_(model=lambda: nn.Sequential(net, nn.Linear(64, 2))), "tp=2")
    return [float(weight.sum()) for _, weight in engine.full_parameters()] + [float(net.weight.sum())]


def test_weights_that_each_rank_drew_are_those_of_the_first(pool: RankPool) -> None:
    first, second = pool.run(weights_of_others, 2)
    assert first[:4] == second[:4] and first[0] == pytest.approx(first[4]) and first[4] != second[4]


def other_data(rank: int = 0) -> None:
    torch.manual_seed(torch.distributed.get_rank())
    data = TensorDataset(torch.rand(16, 96), torch.rand(16, 2))
    shardwise.parallelize(before_the_call().with_(data=data), "tp=2")


def test_ranks_with_other_data_are_told(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"Task\.data gives some ranks other samples than others"):
        pool.run(other_data, 2)


def test_a_loss_that_reads_the_module_itself_is_an_error(pool: RankPool) -> None:
    with pytest.raises(InputError, match="a copy of it is trained"):
        shardwise.verify(penalised, "dp_replicate=2", pool=pool, steps=1)
