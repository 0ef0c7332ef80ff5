"""Modules that a plan has to look at twice, ways to make weights, and who is blamed for an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import unlike_tasks
from torch import nn

from shardwise import Plan, parallelize, verify
from shardwise.checkpoint.holdings import weights
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.look.one_process import blame, failure_alone
from shardwise.precision import Precision
from shardwise.ranks import RankPool
from shardwise.trace.deferred import build

REPLICAS, FLAT, FULL = "dp_replicate=2", "dp_shard=2,zero=2,accumulate=2", "dp_shard=2,zero=3"
EQUAL = [
    ("final_state", "pp=2"), ("final_state_gru", "pp=2,microbatches=3"), ("states_go_on", "pp=2"),
    ("unreached", "pp=2"), ("unreached", "pp=2,schedule=zbh1,microbatches=3"), ("unreached", "dp_replicate=2,pp=2"),
    ("final_state_gru", "tp=2"), ("final_state", FULL),
    ("mapped", "pp=2"), ("mapped", FULL), ("mapped", FLAT), ("jacobian", "pp=2"), ("jacobian", REPLICAS),
    ("sensitivity", "pp=2"), ("jacobian_inside", FULL), ("jacobian_inside", "pp=2"),
    ("jacobian", FULL), ("sensitivity", FULL),
    ("rounded_inside", "pp=2"), ("rounded_inside", "tp=2"), ("rounded_inside", FULL),
    ("loaded", "pp=2"), ("loaded_from_file", REPLICAS), ("loaded_from_file", "tp=2,pp=2"), ("copied", FULL),
    ("own_generator", FULL), ("own_generator", "pp=2"),
    ("complex_weights", "dp_replicate=3"), ("complex_weights", FLAT), ("complex_weights", "dp_shard=3,zero=1"),
    ("complex_signs", FLAT), ("complex_signs", FULL),
    ("weight_norm_hooks", "pp=2"), ("weight_normed", "tp=2"), ("spectral", "pp=2"), ("orthogonal", "pp=2"),
    ("gathers_when_built", REPLICAS), ("gathers_in_forward", FULL), ("into_its_input", FULL),
    ("remembering", "tp=2,pp=2"),
]  # fmt: skip
REFUSED = [
    ("sparse_parameter", REPLICAS, "'weight' is a tensor of layout torch.sparse_coo"),
    ("sparse_parameter", "pp=2", "'weight' is a tensor of layout torch.sparse_coo"),
    ("complex_weights", "dp_replicate=2,precision=bf16", "'weights.0' is complex, and precision=bf16"),
    ("gathers_when_built", "tp=2", "the forward issues a collective itself (all_gather at"),
    ("gathers_in_forward", "pp=2", "the forward issues a collective itself (all_reduce at"),
    ("gathers_when_built", "tp=2,pp=2", "unlike_tasks.py"),
    ("keeping", "tp=2,pp=2", "something outside of the module keeps what an earlier forward made"),
]


@pytest.mark.parametrize(("name", "plan"), EQUAL)
def test_equal(pool: RankPool, name: str, plan: str) -> None:
    result = verify(f"unlike_tasks:{name}", plan, pool=pool, timeout_s=60)
    assert result.parity, result.text()


@pytest.mark.parametrize(("name", "plan", "reason"), REFUSED)
def test_refused_by_its_mechanism(pool: RankPool, name: str, plan: str, reason: str) -> None:
    result = verify(f"unlike_tasks:{name}", plan, pool=pool, timeout_s=60)
    assert result.refused, result.text()
    assert reason in result.refused


def test_an_optimizer_over_another_models_parameters() -> None:
    with pytest.raises(InputError, match=r"optimizer over 2 tensors that are not among the parameters"):
        parallelize(unlike_tasks.foreign_optimizer())


@pytest.mark.parametrize("name", ["own_generator", "own_generator_small", "loaded", "loaded_from_file", "half_loaded"])
def test_weights_are_those_of_the_plain_constructor(name: str) -> None:
    model = getattr(unlike_tasks, name)().model
    built, plain = build(model, 0), dict(model().named_parameters())
    assert all(torch.equal(built.value(path), value) for path, value in plain.items())
    assert bool(built.notice) == (name in ("loaded_from_file", "half_loaded"))


def test_generators_in_other_states_are_told_apart() -> None:
    def printed(seed: int) -> int:
        return build(lambda: unlike_tasks.drawn_by(seed), 0).fingerprint()

    assert printed(1) == printed(1) != printed(2)


# --- who is blamed


def _blamed(task: Any, error: Exception) -> ShardwiseError:
    batch = task.batch(0)
    return blame(error, "under plan x the forward fails on 7 samples", task, Precision.of(Plan()), task.model(), batch)


def test_a_task_is_blamed_only_if_one_process_fails_too() -> None:
    task = unlike_tasks.final_state()
    told = _blamed(task, ValueError("odd shares"))
    assert isinstance(told, RefusedPlan)
    assert str(told) == (
        "under plan x the forward fails on 7 samples, though one process runs on them: ValueError: odd shares"
    )
    told = _blamed(task.with_(loss=lambda output, batch: 1 / 0), ValueError("odd shares"))
    assert isinstance(told, InputError)
    assert str(told).startswith("the task fails on 7 samples in one process too: ") and "test_unlike.py:" in str(told)
    assert str(told).endswith("ZeroDivisionError: division by zero")
    assert isinstance(_blamed(task.with_(optimizer=lambda groups: 1 / 0), ValueError()), InputError)


def test_a_module_that_exists_once_is_not_trained_to_find_out() -> None:
    task = unlike_tasks.final_state()
    module = task.model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    once = task.with_(model=lambda: module)
    assert failure_alone(once, Precision.of(Plan(precision="fp64")), task.batch(0)) is None  # type: ignore[misc]
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert module.enter.weight.dtype == torch.float32 and module.enter.weight.grad is None


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not to be copied")


def test_what_was_not_tried_is_not_said() -> None:
    module = Uncopied(unlike_tasks.WIDTH, unlike_tasks.OUT)
    told = _blamed(unlike_tasks.task(lambda: module), ValueError("odd shares"))
    assert isinstance(told, RefusedPlan)
    assert "not tried in one process: the module cannot be copied" in str(told)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2", REPLICAS])
def test_a_kernel_that_only_a_plan_lacks_is_the_plans(pool: RankPool, plan: str) -> None:
    result = verify("unlike_tasks:fails_beside_others", plan, pool=pool, timeout_s=60)
    assert result.refused and "though one process runs on them" in result.refused, result.text()


def test_only_what_ran_one_process_speaks_of_it() -> None:
    """Words that blame the task stand where it was run, and nowhere else."""
    source = Path(blame.__code__.co_filename).parents[1]
    words = ("in one process too", "one process would meet")
    found = {path.name for path in source.rglob("*.py") if any(word in path.read_text() for word in words)}
    assert found - {"errors.py"} <= {"one_process.py", "parity.py", "deferred.py", "door.py"}  # door: of scripts/proof


def _checkpointed(plan: str) -> str:
    engine = parallelize(unlike_tasks.complex_weights(), plan)
    engine.step(unlike_tasks.sequences(0))
    kinds = {str(tensor.dtype) for _, tensor in engine.full_parameters()}
    assert kinds >= {str(held.tensor.dtype) for held in weights(engine)}
    assert kinds == {str(kept["exp_avg"].dtype) for _, kept in engine.full_optimizer_state()}
    return "".join(sorted(kinds))


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3", "tp=2"])
def test_complex_parameters_are_complex_outside(pool: RankPool, plan: str) -> None:
    assert pool.run(_checkpointed, 2, plan) == ["torch.complex64torch.float32"] * 2
