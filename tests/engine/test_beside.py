"""Complex weights that a module keeps in a list too; buffers of another shape in a state that is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Task, parallelize
from shardwise.engine.load_weights import load_state_dict
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool


class Beside(nn.Module):
    """Keeps a complex weight in a list, and reads it there or by its name."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
        self.weights, self.listed = [self.weight], listed

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).to(torch.complex64) @ (self.weights[0] if self.listed else self.weight).mT).abs()


def rows(step: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def trained(plan: str, listed: bool) -> dict[str, Any]:
    task = Task(
        model=lambda: Beside(listed), loss=lambda o, b: (o.square().sum(), len(b)), batch=rows,
        optimizer=lambda groups: torch.optim.Adam(groups, lr=0.01),
    )  # fmt: skip
    engine = parallelize(task, plan, device="cpu")
    for step in range(2):
        engine.step(rows(step))
    return {name: value.clone() for name, value in engine.full_parameters()}


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", "tp=2"])
def test_a_complex_weight_read_from_a_list_is_refused_where_it_is_pairs(plan: str, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan):
        pool.run(trained, 2, plan, True)


def test_a_complex_weight_that_is_in_a_list_too_is_trained(pool: RankPool) -> None:
    (alone,) = pool.run(trained, 1, "single", False)
    for found in pool.run(trained, 2, "dp_shard=2,zero=3", False):
        assert found["weight"].dtype == torch.complex64
        assert all(torch.allclose(found[name], alone[name], atol=1e-5) for name in alone)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_a_loaded_buffer_has_the_shape_of_the_models_own() -> None:
    task = Task(model=Scaled, loss=lambda o, b: (o.square().sum(), len(b)), batch=rows)
    engine = parallelize(task, "single", device="cpu")
    weights = engine.state_dict()
    with pytest.raises(InputError, match=r"'scale' has shape \(1,\), the model's \(4,\)"):
        load_state_dict(engine.state, {**weights, "scale": torch.zeros(1)})
    load_state_dict(engine.state, {**weights, "scale": torch.ones(4), "table": torch.zeros(4)}, strict=False)
    assert torch.equal(engine.module.scale, torch.ones(4))
    assert torch.equal(engine.module.table, torch.arange(4.0)), "no part of the state"
