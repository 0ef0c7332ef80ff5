"""A preallocated file in the folder for temporary files, its name removed, with direct reads and writes (O_DIRECT).

Used for a rank's optimizer state (`disk`), weights (`shards`), activations (`stores`) and undo copies (`undo`).
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
    """One open file without a name, so that nothing is left of it when the process ends.

    lost    sentence for the error of a failed read or write: what it means for the run
    direct  whether reads and writes bypass the page cache (O_DIRECT)
    """

    def __init__(self, rank: int, suffix: str, lost: str, folder: Path | None = None, direct: bool = True):
        """Makes the file. suffix: of its name; folder: None for that of temporary files; direct: try O_DIRECT.

        Raises `RefusedPlan` if the folder lies in memory (tmpfs), or no file can be made there.
        """
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        self.path = self.folder / f"shardwise-{os.getpid()}-rank{rank}.{suffix}"
        self.lost = lost
        refuse_memory(self.folder)
        self.fd, self.direct = self._opened(getattr(os, "O_DIRECT", 0) if direct else 0)
        os.unlink(self.path)
        self.close = weakref.finalize(self, os.close, self.fd)

    def _opened(self, direct: int) -> tuple[int, bool]:
        """Returns (file descriptor, whether it is direct); falls back to the page cache. `direct`: O_DIRECT or 0."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            try:
                return os.open(self.path, flags | direct, 0o600), bool(direct)
            except OSError:
                self.path.unlink(missing_ok=True)  # O_DIRECT may be refused after the file was made
                return os.open(self.path, flags, 0o600), False
        except OSError as error:
            raise RefusedPlan(f"offload to disk: no file in {self.folder}: {error.strerror}: {ELSEWHERE}") from error

    def reserve(self, start: int, size: int) -> None:
        """Allocates disk space for bytes [start, start + size); raises `OSError` if there is none."""
        os.posix_fallocate(self.fd, start, size)

    @property
    def notices(self) -> list[str]:
        """Returns [a line for the user] if the file is not direct, else []."""
        if self.direct:
            return []
        return [
            f"offload to disk: the file system of {self.folder} takes no direct reads and writes (O_DIRECT), which go "
            "through the page cache: the host's memory fills, and a step may wait longer"
        ]

    def read(self, part: memoryview, offset: int) -> None:
        """Reads into `part` from byte `offset`; `RunError` if that fails. If `direct`, all must be page-aligned."""
        self._move(os.preadv, "read", part, offset)

    def write(self, part: memoryview, offset: int) -> None:
        """Writes `part` to byte `offset`; `RunError` if that fails. If `direct`, all must be page-aligned."""
        self._move(os.pwritev, "write", part, offset)

    def _move(self, call: Callable[[int, list[memoryview], int], int], verb: str, part: memoryview, start: int) -> None:
        """Repeats `call` (preadv or pwritev) until all of `part` is moved. `verb`: for the error."""
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
        """Returns the `RunError` of a failed read or write (`verb`) of `size` bytes at `offset`; `why`: the reason."""
        return RunError(
            f"offload to disk: cannot {verb} {size} bytes at offset {offset} of {self.path}: {why}. {self.lost} Look "
            f"at the disk, or {ELSEWHERE}, and go on from the last checkpoint"
        )


def refuse_memory(folder: Path) -> None:
    """Raise `RefusedPlan` if the folder lies in memory (tmpfs and the like)."""
    kind = file_system(folder)
    if kind in IN_MEMORY:
        raise RefusedPlan(f"offload to disk: {folder} is {kind}, which lies in the host's memory: {ELSEWHERE}")


def file_system(folder: Path) -> str:
    """Returns the kind of file system of a folder ("ext4", "tmpfs") from /proc/mounts; "" if there is no such file."""
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
