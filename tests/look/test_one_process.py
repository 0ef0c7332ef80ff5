"""Who is blamed for an error: a task only where one process was run and failed too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import unlike_tasks
from torch import nn

from shardwise import Plan, parallelize
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.look.one_process import blame, failure_alone
from shardwise.precision import Precision


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
    assert str(told).startswith("the task fails on 7 samples in one process too: ") and "test_one_process.py:" in str(
        told
    )
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


def test_only_what_ran_one_process_speaks_of_it() -> None:
    """Words that blame the task stand where it was run, and nowhere else."""
    source = Path(blame.__code__.co_filename).parents[1]
    words = ("in one process too", "one process would meet")
    found = {path.name for path in source.rglob("*.py") if any(word in path.read_text() for word in words)}
    assert found - {"errors.py"} <= {"one_process.py", "parity.py", "deferred.py", "verify_script.py"}


def test_an_optimizer_over_another_models_parameters() -> None:
    with pytest.raises(InputError, match=r"optimizer over 2 tensors that are not among the parameters"):
        parallelize(unlike_tasks.foreign_optimizer())
