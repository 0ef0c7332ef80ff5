"""A file without a name in the folder for temporary files: made room for, read and written past the page cache.

Used by a rank's state between steps (`disk`), its weights (`shards`) and what its blocks keep for backward (`stores`).
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from shardwise.errors import RefusedPlan, RunError

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
ELSEWHERE = "let TMPDIR name a folder on a local disk with room"


class ScratchFile:
    """One file; nothing is left of it once the process has ended.

    lost    what an error of a read or write means for the run, and what to do
    direct  whether it is read and written past the page cache
    """

    def __init__(self, rank: int, suffix: str, lost: str, folder: Path | None = None, direct: bool = True):
        """direct: past the page cache, where that can be. Raises `RefusedPlan` for a folder that is no disk."""
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.path = self.folder / f"shardwise-{os.getpid()}-rank{rank}.{suffix}"
        self.lost = lost
        refuse_memory(self.folder)
        self.fd, self.direct = self._opened(getattr(os, "O_DIRECT", 0) if direct else 0)
        os.unlink(self.path)
        self.close = weakref.finalize(self, os.close, self.fd)

    def _opened(self, direct: int) -> tuple[int, bool]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            try:
                return os.open(self.path, flags | direct, 0o600), bool(direct)
            except OSError:
                self.path.unlink(missing_ok=True)  # refused after it was made
                return os.open(self.path, flags, 0o600), False
        except OSError as error:
            raise RefusedPlan(f"offload to disk: no file in {self.folder}: {error.strerror}: {ELSEWHERE}") from error

    def reserve(self, start: int, size: int) -> None:
        """Make room for bytes from `start` on; raises `OSError`."""
        os.posix_fallocate(self.fd, start, size)

    @property
    def notices(self) -> list[str]:
        """Returns what the user is told of the file."""
        if self.direct:
            return []
        return [
            f"offload to disk: the file system of {self.folder} takes no direct reads and writes (O_DIRECT), which go "
            "through the page cache: the host's memory fills, and a step may wait longer"
        ]

    def read(self, part: memoryview, offset: int) -> None:
        """Fill `part` from byte `offset`; where `direct`, memory, size, offset are whole pages. Raises `RunError`."""
        self._move(os.preadv, "read", part, offset)

    def write(self, part: memoryview, offset: int) -> None:
        """Put `part` at byte `offset`; where `direct`, memory, size, offset are whole pages. Raises `RunError`."""
        self._move(os.pwritev, "write", part, offset)

    def _move(self, call: Callable[[int, list[memoryview], int], int], verb: str, part: memoryview, start: int) -> None:
        done = 0
        while done < len(part):
            try:
                moved = call(self.fd, [part[done:]], start + done)
            except OSError as error:
                raise self.error(verb, len(part) - done, start + done, error.strerror or str(error)) from error
            if moved <= 0:
                raise self.error(verb, len(part) - done, start + done, "the disk gave no more bytes")
            done += moved

    def error(self, verb: str, size: int, offset: int, why: str) -> RunError:
        """Returns the error of a read or write that failed."""
        return RunError(
            f"offload to disk: cannot {verb} {size} bytes at offset {offset} of {self.path}: {why}. {self.lost} Look "
            f"at the disk, or {ELSEWHERE}, and go on from the last checkpoint"
        )


def refuse_memory(folder: Path) -> None:
    """Raise `RefusedPlan` for a folder that lies in memory."""
    kind = file_system(folder)
    if kind in IN_MEMORY:
        raise RefusedPlan(f"offload to disk: {folder} is {kind}, which lies in the host's memory: {ELSEWHERE}")


def file_system(folder: Path) -> str:
    """Returns the kind of file system of a folder, as Linux tells it; "" elsewhere."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real, best, kind = os.path.realpath(folder), -1, ""
    for line in lines:
        _, mount, this, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if os.path.commonpath([real, mount]) == mount and len(mount) >= best:
            best, kind = len(mount), this
    return kind
