"""Each example: under a hundred lines, the same numbers under several plans, and a picture of its result."""

from __future__ import annotations

import importlib
import math
import os
import sys
import xml.etree.ElementTree as xml
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise import Task, parallelize
from shardwise.layout import Plan
from shardwise.layout.grid import SPACE
from shardwise.mesh import build_mesh
from shardwise.part import plain
from shardwise.part.positions import Positions
from shardwise.ranks import RankPool
from shardwise.task_names import resolve_task

FOLDER = Path(__file__).parents[2] / "examples"
NEEDS = {"images": ["sklearn"], "fields": ["netCDF4", "iris_sample_data"], "finetune": ["transformers"], "text": [],
         "shallow_water": [], "preferences": ["transformers"]}  # fmt: skip
PLANS = {
    "text": ["dp_shard=2,zero=3", "tp=2"],
    "finetune": ["dp_shard=2,zero=3", "tp=2"],
    "images": ["dp_replicate=2", "pp=2,microbatches=2"],
    "fields": ["dp_shard=2,zero=2", "tp=2", "domain=1x2"],
    "shallow_water": ["domain=2", "domain=1x2"],
    "preferences": ["dp_shard=2,zero=3", "tp=2"],
}
CASES = [(name, plan) for name, plans in PLANS.items() for plan in plans]
STEPS = 2


def needs(name: str) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"examples/{name}.py needs {package}: pip install 'shardwise[examples]'")


def losses(name: str, plan: str, folder: str) -> list[float]:
    """Of a few steps on the example's own data, whose order is that of the samples; then of held-out data."""
    sys.modules.pop(name, None)  # finetune reads its folder when it is imported
    with chdir(folder), mock.patch.dict(os.environ, {"FINETUNE_FOLDER": folder}):
        return _losses(resolve_task(f"{FOLDER / name}.py:task"), plan)


def _losses(task: Task, plan: str) -> list[float]:
    engine = parallelize(task, f"{plan},precision=fp64" if plan != "single" else "precision=fp64")
    assert task.data is not None and task.eval_data is not None
    found = [engine.step(task.data.read(list(range(4 * step, 4 * step + 4)))).loss for step in range(STEPS)]
    total, weight = engine.evaluate([task.eval_data.read([0, 1, 2, 3])])
    return [*found, total / weight]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


def example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FINETUNE_FOLDER", str(folder))
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def test_each_is_under_a_hundred_lines() -> None:
    found = sorted(FOLDER.glob("*.py"))
    assert {path.stem for path in found} == {*PLANS, "draw"}
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 100 for path in found)


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_plans_give_the_numbers_of_one_process(
    name: str, plan: str, pool: RankPool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    needs(name)
    if name == "finetune":
        example(name, folder, monkeypatch).make_checkpoint(STEPS)
    alone = pool.run(losses, 1, name, "single", str(folder), timeout_s=120)[0]
    for rank in pool.run(losses, 2, name, plan, str(folder), timeout_s=120):
        assert rank == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("name", PLANS)
def test_each_draws_its_result(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(name)
    example(name, folder, monkeypatch).main(["--steps", "2", "--out", str(folder)])
    picture = folder / f"{name}.svg"
    assert xml.parse(picture).getroot().tag.endswith("svg")
    assert 1_000 < picture.stat().st_size < 150_000


def solved(grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Forty steps of the solver of shallow water on the whole plane, and on tiles of it."""
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        water: Any = importlib.import_module("shallow_water")
    inner = {axis.name: axis for axis in build_mesh(Plan(domain=grid), torch.device("cpu")).inner}
    cuts = tuple((dim, (inner[name],)) for dim, name in ((2, SPACE[0]), (3, SPACE[1])) if name in inner)
    start = water.Trajectories(range(2)).read([0, 1])["now"].double()[..., :17, :13].contiguous()
    return water.solve(start, 40), plain(water.solve(Positions((cuts,)).cut(start), 40))


@pytest.mark.parametrize("grid", [(1, 3), (2, 2)])
def test_the_solver_on_tiles_has_the_bits_of_one_process(pool: RankPool, grid: tuple[int, int]) -> None:
    for whole, tiles in pool.run(solved, math.prod(grid), grid):
        assert torch.equal(whole, tiles) and float(whole[:, 0].std()) > 0.01
