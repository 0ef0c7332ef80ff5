"""Steps of epochs, schedules and scaled rates of a run against formulas of their own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mutations.plant import Bug, planted
from torch import nn

from shardwise import Task
from shardwise.adapters import with_lora
from shardwise.config import load
from shardwise.config.schema import LoraSection
from shardwise.proof.literal_settings import _adapters, differences
from shardwise.training.job import make_job
from shardwise.training.learning_rates import make_schedule

WARM = ("train.steps=50", "schedule.warmup_steps=2")
SETTINGS = [
    ("schedule.name=constant", *WARM), ("schedule.name=linear", "schedule.final_factor=0.1", *WARM),
    ("schedule.name=cosine", *WARM), ("schedule.name=wsd", "schedule.decay_fraction=0.3", *WARM),
    ("schedule.name=wsd", "schedule.decay_steps=1", *WARM), ("train.epochs=1.5",),
    ("train.epochs=1.5", "train.batch_samples=9"), ("optimizer.scale_lr=sqrt", "optimizer.base_batch=2"),
    ("optimizer.scale_lr=linear", "optimizer.base_batch=32"),
]  # fmt: skip


def told(folder: Path, *overrides: str) -> list[str]:
    (folder / "run.toml").write_text('[task]\nname = "run_tasks:classified"\n[optimizer]\nlr = 0.02\n')
    effective: Any = load(folder / "run.toml", overrides)
    job = make_job(effective)
    return differences(job, len(job.build_task().data), make_schedule(effective.config.schedule, job.steps), job.steps)


@pytest.mark.parametrize("overrides", SETTINGS, ids=" ".join)
def test_a_run_settles_what_they_say(overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert not told(tmp_path, *overrides)


JOB, RATES = "shardwise.training.job:", "shardwise.training.learning_rates:"


@pytest.mark.parametrize(("where", "old", "new", "overrides"), [
    (f"{RATES}scaled_lr", 'rule == "linear"', 'rule == "sqrt"', SETTINGS[7]),
    (f"{RATES}warmed_up", "(step + 1)", "step", SETTINGS[0]),
    (f"{RATES}cosine", "total - warmup)", "total)", SETTINGS[2]),
    (f"{RATES}wsd", "(total - decay) + 1", "(total - decay)", SETTINGS[3]),
    (f"{JOB}_steps", "math.ceil(", "math.floor(", SETTINGS[6]),
], ids=["rules swapped", "no first rate", "the fall is too long", "decay is late", "a step too few"])  # fmt: skip
def test_what_is_settled_otherwise_is_told(
    where: str, old: str, new: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:  # fmt: skip
    with planted(Bug("", where, old, new, "", "")) as ran:
        assert told(tmp_path, *overrides) and ran()


class Scaled(nn.Module):
    """A module with a number named `scaling`, as attention has one, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.out, self.scaling = nn.Linear(4, 4), nn.Linear(4, 4), 0.5


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj"], ["q_*", "out"]])
def test_adapters_of_every_target_are_those_that_are_asked_for(targets: list[str]) -> None:
    section = LoraSection(rank=2, alpha=3.0, targets=targets)
    job = SimpleNamespace(build_task=lambda: with_lora(Task(Scaled, sum, batch=abs), section))
    assert _adapters(section, job) == []
    for other in ({"alpha": 4.0}, {"dropout": 0.5}, {"targets": ["out"]}):
        assert len(_adapters(section.model_copy(update=other), job)) == 1, other
