"""`Job`: everything that ranks need to run a configuration, made and checked before any process is started.

Options that this task would not use are refused here, as `config` refuses those that no task would.
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
MOST_NAME = 100  # characters of a run's name, the limit of train.name too


@dataclass(frozen=True)
class Job:
    """A checked run, which is sent to every rank; it can be pickled if the task can."""

    effective: Effective
    task: Task | Callable[[], Task] | None  # None: found by its name on each rank
    name: str  # of the run, part of its folder's name
    steps: int  # optimizer steps of the whole run
    batch_samples: int  # samples of a global batch
    tokens_per_sample: int | None  # None: samples are not tokens
    lr: float | None  # None: the task's own optimizer is used
    lr_factor: float = 1.0  # multiplies the learning rates of the task's own optimizer
    launched: bool = False  # whether this program starts the ranks, whose output goes to files
    folder: Path = Path()  # of the run
    again: bool = False  # whether an earlier attempt failed, perhaps after its last step
    resume: str | None = None  # a checkpoint, or a folder of them, to resume from
    scheduled: int = 0  # steps that the learning-rate schedule is for; 0: those of the run
    proof: Any = None  # changes that a proof makes to this run (`proof/verify_run`); None: no proof

    @property
    def randomness(self) -> Literal["global", "fast"]:
        """Returns train.randomness; "fast" for a deterministic plan, whose RNGs are seeded alike on any ranks."""
        return (
            "fast"
            if self.effective.plan.deterministic and self.proof is None
            else self.effective.config.train.randomness
        )

    def build_task(self) -> Task:
        """Returns the task with the configured optimizer and adapters; raises as `resolve_task` does."""
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
    """Returns the `Job` of a run; raises `InputError` if the configuration does not fit the task.

    passed  a task, or a function that returns one, in place of the one that the configuration names; None: that one
    keep    Whether the rank runs in this process, and so uses the task that is built here
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
    # these checks raise here, before any rank is started
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
    """Returns a task's name for a folder's name: characters that train.name may not have become `-`."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:MOST_NAME] or "task"


def _check_device(device: str) -> None:
    if device not in ("auto", "cpu"):
        from shardwise.device import check_device

        check_device(device, "train.device", ' "auto" or')


def _check_options(effective: Effective, task: Task) -> None:
    """Raises `InputError` that names options that were set but that this task does not use."""
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
    """Whether a key of [train] was set to a value other than its default (a run's own config.toml sets every key)."""
    train, name = effective.config.train, key.removeprefix("train.")
    return effective.is_set(key) and getattr(train, name) != type(train).model_fields[name].default


def _batch_samples(effective: Effective, task: Task) -> int:
    """Returns how many samples a global batch has, by the task's own batch, batch_tokens or batch_samples."""
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
    """Returns `task.batch(step)`; an error of the user's code becomes a one-line `InputError`."""
    assert task.batch is not None
    try:
        return task.batch(step)
    except ShardwiseError:
        raise
    except Exception as error:
        hint = f". {LEAVE_OUT}" if of_a_device(error) else ""
        raise InputError(f"the task's batch({step}) failed: {where(error)}{hint}") from error


def _steps(effective: Effective, task: Task, batch: int) -> int:
    """Returns the number of steps of a run, from train.steps or train.epochs; `batch`: samples of a global batch."""
    train = effective.config.train
    if train.epochs is None:
        return train.steps or STEPS
    from shardwise.data import Loader

    assert task.data is not None
    loader = Loader(task.data, train.seed, batch, accumulate=effective.plan.step_microbatches, prefetch=0)
    # exact decimal arithmetic, since 1.1 * 100 is above 110 in binary
    return max(1, math.ceil(Fraction(str(train.epochs)) * loader.steps_per_epoch))


def _lr(effective: Effective, batch: int) -> float | None:
    """Returns the scaled learning rate for `batch` samples; None if the task's own optimizer is used."""
    return None if effective.own_optimizer else effective.config.optimizer.lr * _lr_factor(effective, batch)


def _lr_factor(effective: Effective, batch: int) -> float:
    optimizer, tokens = effective.config.optimizer, effective.config.train.batch_tokens
    return scaled_lr(1.0, tokens or batch, optimizer.base_batch or 1, optimizer.scale_lr)


def _optimizer_notes(effective: Effective, task: Task, batch: int) -> list[str]:
    """Returns notes for the user on how [optimizer] replaces or scales the task's own optimizer; [] if it does not."""
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
