"""Makes a rank's engine, loader and batches from a job, for training/loop and training/replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.data import Loader, own_tile
from shardwise.data.loader import order_of
from shardwise.engine.engine import Engine, parallelize
from shardwise.ranks.launchers import own_device
from shardwise.task import Task
from shardwise.training.job import Job, batch_of
from shardwise.training.learning_rates import make_schedule


def engine_of(job: Job, task: Task) -> Engine:
    """Returns the engine that `parallelize` makes with the run's configuration. Collective."""
    config = job.effective.config.train
    return parallelize(
        task,
        job.effective.plan,
        seed=config.seed,
        randomness=job.randomness,
        clip_norm=config.clip_norm,
        schedule=make_schedule(job.effective.config.schedule, job.scheduled or job.steps),
        on_nonfinite=config.on_nonfinite,
        device=own_device("cpu" if config.device == "cpu" else None),
    )


def loader_of(job: Job, task: Task, engine: Engine) -> Loader | None:
    """Returns the loader of this rank's parts, which the caller closes; None if the task makes its own batches."""
    if task.batch is not None:
        return None
    assert task.data is not None
    return Loader(
        own_tile(task.data, engine),
        order_of(task.data, job.effective.config.train.seed),
        job.batch_samples,
        accumulate=job.effective.plan.step_microbatches,
        data_rank=engine.data_rank,
        data_ranks=engine.data_ranks,
        workers=job.effective.config.train.workers,
    )


def batches_of(job: Job, task: Task, loader: Loader | None, first: int) -> Iterator[Any]:
    """Yields the batch of each step, as `Engine.step` takes it.

    loader   gives this rank's parts without end, from its present position; None: the task makes global batches, which
             are given from step `first` to the job's last
    """
    if loader is not None:
        return iter(loader)
    assert task.batch is not None
    return (batch_of(task, step) for step in range(first, job.steps))
