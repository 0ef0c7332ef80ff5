"""Weights that tp keeps in shares and gathers to read, where no product can be shared by its ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from kept_share_tasks import Recurrent, made
from module_tasks import OUT, WIDTH, sequences, task
from torch import Tensor, nn

from shardwise import Plan, Task, parallelize, verify
from shardwise.comm import Axis
from shardwise.engine.tensor_cuts import derive_cuts
from shardwise.look.samples import a_few, few_samples
from shardwise.parallel.tensor import Derived
from shardwise.precision import Precision
from shardwise.ranks import RankPool
from shardwise.trace.deferred import build


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
