"""A file of one rank as a tier: preallocated, two halves, read and written past the page cache by a pool of threads.

    file    | half 0: sub-group 0 | 1 | 2 ... | half 1: sub-group 0 | 1 | 2 ... |

A step reads the half in which a sub-group rests and writes the other; `commit` lets them change places. Between steps
tensors lie in the mapped file, so that a checkpoint, a proof or a digest reads them as any other, through the page
cache. The file has no name once it is open: nothing is left of a run that is killed.

What this does not do: keep the state for another process (a checkpoint does), or survive a disk that gives other bytes
than were written.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from shardwise.errors import RefusedPlan
from shardwise.tiers.places import Place
from shardwise.tiers.scratch import ELSEWHERE, ScratchFile
from shardwise.tiers.subgroups import BUFFERS, PAGE, Subgroup

REQUEST_BYTES = 4 << 20  # of one read or write
THREADS = 4  # requests in flight
LOST = (
    "Of the state before this step nothing is lost on the disk, and weights have moved on in memory: nothing is saved "
    "of this run from here on."
)


class StateFile(Place):
    """One preallocated file in a folder for temporary files, and three buffers at pages' borders."""

    name = "disk"

    def __init__(self, groups: Sequence[Subgroup], rank: int, folder: Path | None = None):
        """Raises `RefusedPlan` for a folder that is no disk, or has no room for twice the state."""
        self.file = ScratchFile(rank, "state", LOST, folder)
        half = sum(group.size for group in groups)
        self.size = 2 * half
        self._reserve()
        self._map = mmap.mmap(self.file.fd, self.size)
        everything = torch.frombuffer(self._map, dtype=torch.uint8)
        at = 0
        sizes = [max((g.size for g in groups if g.number % BUFFERS == n), default=0) for n in range(BUFFERS)]
        self._memory = [mmap.mmap(-1, max(size, PAGE)) for size in sizes]
        self._offsets: dict[int, list[int]] = {}  # of each sub-group: where it rests, and where the next step puts it
        for group in groups:
            group.rest, group.after = (everything[at + start :][: group.size] for start in (0, half))
            self._offsets[group.number] = [at, at + half]
            group.buffer = torch.frombuffer(self._memory[group.number % BUFFERS], dtype=torch.uint8)[: group.size]
            at += group.size
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="shardwise-tier")
        self._started: dict[int, list[Future[None]]] = {number: [] for number in range(BUFFERS)}
        self.moved_bytes = 0

    def _reserve(self) -> None:
        try:
            self.file.reserve(0, self.size)
        except OSError as error:
            self.file.close()
            raise RefusedPlan(
                f"offload to disk: {self.file.folder} has no room for {self.size / 1e9:.3g} GB, twice this rank's "
                f"state ({error.strerror}): {ELSEWHERE}"
            ) from error

    @property
    def notices(self) -> list[str]:
        """Returns what the user is told of the file."""
        return self.file.notices

    def begin(self) -> None:
        """Unmap pages that were read between steps; their content stays in the file."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def fetch(self, group: Subgroup) -> None:
        """Start to read what rests of a sub-group into its buffer, once that is written."""
        self.wait_for(group)
        self._start(group, self.file.read, self._offsets[group.number][0])

    def wait_for(self, group: Subgroup) -> None:
        """Wait for reads and writes of the sub-group's buffer; raises the first error."""
        started = self._started[group.number % BUFFERS]
        while started:
            started.pop(0).result()

    def store(self, group: Subgroup) -> None:
        """Start to write the buffer into the half in which the sub-group does not rest."""
        self._start(group, self.file.write, self._offsets[group.number][1])

    def finish(self) -> None:
        """Wait for all reads and writes; raises the first error."""
        for started in self._started.values():
            while started:
                started.pop(0).result()

    def abandon(self) -> None:
        """Wait for all reads and writes, whatever came of them."""
        wait([future for started in self._started.values() for future in started])
        for started in self._started.values():
            started.clear()

    def commit(self, groups: Sequence[Subgroup]) -> None:
        """Let the halves of these sub-groups change places."""
        for group in groups:
            group.rest, group.after = group.after, group.rest
            self._offsets[group.number].reverse()

    def _start(self, group: Subgroup, move: Callable[[memoryview, int], None], offset: int) -> None:
        memory = memoryview(self._memory[group.number % BUFFERS])
        for start in range(0, group.size, REQUEST_BYTES):
            part = memory[start : min(start + REQUEST_BYTES, group.size)]
            self._started[group.number % BUFFERS].append(self._pool.submit(move, part, offset + start))
        self.moved_bytes += group.size

    def close(self) -> None:
        """End the threads, and give the file's room back once no tensor lies in it."""
        self._pool.shutdown()
        self.file.close()
