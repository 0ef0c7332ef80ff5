"""Shards of weights in a memory-mapped file: `offload=parameters:disk` under zero=3.

    all-gather of unit k   its pages are read while k - 1 computes; copied into the all-gather; unmapped
    update                 sub-group by sub-group: pages are read one ahead, changed in place, unmapped, written

A shard stays a CPU tensor, whose memory is the mapped file. So all-gathers, the optimizer and checkpoints read and
write it like any other; this class only decides when its pages are read and unmapped. Unmapped pages do not count as
the process's memory. The kernel keeps them in the page cache while it has room, so that it reads the disk less often.

Units are gathered in the order of the micro-batch before, so the next one is predicted from the last two.

What this does not do: support accelerators, whose all-gathers would wait for the disk; or restore the weights if an
update fails.
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

# MADV_POPULATE_*: advice to read pages in, of Linux 5.14 (asm-generic/mman-common.h); Python's mmap has no names
POPULATE_READ, POPULATE_WRITE = 22, 23
LOST = "Weights belong to different steps: nothing is saved of this run from here on."

Extent = tuple[int, int]  # [start, end) in the file, in bytes, page-aligned


class ShardFile:
    """A file of one rank with the shards of some FSDP2 units.

    memory       for each unit, a flat tensor in the file for each of its shards
    size         bytes of the file;  moved_bytes  read so far
    """

    name = "disk"

    def __init__(self, shards: Sequence[Sequence[torch.Tensor]], rank: int, folder: Path | None = None):
        """Makes the file. shards: for each unit, flat tensors, whose sizes and dtypes are used, not their values.

        Raises `RefusedPlan` if the folder (None: that for temporary files) is not on a disk, or has no room.
        """
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
        self._coming: dict[Any, Future[None]] = {}  # reads under way, by unit or id of a parameter
        self._writing: list[Future[None]] = []
        self._next: dict[tuple[int, int], int] = {}  # (unit, next unit) -> unit gathered after these two
        self._last = (-1, -1)  # the last two units gathered
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
        """Returns {"disk": bytes of the file}."""
        return {self.name: self.size}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the file."""
        return 0 <= tensor.data_ptr() - self._start < self.size and tensor.numel() > 0

    # --- all-gathers

    def before_gather(self, unit: int) -> None:
        """Makes a unit's shards resident, if they were not read ahead; `RunError` if the disk fails."""
        self._arrived(unit, self.memory[unit], POPULATE_READ)

    def after_gather(self, unit: int) -> None:
        """Unmaps a unit's shards, and starts to read those of the unit that is predicted to come next."""
        self._forget(self._extents(self.memory[unit]))
        self._next[self._last] = unit
        self._last = (self._last[1], unit)
        ahead = self._next.get(self._last)
        if ahead is not None:
            self._start_to_read(ahead, self.memory[ahead], POPULATE_READ)

    # --- updates

    def let_go(self) -> None:
        """Unmaps all pages."""
        self._forget([(0, self.size)])

    def fetch(self, params: Sequence[torch.Tensor]) -> None:
        """Starts to read the pages of parameters that will be updated."""
        self._start_to_read(id(params[0]), params, POPULATE_WRITE)

    def wait_for(self, params: Sequence[torch.Tensor]) -> None:
        """Waits until parameters that were fetched are resident; `RunError` if the disk fails."""
        self._arrived(id(params[0]), params, POPULATE_WRITE)

    def store(self, params: Sequence[torch.Tensor]) -> None:
        """Starts to write the pages of updated parameters, and unmaps them."""
        if extents := self._extents(params):
            self._forget(extents)
            self._writing.append(self._pool.submit(self._write))

    def finish(self) -> None:
        """Waits until all is written; raises the first error."""
        while self._writing:
            self._writing.pop(0).result()

    def abandon(self) -> None:
        """Waits for all reads and writes, and ignores errors."""
        wait([*self._writing, *self._coming.values()])
        self._writing.clear()
        self._coming.clear()

    def close(self) -> None:
        """Ends the threads and closes the file, whose room is free once no tensor lies in it."""
        self._pool.shutdown()
        self.file.close()

    # --- pages

    def _start_to_read(self, key: Any, tensors: Iterable[torch.Tensor], how: int) -> None:
        """Starts to read the tensors' pages, once for a `key`. `how`: POPULATE_READ or POPULATE_WRITE."""
        if key not in self._coming:
            self._coming[key] = self._pool.submit(self._read, self._extents(tensors), how)

    def _arrived(self, key: Any, tensors: Iterable[torch.Tensor], how: int) -> None:
        """Waits for the read that was started under `key`, or reads now."""
        coming = self._coming.pop(key, None)
        if coming is not None:
            coming.result()
        else:
            self._read(self._extents(tensors), how)

    def _extents(self, tensors: Iterable[torch.Tensor]) -> list[Extent]:
        """Returns the extents of whole pages that contain the tensors, adjacent ones merged."""
        runs: list[Extent] = []
        for tensor in tensors:
            if not self.holds(tensor):
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
            self._advise(first, last, mmap.MADV_WILLNEED)  # queues all requests at once, unlike page faults
            failed = self._advise(first, last, how)
            if failed not in (0, errno.EINVAL):  # EINVAL: an older kernel, where the first access reads
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
            self._advise(first, last, mmap.MADV_DONTNEED)  # changes stay in the page cache, as the mapping is shared

    def _advise(self, first: int, last: int, how: int) -> int:
        """Calls madvise on [first, last) of the mapping with the advice `how`; returns 0 or the errno."""
        return _madvise()(self._start + first, last - first, how)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """Returns a function (address, size, advice) -> 0 or errno that calls madvise without holding Python's lock."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def call(start: int, size: int, how: int) -> int:
        return ctypes.get_errno() if library.madvise(start, size, how) else 0

    return call


def _alone(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a flat tensor like `like` on the bytes of `memory` from `offset` on, with a storage of that size only."""
    size = like.numel() * like.element_size()
    return torch.from_numpy(memory.numpy()[offset : offset + size]).view(like.dtype)


def _up(size: int, unit: int) -> int:
    """Returns `size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit
