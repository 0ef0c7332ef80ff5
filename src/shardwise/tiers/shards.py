"""Shards of weights in a mapped file: what `offload=parameters:disk` moves under zero=3.

    gather of unit k    its pages are read while k - 1 computes; copied into the gather; unmapped
    update              sub-group by sub-group: pages are read one ahead, changed in place, unmapped, written

A shard stays a tensor of the host's, whose memory is the file's: gathers, the optimizer, checkpoints and digests read
and write it as any other. This says when its pages come and go. What is unmapped is no part of the process's memory;
the kernel keeps it in the page cache as long as it has room to spare, so a machine with memory reads less.

Units are gathered in the order of the micro-batch before, so the next one is known from the last two.

What this does not do: lie on a disk for a device that is not the host's processor, whose gathers would wait for its
link; keep the weights before a step, which like those in memory have moved on where an update fails.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import RefusedPlan
from shardwise.tiers.scratch import ELSEWHERE, ScratchFile
from shardwise.tiers.subgroups import LINE, PAGE

POPULATE_READ, POPULATE_WRITE = 22, 23  # Linux 5.14, asm-generic/mman-common.h; Python's mmap has no names for them
LOST = "Weights belong to different steps: nothing is saved of this run from here on."

Extent = tuple[int, int]  # start and end in the file, at pages' borders


class ShardFile:
    """One file of a rank, in which the shards of some units lie. Made by `engine/moved_parameters`.

    memory  of each unit, that of its shards
    """

    name = "disk"

    def __init__(self, shards: Sequence[Sequence[torch.Tensor]], rank: int, folder: Path | None = None):
        """shards: of each unit, flat. Raises `RefusedPlan` for a folder that is no disk, or has no room."""
        self.file = ScratchFile(rank, "parameters", LOST, folder)
        offsets: list[list[int]] = []
        size = 0
        for unit in shards:
            offsets.append([])
            for shard in unit:
                offsets[-1].append(size)
                size += _up(shard.numel() * shard.element_size(), LINE)
        self.size = _up(max(size, 1), PAGE)
        self._reserve()
        self._map = mmap.mmap(self.file.fd, self.size)
        everything = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start = everything.data_ptr()
        self.memory = [
            [_alone(everything, at, shard) for at, shard in zip(places, unit, strict=True)]
            for places, unit in zip(offsets, shards, strict=True)
        ]
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="shardwise-tier")  # one reads, one writes
        self._coming: dict[Any, Future[None]] = {}
        self._writing: list[Future[None]] = []
        self._next: dict[tuple[int, int], int] = {}  # unit gathered after these two
        self._last = (-1, -1)
        self.moved_bytes = 0

    def _reserve(self) -> None:
        try:
            self.file.reserve(0, self.size)
        except OSError as error:
            self.file.close()
            raise RefusedPlan(
                f"offload to disk: {self.file.folder} has no room for {self.size / 1e9:.3g} GB, this rank's "
                f"weights ({error.strerror}): {ELSEWHERE}"
            ) from error

    def held_bytes(self) -> dict[str, int]:
        """Returns the file's bytes, by the tier's name."""
        return {self.name: self.size}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the file."""
        return 0 <= tensor.data_ptr() - self._start < self.size and tensor.numel() > 0

    # --- gathers

    def before_gather(self, unit: int) -> None:
        """Have a unit's shards in memory: read ahead, or now; `RunError` where the disk fails."""
        self._arrived(unit, self.memory[unit], POPULATE_READ)

    def after_gather(self, unit: int) -> None:
        """Let go of a unit's shards, and start to read what was gathered next the last time."""
        self._forget(self._extents(self.memory[unit]))
        self._next[self._last] = unit
        self._last = (self._last[1], unit)
        ahead = self._next.get(self._last)
        if ahead is not None:
            self._start_to_read(ahead, self.memory[ahead], POPULATE_READ)

    # --- updates

    def let_go(self) -> None:
        """Let go of all pages."""
        self._forget([(0, self.size)])

    def fetch(self, params: Sequence[torch.Tensor]) -> None:
        """Start to read parameters that will be changed."""
        self._start_to_read(id(params[0]), params, POPULATE_WRITE)

    def wait_for(self, params: Sequence[torch.Tensor]) -> None:
        """Wait until parameters that were fetched are there; `RunError` where the disk fails."""
        self._arrived(id(params[0]), params, POPULATE_WRITE)

    def store(self, params: Sequence[torch.Tensor]) -> None:
        """Start to write parameters that were changed, and let go of them."""
        if extents := self._extents(params):
            self._forget(extents)
            self._writing.append(self._pool.submit(self._write))

    def finish(self) -> None:
        """Wait until all is written; raises the first error."""
        while self._writing:
            self._writing.pop(0).result()

    def abandon(self) -> None:
        """Wait for all that was started, whatever came of it."""
        wait([*self._writing, *self._coming.values()])
        self._writing.clear()
        self._coming.clear()

    def close(self) -> None:
        """End the threads, and give the file's room back once no tensor lies in it."""
        self._pool.shutdown()
        self.file.close()

    # --- pages

    def _start_to_read(self, key: Any, tensors: Iterable[torch.Tensor], how: int) -> None:
        if key not in self._coming:
            self._coming[key] = self._pool.submit(self._read, self._extents(tensors), how)

    def _arrived(self, key: Any, tensors: Iterable[torch.Tensor], how: int) -> None:
        coming = self._coming.pop(key, None)
        if coming is not None:
            coming.result()
        else:
            self._read(self._extents(tensors), how)

    def _extents(self, tensors: Iterable[torch.Tensor]) -> list[Extent]:
        """Returns the runs of whole pages in which tensors lie, those beside each other as one."""
        runs: list[Extent] = []
        for tensor in tensors:
            if not self.holds(tensor):  # it lies in other memory than the file's
                continue
            first = (tensor.data_ptr() - self._start) // PAGE * PAGE
            last = _up(tensor.data_ptr() - self._start + tensor.numel() * tensor.element_size(), PAGE)
            if runs and runs[-1][0] <= first <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
            else:
                runs.append((first, last))
        return runs

    def _read(self, extents: list[Extent], how: int) -> None:
        for first, last in extents:
            self._advise(first, last, mmap.MADV_WILLNEED)  # all requests at once; touches would make one after another
            failed = self._advise(first, last, how)
            if failed not in (0, errno.EINVAL):  # EINVAL: an older kernel, where the first touch reads
                why = "the disk gave no bytes" if failed == errno.EFAULT else os.strerror(failed)
                raise self.file.error("read", last - first, first, why)
            self.moved_bytes += last - first

    def _write(self) -> None:
        try:
            os.fdatasync(self.file.fd)
        except OSError as error:
            raise self.file.error("write", self.size, 0, error.strerror or str(error)) from error

    def _forget(self, extents: list[Extent]) -> None:
        for first, last in extents:
            self._advise(first, last, mmap.MADV_DONTNEED)  # of a file that is shared: nothing is lost

    def _advise(self, first: int, last: int, how: int) -> int:
        """Returns 0, or what the kernel says is wrong."""
        return _madvise()(self._start + first, last - first, how)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """Returns the system's call, which unlike Python's lets other threads run meanwhile; it gives an error's number."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def call(start: int, size: int, how: int) -> int:
        return ctypes.get_errno() if library.madvise(start, size, how) else 0

    return call


def _alone(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like another, flat, on the bytes from `offset` on; its storage ends where it does."""
    size = like.numel() * like.element_size()
    return torch.from_numpy(memory.numpy()[offset : offset + size]).view(like.dtype)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
