"""Random numbers of one process at every door by default; a model that draws none is not watched."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

import shardwise
from shardwise import Task, parallelize
from shardwise.config import load
from shardwise.errors import RefusedPlan
from shardwise.models import tasks
from shardwise.ranks import RankPool


@pytest.mark.parametrize("door", [shardwise.parallelize, shardwise.prepare, shardwise.plan, shardwise.simulate])
def test_every_door_from_python_draws_as_one_process(door: Callable) -> None:
    assert inspect.signature(door).parameters["randomness"].default == "global"


def test_so_do_configurations_and_commands() -> None:
    from shardwise.cli.compare import compare
    from shardwise.cli.foresee import plan, simulate

    assert load().config.train.randomness == "global"
    for command in (plan, simulate, compare):
        option = next(each for each in command.params if each.name == "randomness")
        assert option.default == "global"


def losses(make: Callable[[], Task], plan: str, steps: int = 3) -> tuple[list[float], list[str]]:
    engine = parallelize(make(), f"{plan}precision=fp64", device="cpu")
    assert engine.task.batch is not None
    return [engine.step(engine.task.batch(step)).loss for step in range(steps)], engine.notices


def test_dropout_is_one_process_s_without_asking_and_is_told(pool: RankPool) -> None:
    alone, told = pool.run(losses, 1, tasks.decoder_dropout, "")[0]
    assert sum("they are those of one process" in line and "randomness=fast" in line for line in told) == 1
    assert any("native_dropout" in line or "bernoulli" in line for line in told)
    for plan in ("dp_replicate=2,", "tp=2,", "pp=2,microbatches=1,"):
        spread, _ = pool.run(losses, 2, tasks.decoder_dropout, plan)[0]
        assert spread == pytest.approx(alone, rel=1e-10), plan


class Drawing(nn.Module):
    """Dropout of a rate that `at(calls)` gives; notes which modes were active."""

    def __init__(self, at: Callable[[int], float]) -> None:
        super().__init__()
        self.inner, self.at, self.calls = nn.Linear(4, 4), at, 0
        self.watched: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.watched.append(bool(_get_current_dispatch_mode_stack()))
        return nn.functional.dropout(self.inner(x), self.at(self.calls), training=True)


def drawing(rate: Callable[[int], float]) -> Task:
    return Task(
        model=lambda: Drawing(rate), loss=lambda out, batch: (out.square().sum(), len(out)),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01), batch=lambda step: torch.ones(4, 4) * (step + 1),
    )  # fmt: skip


def watched(rate: Callable[[int], float], between: Callable[[], object] = lambda: None,
            **options: Any) -> tuple[list[bool], list[str]]:  # fmt: skip
    engine = parallelize(drawing(rate), "single", device="cpu", **options)
    assert engine.task.batch is not None
    module = engine.module
    assert isinstance(module, Drawing)
    module.watched.clear()  # the look's
    module.calls = 0
    module.register_forward_pre_hook(lambda m, a: between())
    for step in range(6):
        engine.step(engine.task.batch(step))
    return module.watched, engine.notices


def test_a_model_without_draws_is_not_watched_and_one_with_them_is() -> None:
    assert watched(lambda call: 0.0) == ([False] * 6, [])
    seen, told = watched(lambda call: 0.5)
    assert seen == [True] * 6
    assert len(told) == 1 and "in one process" not in told[0]
    assert watched(lambda call: 0.5, randomness="fast") == ([False] * 6, [])
    assert watched(lambda call: 0.0, check_loss=False)[0] == [True] * 6, "what was not looked at may draw"


def test_draws_that_begin_later_are_told_and_followed_from_the_next_step_on() -> None:
    seen, told = watched(lambda call: 0.5 if call > 2 else 0.0)
    assert seen == [False, False, False, True, True, True]
    assert len(told) == 1
    assert "drew random numbers in step 3" in told[0]
    assert "from step 4 on they are" in told[0]


def beside() -> None:
    """Another thread's draw, which no mode of this one sees."""
    with _disable_current_modes():
        torch.rand(1)


def test_draws_of_others_are_no_draws_of_the_model() -> None:
    """A data set's own, in a thread of this process: a whole step is watched once, then none."""
    seen, told = watched(lambda call: 0.0, between=beside)
    assert seen == [False, True, False, False, False, False]
    assert not told


def test_compile_is_refused_where_draws_would_be_followed(pool: RankPool) -> None:
    from shardwise.cluster import Cluster
    from shardwise.planner.door import simulate

    with pytest.raises(
        RefusedPlan, match=r"draws random numbers \(.* hides them: leave compile out, or .*randomness=fast"
    ):
        parallelize(tasks.decoder_dropout(), "compile=true", device="cpu")
    where = (tasks.decoder_dropout(), "compile=true", Cluster.parse("1x1 h100-sxm-80gb"))
    with pytest.raises(RefusedPlan, match=r"hides them: leave compile out, or .*randomness=fast"):
        simulate(*where)
    assert simulate(*where, randomness="fast").step_s > 0


def test_a_file_may_ask_for_fast(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[train]\nrandomness = "fast"\n')
    assert load(tmp_path / "my.toml").config.train.randomness == "fast"
