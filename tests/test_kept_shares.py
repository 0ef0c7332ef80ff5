"""Weights that tp keeps in shares and gathers to read, where no product can be shared by its ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from module_tasks import OUT, WIDTH, sequences, task
from torch import Tensor, nn

from shardwise import Plan, Task, parallelize, verify
from shardwise.comm import Axis
from shardwise.engine.tensor import derive_cuts
from shardwise.look.samples import a_few, few_samples
from shardwise.parallel.tensor import Derived
from shardwise.precision import Precision
from shardwise.ranks import RankPool
from shardwise.trace.deferred import build


class Recurrent(nn.Module):
    """Nothing but recurrences, which hold their parameters in a list of their own, and a matrix function."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell = nn.LSTM(WIDTH, 5, batch_first=True, bidirectional=True), nn.GRUCell(10, 7)
        self.turn = nn.Parameter(torch.randn(7, 7) / 3)

    def forward(self, x: Tensor) -> Tensor:
        read, _ = self.lstm(x)
        state = read.new_zeros(len(x), 7)
        for moment in read.unbind(1):
            state = self.cell(moment, state) @ torch.linalg.matrix_exp(self.turn - self.turn.T)
        return state[:, :OUT]


class Contractive(nn.Module):
    """Reads its weights inside a transform of `torch.func`, whose derivative is in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.leave = nn.Linear(WIDTH, 5), nn.Linear(5, OUT)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mean(1)
        slopes = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(self.inner(row))))(rows)
        return self.leave(torch.tanh(self.inner(rows))) + slopes.square().sum((1, 2))[:, None]


class PastAttributes(Recurrent):
    """Reads some weights past their attributes, writes into another, and sets one anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mean = nn.Parameter(torch.ones(OUT)), nn.Parameter(torch.ones(4, OUT))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=0.9)
        self.mean.data = torch.nn.functional.normalize(self.mean.data, dim=0)
        length = sum(param.square().sum() for param in self.cell.parameters())
        return super().forward(x) * self.scale * self.mean.sum(0) + 0.1 * length


class Stepping(nn.Module):
    """For each sample a step of descent on its own error, by weights that are read again to be named (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rate = nn.Parameter(torch.randn(OUT, WIDTH) / 3), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for rows in x:
            with torch.enable_grad():
                error = (rows @ self.weight.T).square().mean()
                (slope,) = torch.autograd.grad(error, [self.weight], create_graph=True)
            found.append((rows @ (self.weight - self.rate * slope).T).mean(0))
        return torch.stack(found)


MODULES = {"stepping": Stepping, "recurrent": Recurrent, "contractive": Contractive, "past_attributes": PastAttributes}


def made(name: str) -> Task:
    return task(MODULES[name], sequences)


def recurrent() -> Task:
    return made("recurrent")


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("recurrent", "tp=3"), ("recurrent", "tp=2,dp_shard=2,zero=3,remat=full"), ("recurrent", "tp=2,pp=2"),
        ("contractive", "tp=2,sp=true"), ("past_attributes", "tp=2"), ("stepping", "tp=2"),
    ],
)  # fmt: skip
def test_equal_to_one_process(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(partial(made, name), plan, pool=pool, timeout_s=120)
    assert parity.parity, parity.text()


def kept(task: Task, plan: str) -> Derived:
    chosen = Plan.parse(plan)
    sample: Any = few_samples(task, chosen, Axis.alone("data"), torch.device("cpu"))
    return derive_cuts(task, chosen, Precision.of(chosen), build(task.model, 0), a_few(sample))


def test_what_is_kept_in_shares() -> None:
    found = kept(made("recurrent"), "tp=2")
    assert {cut.role for cut in found.cuts.values()} == {"kept"} and not found.whole.keys() & found.cuts.keys()
    assert {cut.role for cut in kept(made("stepping"), "tp=2").cuts.values()} == {"kept, read once"}
    assert found.cuts["turn"].owners.counts == (4, 3) and "lstm.weight_ih_l0_reverse" in found.cuts


def test_what_is_read_past_its_attribute_or_written_stays_whole() -> None:
    found = kept(made("past_attributes"), "tp=2")
    assert not [name for name in found.cuts if name in ("scale", "mean") or name.startswith("cell.")]
    assert {"turn", "lstm.weight_ih_l0"} <= found.cuts.keys()


class Listed(nn.Module):
    """Keeps a weight in a list of its own, which zero=3 leaves whole beside its units."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.weights = [self.inner.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(nn.functional.linear(x.mean(1), self.weights[0], self.inner.bias).tanh())


def at_start(plan: str, kind: type[nn.Module]) -> dict[str, Tensor]:
    return parallelize(task(kind, sequences), plan).state_dict()


@pytest.mark.parametrize("kind", [Listed, Recurrent])
@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3,precision=bf16", "dp_shard=2,zero=3,precision=fp16"])
def test_masters_begin_with_the_weights_of_the_constructor(plan: str, kind: type[nn.Module], pool: RankPool) -> None:
    (alone,) = pool.run(at_start, 1, "single", kind)
    for state in pool.run(at_start, 2, plan, kind):
        for name, weight in alone.items():
            torch.testing.assert_close(state[name].float(), weight.float(), rtol=0, atol=0)
