"""`Job`: a run settled before its start; `build_task`: the task as its configuration changes it, also for proofs.

What only the task can tell is checked here, before any process is started: options that this task would not use
are refused, as `config` refuses those that no task would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from shardwise.adapters import with_lora
from shardwise.config import Effective
from shardwise.errors import InputError, ShardwiseError
from shardwise.layout.dealing import enough_samples, micro_batches
from shardwise.look.samples import check_data
from shardwise.observe.profile_steps import read_steps
from shardwise.observe.sinks import check_sinks
from shardwise.ranks.process import refuse_beyond_memory
from shardwise.task import Task, default_optimizer
from shardwise.task_names import call_task, resolve_task, where
from shardwise.trace.deferred import LEAVE_OUT, of_a_device
from shardwise.training.learning_rates import make_schedule, scaled_lr
from shardwise.training.optimizer_section import make_optimizer, scaled

STEPS = 100
BATCH_SAMPLES = 32
MOST_NAME = 100  # letters of a run's name, as of train.name


@dataclass(frozen=True)
class Job:
    """The settled run that is sent to every rank; can be pickled when the task can."""

    effective: Effective
    task: Task | Callable[[], Task] | None  # None: found by its name on each rank
    name: str
    steps: int
    batch_samples: int
    tokens_per_sample: int | None
    lr: float | None  # None: the task's own optimizer
    lr_factor: float = 1.0  # on the learning rates of the task's own optimizer
    launched: bool = False  # the ranks are ours, their output goes to files
    folder: Path = Path()
    again: bool = False  # an attempt after another one: there may be nothing left but the end
    resume: str | None = None  # a checkpoint, or a folder of them, to go on from
    scheduled: int = 0  # steps that the schedule is for; 0: those of the run
    proof: Any = None  # what a proof of this run changes (`proof/verify_run`)

    @property
    def randomness(self) -> Literal["global", "fast"]:
        """Returns the configured value; "fast" for a deterministic plan, whose draws are seeded alike on any ranks."""
        return (
            "fast"
            if self.effective.plan.deterministic and self.proof is None
            else self.effective.config.train.randomness
        )

    def build_task(self) -> Task:
        """Returns the task with the optimizer that the configuration asks for; raises as `resolve_task` does."""
        task = find_task(self.effective, self.task)
        if self.lr is not None:
            task = task.with_(optimizer=make_optimizer(self.effective.config.optimizer, self.lr))
        elif self.lr_factor != 1:
            task = task.with_(optimizer=scaled(task.optimizer, self.lr_factor))
        return task if self.proof is None else self.proof.task(task)

    def with_(self, **changes: Any) -> Job:
        """Returns a copy with some fields replaced."""
        return replace(self, **changes)


def find_task(effective: Effective, passed: Task | Callable[[], Task] | None) -> Task:
    """Returns the task that was passed, or the one that the configuration names, with the adapters of [lora]."""
    return with_lora(_without_adapters(effective, passed), effective.config.lora)


def _without_adapters(effective: Effective, passed: Task | Callable[[], Task] | None) -> Task:
    section = effective.config.task
    return resolve_task(section.name, section) if passed is None else call_task(section.name, passed)


def make_job(effective: Effective, passed: Task | Callable[[], Task] | None = None, *, keep: bool = False) -> Job:
    """Returns the `Job` of a run; raises `InputError` where the configuration does not fit the task.

    passed  the task, where it is not the one that the configuration names
    keep    the ranks run in this process, so the task that was built here is theirs
    """
    plain = _without_adapters(effective, passed)
    task = with_lora(plain, effective.config.lora)
    _check_device(effective.config.train.device)
    _check_options(effective, task)
    refuse_beyond_memory(effective.config.train.workers, "workers of each rank (train.workers)", "give fewer")
    check_sinks(list(effective.config.train.sinks))
    asked = _batch_samples(effective, task)
    # a batch larger than the data would take samples twice in one step
    batch = asked if task.data is None else min(asked, max(len(task.data), 1))
    if batch < asked:
        said = f"the data have {batch} samples, fewer than a batch of {asked}: every step takes all {batch}"
        effective = replace(effective, notes=(*effective.notes, said))
    # what follows is checked here, before any rank is started
    steps = _steps(effective, task, batch)
    check_data(task)
    enough_samples(batch if task.data is None else len(task.data), effective.plan)
    micro_batches(batch, effective.plan.step_microbatches)
    make_schedule(effective.config.schedule, steps)
    of_data = getattr(task.data, "notices", ())
    effective = replace(effective, notes=(*effective.notes, *of_data, *_optimizer_notes(effective, task, batch)))
    read_steps(effective.config.train.profile_steps, steps)
    tokens = effective.config.task.seq_len if effective.config.task.name == "text" else None
    return Job(
        effective=effective,
        task=plain if keep else passed,
        name=effective.config.train.name or _as_name(task.name),
        steps=steps,
        batch_samples=batch,
        tokens_per_sample=tokens,
        lr=_lr(effective, batch),
        lr_factor=_lr_factor(effective, batch) if effective.own_optimizer else 1.0,
    )


def _as_name(name: str) -> str:
    """Returns a task's name as part of a folder's: signs that train.name may not have become `-`."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:MOST_NAME] or "task"


