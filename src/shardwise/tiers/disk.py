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
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from shardwise.errors import RefusedPlan, RunError
from shardwise.tiers.places import Place
from shardwise.tiers.subgroups import PAGE, Subgroup

REQUEST_BYTES = 4 << 20  # of one read or write
THREADS = 4  # requests in flight
BUFFERS = 3  # one is read into, one is stepped on, one is written
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class StateFile(Place):
    """One preallocated file in a folder for temporary files, and three buffers at pages' borders."""

    name = "disk"

    def __init__(self, groups: Sequence[Subgroup], rank: int, folder: Path | None = None):
        """Raises `RefusedPlan` for a folder that is no disk, or has no room for twice the state."""
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.path = self.folder / f"shardwise-{os.getpid()}-rank{rank}.state"
        _refuse_memory(self.folder)
        half = sum(group.size for group in groups)
        self.size = 2 * half
        self.direct = True
        self._fd = self._opened()
        self._close = weakref.finalize(self, os.close, self._fd)
        self._map = mmap.mmap(self._fd, self.size)
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

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        direct = getattr(os, "O_DIRECT", 0)
        try:
            try:
                fd = os.open(self.path, flags | direct, 0o600)
            except OSError:
                self.path.unlink(missing_ok=True)  # refused after it was made
                fd, direct = os.open(self.path, flags, 0o600), 0
        except OSError as error:
            raise RefusedPlan(f"offload to disk: no file in {self.folder}: {error.strerror}: {_ELSEWHERE}") from error
        self.direct = bool(direct)
        os.unlink(self.path)
        try:
            os.posix_fallocate(fd, 0, self.size)
        except OSError as error:
            os.close(fd)
            raise RefusedPlan(
                f"offload to disk: {self.folder} has no room for {self.size / 1e9:.3g} GB, twice this rank's state "
                f"({error.strerror}): {_ELSEWHERE}"
            ) from error
        return fd

    @property
    def notices(self) -> list[str]:
        """Returns what the user is told of the file."""
        if self.direct:
            return []
        return [
            f"offload to disk: the file system of {self.folder} takes no direct reads and writes (O_DIRECT), which go "
            "through the page cache: the host's memory fills, and a step may wait longer"
        ]

    def begin(self) -> None:
        """Unmap pages that were read between steps; their content stays in the file."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def fetch(self, group: Subgroup) -> None:
        """Start to read what rests of a sub-group into its buffer, once that is written."""
        self.wait_for(group)
        self._start(group, self._read, self._offsets[group.number][0])

    def wait_for(self, group: Subgroup) -> None:
        """Wait for reads and writes of the sub-group's buffer."""
        started = self._started[group.number % BUFFERS]
        while started:
            started.pop(0).result()

    def store(self, group: Subgroup) -> None:
        """Start to write the buffer into the half in which the sub-group does not rest."""
        self._start(group, self._write, self._offsets[group.number][1])

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

    def _read(self, part: memoryview, offset: int) -> None:
        self._move(os.preadv, "read", part, offset)

    def _write(self, part: memoryview, offset: int) -> None:
        self._move(os.pwritev, "write", part, offset)

    def _move(self, call: Callable[[int, list[memoryview], int], int], verb: str, part: memoryview, start: int) -> None:
        done = 0
        while done < len(part):
            try:
                moved = call(self._fd, [part[done:]], start + done)
            except OSError as error:
                raise self._lost(verb, len(part) - done, start + done, error.strerror or str(error)) from error
            if moved <= 0:
                raise self._lost(verb, len(part) - done, start + done, "the disk gave no more bytes")
            done += moved

    def _lost(self, verb: str, size: int, offset: int, why: str) -> RunError:
        return RunError(
            f"offload to disk: cannot {verb} {size} bytes at offset {offset} of {self.path}: {why}. Of the state "
            "before this step nothing is lost on the disk, and weights have moved on in memory: nothing is saved of "
            f"this run from here on. Look at the disk, or {_ELSEWHERE}, and go on from the last checkpoint"
        )

    def close(self) -> None:
        """End the threads, and give the file's room back once no tensor lies in it."""
        self._pool.shutdown()
        self._close()


_ELSEWHERE = "let TMPDIR name a folder on a local disk with room"


def _refuse_memory(folder: Path) -> None:
    """Raise `RefusedPlan` for a folder that lies in memory."""
    kind = file_system(folder)
    if kind in IN_MEMORY:
        raise RefusedPlan(f"offload to disk: {folder} is {kind}, which lies in the host's memory: {_ELSEWHERE}")


def file_system(folder: Path) -> str:
    """Returns the kind of file system of a folder, as Linux tells it; "" elsewhere."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    real, best, kind = os.path.realpath(folder), -1, ""
    for line in lines:
        _, mount, this, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if os.path.commonpath([real, mount]) == mount and len(mount) >= best:
            best, kind = len(mount), this
    return kind
