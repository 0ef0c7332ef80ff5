"""Read the few samples that are run before the first step, and check that every rank gets the same ones."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from shardwise.comm import Axis, gather_rows
from shardwise.dataset import name_of
from shardwise.errors import InputError, ShardwiseError
from shardwise.host import put
from shardwise.layout import Plan
from shardwise.layout.dealing import deal, enough_samples
from shardwise.random.reading_seeds import drawing
from shardwise.step.batching import samples_in, slice_samples
from shardwise.task import Task
from shardwise.task_names import where
from shardwise.trace.double import as_written

COSTLY_BYTES = 2**30
SAMPLES = 5  # samples run before the first step, at most


def check_data(task: Task) -> None:
    """Raises `InputError` if `Task.data` or `Task.eval_data` has no samples."""
    for field in ("data", "eval_data"):
        source = getattr(task, field)
        if source is not None and len(source) == 0:
            raise InputError(
                f"Task.{field} is empty: {name_of(source)} has no samples: look at the folder, pattern or filter that "
                "it reads by" + ("" if field == "data" else ", or leave it out")
            )


def has_samples(task: Task) -> bool:
    """Whether the task has samples to run; a script's model has none before its first call."""
    return task.batch is None or task.batch(0) is not None


def few_samples(task: Task, plan: Plan, world: Axis, device: torch.device) -> Any:
    """Returns all of `Task.batch(0)`, or the first `SAMPLES` of `Task.data`, the same on all ranks. Collective.

    Raises `InputError` if there are fewer samples than data ranks, if `Task.batch` depends on more than the step, or if
    ranks read different samples from `Task.data`.
    """
    if task.batch is not None:
        with as_written():
            batch, again = task.batch(0), task.batch(0)  # twice, since a generator of its own may advance
        _check_same(batch, again, world, device)
        count = samples_in(batch)
    else:
        assert task.data is not None
        check_data(task)
        count = len(task.data)
        indices = list(range(min(count, SAMPLES)))
        batch = read_samples(task, indices)
        _check_data_alike(task, indices, batch, world, device)
    enough_samples(count, plan)
    return batch


def read_samples(task: Task, indices: list[int]) -> Any:
    """Returns the batch of these samples of `Task.data`; raises `InputError` with the line that failed."""
    assert task.data is not None
    try:
        with as_written(), drawing(0, 0, 0):
            return task.data.read(indices)
    except ShardwiseError:
        raise
    except Exception as error:
        raise InputError(f"Task.data: reading samples {indices} failed: {where(error)}") from error


def a_few(batch: Any) -> Any:
    """Returns the first `SAMPLES` samples of a batch, or all if there are fewer."""
    return slice_samples(batch, 0, min(samples_in(batch), SAMPLES))


IN_WHOLE = "whole micro-batches are looked at"  # key in `Mesh.found`


def looked_at(batch: Any, plan: Plan, data_ranks: int, in_whole: bool) -> Any:
    """Returns the samples to run before the first step: a few, or with `in_whole` the first micro-batch.

    in_whole  whether the forward fails on few samples
    """
    return first_micro_batch(batch, plan, data_ranks) if in_whole else a_few(batch)


def first_micro_batch(batch: Any, plan: Plan, data_ranks: int) -> Any:
    """Returns the samples of all data ranks in the first micro-batch."""
    return slice_samples(batch, 0, deal(samples_in(batch), plan.step_microbatches, data_ranks, 0)[0][3])


def fewest_samples(task: Task, plan: Plan, batch: Any) -> int:
    """Returns 2 if `Task.batch` gives every rank at least two samples of each micro-batch, else 1.

    A forward may fail on a single sample (`squeeze()` without a dim), which matters only if a run gives it one.
    """
    if task.batch is None or samples_in(batch) < plan.step_microbatches:
        return 1  # with `Task.data` the run decides how many samples a step has
    dealt = [deal(samples_in(batch), plan.step_microbatches, plan.data_ranks, rank) for rank in range(plan.data_ranks)]
    return 2 if all(last - first > 1 for rank in dealt for first, last, _, _ in rank) else 1


def costly(batch: Any) -> list[str]:
    """Returns [a notice] for a global batch that takes much memory on every rank; else []."""
    size_bytes = sum(leaf.nbytes for leaf in tree_flatten(batch)[0] if hasattr(leaf, "nbytes"))
    if size_bytes <= COSTLY_BYTES:
        return []
    return [
        f"Task.batch makes {size_bytes / 2**30:.2g} GiB on every rank in each step, of which a rank uses its part: "
        "give Task.data (a Source, whose read(indices) a rank calls with its own samples)"
    ]


def repeated(batch: Any, times: list[int]) -> Any:
    """Returns the batch with sample i repeated `times[i]` times in a row."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.repeat_interleave(torch.tensor(times, device=leaf.device), 0)
        return leaf.repeat(times, 0) if isinstance(leaf, np.ndarray) and leaf.ndim else leaf

    return tree_map(of, batch)


def checksum_of(batch: Any) -> float:
    """Returns a 32-bit checksum of the bits of a batch's tensors, as a float."""
    check = 0
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            check = zlib.crc32(data.numpy(), check)
    return float(check)


def refuse_unlike(batch: Any, world: Axis, device: torch.device) -> None:
    """Raises `InputError` if ranks give different batches to `Engine.step`, which takes the global one. Collective."""
    table = gather_rows(put([checksum_of(batch)], device), world)
    if not _all_alike(table):
        raise InputError(
            "engine.step is given other batches on some ranks: it takes the whole batch of the step, alike on every "
            "rank, and deals out its samples by itself: make it from the step's number alone, and leave a rank's parts "
            "([rank::n], DistributedSampler) out"
        )


OTHER_SAMPLES = (
    "each process imports the task's file by itself: what it draws there without a seed, or reads of a folder that is "
    "its host's own, is another in each. Seed it (torch.manual_seed(0), numpy.random.default_rng(0)), or read it from "
    "files that all have"
)


def _check_data_alike(task: Task, indices: list[int], batch: Any, world: Axis, device: torch.device) -> None:
    """Raises `InputError` if ranks read different samples, each rank the same ones in two reads. Collective."""
    mine = checksum_of(batch)
    if world.size == 1 or _all_alike(gather_rows(put([mine], device), world)):
        return
    # a data set that reads at random, from a generator of its own, does not count as another one
    steady = float(checksum_of(read_samples(task, indices)) == mine)
    if bool(gather_rows(put([steady], device), world).all()):
        raise InputError(f"Task.data gives some ranks other samples than others: {OTHER_SAMPLES}")


def _all_alike(table: torch.Tensor) -> bool:
    return bool((table == table[0]).all())


def _check_same(batch: Any, again: Any, world: Axis, device: torch.device) -> None:
    """Raises `InputError` if `Task.batch(0)` differs between two calls, or between ranks. Collective."""
    # each call on each rank is compared with the first call on rank 0
    sums = [checksum_of(batch), checksum_of(again)]
    table = gather_rows(put(sums, device), world)
    if not bool((table == table[0, 0]).all()):
        where = "on one rank" if bool((table[:, 0] != table[:, 1]).any()) else "from rank to rank"
        raise InputError(
            f"Task.batch(0) differs from call to call {where}: every rank must make the same global batch from the "
            "step alone; draw from torch.Generator().manual_seed(step)"
        )
