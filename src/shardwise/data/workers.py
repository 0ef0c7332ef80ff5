"""Reads steps in worker processes, through torch's `DataLoader`, whose "samples" are whole steps.

    loader      steps 7, 8, 9, 10, ...  ->  worker 0 reads 7, worker 1 reads 8, worker 2 reads 9, worker 0 ...
    consumer    7, 8, 9, 10, in order, whichever was read first

A step is a function of its positions, so order and place in the data do not depend on the number of workers, nor do
random draws (`random.reading_seeds`).

What this does not do: share memory with the workers; parts come as bytes, since /dev/shm is small in many containers.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardwise.data.steps import Steps
from shardwise.errors import RunError, ShardwiseError
from shardwise.layout.dealing import Share
from shardwise.ranks.pool_messages import dumps

PRELOAD = ["torch", "shardwise.data.workers"]


@dataclass
class _Reader:
    """A dataset for `DataLoader` whose items are steps: item (start, stop) is the pickled step at those positions."""

    steps: Steps

    def __len__(self) -> int:
        return self.steps.order.length

    def __getitem__(self, span: tuple[int, int]) -> bytes:
        start, stop = span
        try:
            parts, self.steps = self.steps.read(start, stop)
        except ShardwiseError as error:  # sent back whole, since DataLoader would wrap it in a worker's traceback
            return dumps((None, stop, error))
        return dumps((parts, stop, None))


class _Spans:
    """A sampler that iterates positions (start, stop) of steps from `position` on, up to `end` (None: endlessly)."""

    def __init__(self, steps: Steps, position: int, end: int | None) -> None:
        self.steps, self.position, self.end = steps, position, end

    def __iter__(self) -> Iterator[tuple[int, int]]:
        start, stop = self.steps.span(self.position)
        while self.end is None or stop <= self.end:
            yield start, stop
            start, stop = self.steps.span(stop)


def read_in_workers(
    steps: Steps, position: int, end: int | None, *, workers: int, ahead: int
) -> Iterator[tuple[list[Share], int]]:
    """Yields (parts, position after them) of each step from `position` up to `end` (None: endlessly).

    workers   number of processes that read; `ahead`: steps that each of them reads in advance

    Raises an error of shardwise from a read as it is, and `RunError` if a worker fails otherwise.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    loader: Any = DataLoader(
        _Reader(steps),
        sampler=_Spans(steps, position, end),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=max(1, ahead),
        multiprocessing_context=context,
        # no timeout here: torch would look for dead workers only when it is over. `Prefetch` has a deadline
        timeout=0,
        worker_init_fn=_ends_for_its_rank,
        generator=torch.Generator().manual_seed(0),  # the script's own generator is left alone
        collate_fn=_as_it_is,
    )
    batches = iter(loader)
    try:
        while True:
            try:
                packed = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                raise RunError(f"a worker that reads {type(steps.source).__name__} failed: {error}") from error
            parts, stop, problem = pickle.loads(packed)
            if problem is not None:
                raise problem
            yield parts, stop
    finally:
        batches._shutdown_workers()


def _ends_for_its_rank(worker: int) -> None:
    """Makes SIGTERM end this worker only if its own rank sent it.

    A SIGTERM to the whole process group asks ranks to save first, for which they still need their workers.
    """
    rank = multiprocessing.parent_process()
    if rank is None or not hasattr(signal, "sigwaitinfo"):  # macOS tells no sender
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def listen() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid:
            pass
        os._exit(0)

    threading.Thread(target=listen, name="end-with-rank", daemon=True).start()


def _as_it_is(packed: bytes) -> bytes:
    return packed