def _check_device(device: str) -> None:
    if device not in ("auto", "cpu"):
        from shardwise.device import check_device

        check_device(device, "train.device", ' "auto" or')


def _check_options(effective: Effective, task: Task) -> None:
    """Raises `InputError` for options that were set and that this task does not use."""
    problems = []
    if task.batch is not None:
        # a task that makes its own batches has neither a size nor an end
        for key, why in (
            ("train.batch_samples", "it makes its own batches (`batch`)"),
            ("train.epochs", "it has no end (`batch`): give train.steps"),
            ("train.workers", "its batches are made by `batch`, in the rank itself"),
        ):
            if _chosen(effective, key):
                problems.append(f"{effective.source(key)}: {key} would have no effect on this task: {why}")
    # without held-out data nothing is evaluated
    if task.eval_data is None:
        for key in ("train.eval_every", "train.eval_samples"):
            if _chosen(effective, key):
                problems.append(f"{effective.source(key)}: {key} would have no effect: the task has no `eval_data`")
    if problems:
        raise InputError("\n".join(problems))


def _chosen(effective: Effective, key: str) -> bool:
    """Whether a key of [train] was set to another value than its default: a run's own config.toml has every key."""
    train, name = effective.config.train, key.removeprefix("train.")
    return effective.is_set(key) and getattr(train, name) != type(train).model_fields[name].default


def _batch_samples(effective: Effective, task: Task) -> int:
    """Returns the samples of a global batch, by the configuration or the task's own; `InputError` for an empty one."""
    train = effective.config.train
    if task.batch is not None:
        from shardwise.step.batching import samples_in

        samples = samples_in(batch_of(task, 0))
        if samples == 0:
            raise InputError("the task's batch(0) is empty: its tensors have 0 samples along their first dimension")
        return samples
    if train.batch_tokens is not None:
        assert effective.config.task.seq_len is not None
        return train.batch_tokens // effective.config.task.seq_len
    return train.batch_samples or BATCH_SAMPLES


def batch_of(task: Task, step: int) -> Any:
    """Returns the task's batch of a step; an error of the user's code becomes a one-line `InputError`."""
    assert task.batch is not None
    try:
        return task.batch(step)
    except ShardwiseError:
        raise
    except Exception as error:
        hint = f". {LEAVE_OUT}" if of_a_device(error) else ""
        raise InputError(f"the task's batch({step}) failed: {where(error)}{hint}") from error


def _steps(effective: Effective, task: Task, batch: int) -> int:
    """Returns the steps of a run: as given, or those of its epochs."""
    train = effective.config.train
    if train.epochs is None:
        return train.steps or STEPS
    from shardwise.data import Loader

    assert task.data is not None
    loader = Loader(task.data, train.seed, batch, accumulate=effective.plan.step_microbatches, prefetch=0)
    # of the number as it was written: 1.1 times 100 is above 110 in binary
    return max(1, math.ceil(Fraction(str(train.epochs)) * loader.steps_per_epoch))


def _lr(effective: Effective, batch: int) -> float | None:
    """Returns the learning rate for this batch size; None where the task's own optimizer runs."""
    return None if effective.own_optimizer else effective.config.optimizer.lr * _lr_factor(effective, batch)


def _lr_factor(effective: Effective, batch: int) -> float:
    optimizer, tokens = effective.config.optimizer, effective.config.train.batch_tokens
    return scaled_lr(1.0, tokens or batch, optimizer.base_batch or 1, optimizer.scale_lr)


def _optimizer_notes(effective: Effective, task: Task, batch: int) -> list[str]:
    """Returns notes on what [optimizer] changes of the task's own optimizer."""
    section = effective.config.optimizer
    if effective.builtin or task.optimizer is default_optimizer:
        return []
    if not effective.own_optimizer:
        lr = _lr(effective, batch)
        return [
            f"[optimizer] replaces the task's own optimizer by {section.name} with lr {lr:.3g}: leave the section out "
            "to keep it"
        ]
    if section.scale_lr == "none":
        return []
    of = f"{section.scale_lr}, a batch of {effective.config.train.batch_tokens or batch} over {section.base_batch}"
    return [
        f"the learning rates of the task's own optimizer are multiplied by {_lr_factor(effective, batch):.3g} ({of})"
    ]
