"""A preallocated file of one rank as a tier, in two halves, which threads read and write with direct I/O.

    file    | half 0: sub-group 0 | 1 | 2 ... | half 1: sub-group 0 | 1 | 2 ... |

A step reads the half that has a sub-group's current state and writes the other; `commit` swaps their roles. Between
steps tensors lie in the mapped file, so that a checkpoint reads them like any other tensor, through the page cache. The
file's name is removed when it is open, so nothing is left of a run that is killed.

What this does not do: keep the state for another process (a checkpoint does), or detect a disk that returns other bytes
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
THREADS = 4  # number of requests in flight
LOST = (
    "Of the state before this step nothing is lost on the disk, and weights have moved on in memory: nothing is saved "
    "of this run from here on."
)


class StateFile(Place):
    """One preallocated file in a folder for temporary files, and three page-aligned buffers in host memory.

    size         bytes of the file, both halves
    moved_bytes  read and written in steps so far
    """

    name = "disk"

    def __init__(self, groups: Sequence[Subgroup], rank: int, folder: Path | None = None):
        """Makes the file and points `rest`, `after` and `buffer` of each group into it and its buffers.

        folder  None: that for temporary files. Raises `RefusedPlan` if it is not on a disk, or has no room for twice
        the state.
        """
        self.file = ScratchFile(rank, "state", LOST, folder)
        half = sum(group.size for group in groups)
        self.size = 2 * half
        self._reserve()
        self._map = mmap.mmap(self.file.fd, self.size)
        everything = torch.frombuffer(self._map, dtype=torch.uint8)
        at = 0
        sizes = [max((g.size for g in groups if g.number % BUFFERS == n), default=0) for n in range(BUFFERS)]
        self._memory = [mmap.mmap(-1, max(size, PAGE)) for size in sizes]
        self._offsets: dict[int, list[int]] = {}  # sub-group's index -> [offset to read, offset to write next]
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
        """Returns lines for the user on the file."""
        return self.file.notices

    def begin(self) -> None:
        """Drops pages of the file that were mapped between steps from memory; their content stays in the file."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def fetch(self, group: Subgroup) -> None:
        """Starts to read a sub-group's state into its buffer, after waiting for the buffer's last write."""
        self.wait_for(group)
        self._start(group, self.file.read, self._offsets[group.number][0])

    def wait_for(self, group: Subgroup) -> None:
        """Waits for reads and writes of the sub-group's buffer; raises the first error."""
        started = self._started[group.number % BUFFERS]
        while started:
            started.pop(0).result()

    def store(self, group: Subgroup) -> None:
        """Starts to write the sub-group's buffer into the half that does not have its current state."""
        self._start(group, self.file.write, self._offsets[group.number][1])

    def finish(self) -> None:
        """Waits for all reads and writes; raises the first error."""
        for started in self._started.values():
            while started:
                started.pop(0).result()

    def abandon(self) -> None:
        """Waits for all reads and writes, and ignores their errors."""
        wait([future for started in self._started.values() for future in started])
        for started in self._started.values():
            started.clear()

    def commit(self, groups: Sequence[Subgroup]) -> None:
        """Swaps the two halves of these sub-groups: what this step wrote is current now."""
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
        """Ends the threads and closes the file, whose room is free once no tensor lies in it."""
        self._pool.shutdown()
        self.file.close()
