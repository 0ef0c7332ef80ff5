"""Forwards that take gradients themselves, cut into stages: equal to one process, or refused by what they do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import taken_tasks
import torch

from shardwise import parallelize, verify
from shardwise.random import ConstantRandom
from shardwise.ranks import RankPool
from shardwise.trace.double import KeepDouble

EQUAL = [
    ("residual", "pp=2"),
    ("potential", "pp=2"),
    ("packed", "pp=2"), ("tangents", "pp=2"), ("squeezed", "dp_replicate=2"),
    ("table", "tp=2"),
]  # fmt: skip
MORE = [
    ("residual", "pp=4,microbatches=2"), ("residual", "tp=2,pp=2"), ("residual", "pp=2,schedule=zbh1,microbatches=3"),
    ("potential", "pp=3"), ("potential", "dp_shard=2,zero=2,pp=2"), ("potential", "tp=2,pp=2"),
    ("potential_again", "pp=2,schedule=gpipe"), ("potential", "pp=2,remat=full,accumulate=2"),
    ("potential_unused", "pp=2"), ("hamiltonian", "dp_replicate=2,pp=2,microbatches=2"), ("descent", "pp=2"),
    ("descent", "pp=2,stages=energy.2"), ("descent", "pp=3"), ("descent", "dp_shard=2,zero=3,pp=2"),
    ("by_jacobian", "pp=2,stages=energy.2"), ("by_weights", "pp=2"), ("packed", "tp=2,pp=2"),
    ("tangents", "tp=2,pp=2"), ("squeezed", "pp=2"), ("hessians", "dp_replicate=2"), ("hessians", "pp=2"),
]  # fmt: skip
REFUSED = [
    ("by_backward", "pp=2", "by other means than torch.autograd.grad"),
    ("potential", "pp=2,schedule=zbv", "use schedule=1f1b"),
    ("hamiltonian", "dp_shard=2,zero=3,pp=2", "use zero=2"),
]


@pytest.mark.parametrize(("name", "plan"), [*EQUAL, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)])
def test_equal_to_one_process(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(f"taken_tasks:{name}", plan, pool=pool, timeout_s=180)
    assert parity.parity, parity.text()
    assert parity.gradient_error and parity.parameter_error


@pytest.mark.long
@pytest.mark.parametrize(("name", "plan", "told"), REFUSED)
def test_refusals(name: str, plan: str, told: str, pool: RankPool) -> None:
    parity = verify(f"taken_tasks:{name}", plan, pool=pool)
    assert told in parity.refused, parity.text()


@pytest.mark.parametrize("mode", [KeepDouble, partial(ConstantRandom, 0.5)])
def test_zeros_without_memory_have_some_where_modes_look(mode: Any) -> None:
    """Derivatives forward make them; `aten.mul.Scalar` of one ends the process where a mode is entered."""
    with mode():
        assert not torch._efficientzerotensor(3)._is_zerotensor()


def _evaluated(name: str, plan: str) -> float:
    task = getattr(taken_tasks, name)()
    engine = parallelize(task, plan)
    assert task.batch is not None
    total, weight = engine.evaluate([task.batch(step) for step in (3, 4)])
    engine.close()
    return float(total / weight)


@pytest.mark.parametrize("name", ["hamiltonian"])
def test_in_evaluation_gradients_go_through_stages_too(name: str, pool: RankPool) -> None:
    (alone,) = pool.run(_evaluated, 1, name, "precision=fp64")
    assert pool.run(_evaluated, 2, name, "pp=2,precision=fp64") == pytest.approx([alone, alone], rel=1e-12)
