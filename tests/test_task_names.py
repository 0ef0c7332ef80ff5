"""One resolver for every verb: a task by name, by file, by configuration, by function, or itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise
from shardwise import Task
from shardwise.errors import InputError
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.task_names import resolve_task

SMALL = """
[task]
name = "text"
seq_len = 8
model = {layers = 1, hidden = 8, heads = 2}
"""


def test_every_way_to_give_a_task(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    given = tasks.mlp()
    assert resolve_task(given) is given
    assert resolve_task(tasks.mlp).name == resolve_task("shardwise.models.tasks:mlp").name == given.name
    assert resolve_task("text").name == "text"
    assert resolve_task(str(tmp_path / "small.toml")).model().head.weight.shape == (256, 8)


def test_a_function_called_task_gives_its_module_s_name(tmp_path: Path) -> None:
    """By which a folder of runs tells them apart."""
    (tmp_path / "harvest.py").write_text(
        "from shardwise.models.tasks import mlp\n\ndef task(): return mlp().with_(name='task')"
    )
    assert resolve_task(f"{tmp_path / 'harvest.py'}:task").name == "harvest"


@pytest.mark.parametrize(
    "given, why",
    [
        ("txet", "did you mean 'text'"),
        ("nowhere_at_all:task", "no module 'nowhere_at_all'"),
        ("shardwise.models.tasks:mpl", "did you mean 'mlp'"),
        (lambda: 3, "returned int, not a shardwise.Task"),
    ],
)
def test_what_is_no_task_is_told(given: object, why: str) -> None:
    with pytest.raises(InputError, match=why):
        resolve_task(given)  # type: ignore[arg-type]


def test_verbs_find_what_train_finds(tmp_path: Path, pool: RankPool) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    assert shardwise.verify(str(path), "dp_replicate=2", pool=pool, steps=1).parity
    forecast = shardwise.simulate(str(path), "dp_replicate=2", "2 h100-sxm-80gb", global_batch=8)
    assert forecast.step_s > 0
    task: Task = resolve_task(str(path))
    assert shardwise.simulate(task, "dp_replicate=2", "2 h100-sxm-80gb", global_batch=8).step_s == forecast.step_s


UNSEEDED = """
import random
import numpy, torch
from shardwise import Task
from shardwise.models.tasks import mlp
at_import = torch.rand(1).item(), numpy.random.rand(), random.random()
def task():
    return mlp().with_(name=repr((at_import, torch.rand(1).item(), numpy.random.rand(), random.random())))
"""


def test_a_file_draws_the_same_without_a_seed_in_every_process(tmp_path: Path) -> None:
    """Each process imports it by itself: unseeded data would be another on every rank."""
    drawn = []
    for name in ("first_of_two", "second_of_two"):
        path = tmp_path / f"{name}.py"
        path.write_text(UNSEEDED)
        stood = torch.get_rng_state()
        drawn.append(resolve_task(f"{path}:task").name)
        assert torch.equal(torch.get_rng_state(), stood)
    assert drawn[0] == drawn[1]
