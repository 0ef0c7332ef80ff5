"""Locks a run's folder for one process; the system releases the lock however the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.errors import InputError

LOCK = "running.lock"  # the locked file; it contains the process id and host
_LOCKED_FILES: set[int] = set()  # descriptors that forked processes (a loader's workers) must close
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # the file system has no locks


@contextmanager
def held(folder: Path) -> Iterator[list[str]]:
    """Context that locks a run's folder for this process; gives a list of notices for the user.

    Raises `InputError` if another process has the lock, or the folder cannot be written.
    """
    path = folder / LOCK
    file, notes = _taken(path)
    _LOCKED_FILES.add(file)
    try:
        yield notes
    finally:
        with suppress(FileNotFoundError):  # the folder of a refused run is removed with its lock
            # before the lock is released: afterwards the file may belong to the next holder
            path.unlink()
        _LOCKED_FILES.discard(file)
        os.close(file)


def _let_go() -> None:
    """Closes the lock files in a forked child, so that a lock ends with the process that took it."""
    for file in _LOCKED_FILES:
        os.close(file)
    _LOCKED_FILES.clear()


os.register_at_fork(after_in_child=_let_go)


def _taken(path: Path) -> tuple[int, list[str]]:
    """Locks the file; returns (its descriptor, notices for the user). `InputError` if another process has the lock."""
    while True:
        try:
            # the holder may remove the file between open and lock, and the lock would be on a file nobody else opens:
            # test_a_lock_that_its_holder_removes_meanwhile_is_taken_anew
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InputError(
                f"{path.parent} takes no files: {error.strerror}. A run goes on in its own folder: make it writable, "
                "or copy the folder and give --resume the copy"
            ) from None
        notes = _locked(file, path)
        try:
            if os.path.samestat(os.fstat(file), os.stat(path)):  # else its holder removed it meanwhile
                notes += _left(os.pread(file, 200, 0).decode(errors="replace").strip(), path)
                os.ftruncate(file, 0)
                os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return file, notes
        except FileNotFoundError:
            pass
        os.close(file)


def _left(holder: str, path: Path) -> list[str]:
    """Returns [a notice] if a process of another host left the lock file, since its lock may be invisible here.

    holder   content of the file, "process PID on HOST"; "" for a new file
    """
    _, _, host = holder.partition(" on ")
    if not host or host == socket.gethostname():
        return []  # that process was killed, which released its lock
    return [
        f"{path.parent}: {holder} was in this run and left {path.name} behind. Its lock is gone, so it has ended, "
        "unless this file system keeps locks within a host (NFS mounted with `nolock` or `local_lock`): see that it has"
    ]


def _locked(file: int, path: Path) -> list[str]:
    """Locks an open file; returns [a notice] if the file system has no locks, else []. `InputError` if it is taken."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 200).decode(errors="replace").strip() or "another process"
        os.close(file)
        raise InputError(
            f"{path.parent} is in use: {holder} goes on with that run. Wait for its end, or copy the folder and give "
            f"--resume the copy; if that host is gone and its lock stays, remove {path}"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(file)
            raise
        return [f"{path.parent}: this file system has no locks, so a second start of this run would not be refused"]
    return []
