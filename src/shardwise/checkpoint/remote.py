"""Checkpoints in an object store (an address such as s3:// or gs://), through fsspec. Without torch.

    step-00000012-1795400000000000/rank-00003.safetensors    written, read back
                                   rank-00003.json           what is in it, and its digest
                                   manifest.json             last: with it the folder is a checkpoint, without it none

No rename is relied on, and no existing file of a checkpoint is written again. A store may show half of a file; such a
file fails its digest and is ignored. A checkpoint is withdrawn by removing its manifest first.

Options of a store (keys, end points) come from fsspec's own configuration and from the store's variables.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from shardwise.checkpoint.files import CHUNK, Disk, digest_of, must_be
from shardwise.errors import InputError

EXTRA = "remote"
AT_ONCE = 2**26  # bytes of one request


class RemotePath:
    """A file or folder in a store, with those methods of `Path` that checkpoints need. Errors are `OSError`.

    store   fsspec file system
    path    address within it, without protocol
    """

    def __init__(self, store: Any, path: str) -> None:
        self.store, self.path = store, path.rstrip("/")

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.store, f"{self.path}/{name}")

    def __str__(self) -> str:
        return str(self.store.unstrip_protocol(self.path))

    def __repr__(self) -> str:
        return f"RemotePath({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        """Returns the last part of the address."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Returns the address one level up, as `Path.parent`."""
        return RemotePath(self.store, self.path.rpartition("/")[0])

    def absolute(self) -> RemotePath:
        """Returns this path, since an address is always absolute."""
        return self

    def is_symlink(self) -> bool:
        """Returns False, since a store has no symbolic links."""
        return False

    def exists(self) -> bool:
        """Whether a file or folder has this address now (fsspec's cached listings are not used)."""
        with naming_address(self):
            self.store.invalidate_cache()  # fsspec keeps listings, and other ranks write here
            return bool(self.store.exists(self.path))

    def is_file(self) -> bool:
        """Whether a file has this address."""
        with naming_address(self):
            return bool(self.store.isfile(self.path))

    def is_dir(self) -> bool:
        """Whether this address is a folder, which is so if anything lies below it."""
        with naming_address(self):
            return bool(self.store.isdir(self.path))

    def size(self) -> int:
        """Returns the size of the file in bytes."""
        with naming_address(self):
            return int(self.store.info(self.path)["size"])

    def names(self) -> list[str]:
        """Returns the names of files and folders directly below this address; [] if there are none."""
        with naming_address(self):
            self.store.invalidate_cache()
            if not self.store.exists(self.path):
                return []
            return [str(path).rstrip("/").rpartition("/")[2] for path in self.store.ls(self.path, detail=False)]

    @contextmanager
    def open(self, mode: str = "rb", buffering: int = -1) -> Iterator[Any]:
        """Context that gives the open file. `buffering` is ignored."""
        with naming_address(self), self.store.open(self.path, mode) as file:
            yield file

    def read_bytes(self) -> bytes:
        """Returns the file's content."""
        with naming_address(self):
            return bytes(self.store.cat_file(self.path))

    def write_bytes(self, data: bytes) -> None:
        """Writes the file with this content, replacing any other."""
        with naming_address(self):
            self.store.pipe_file(self.path, data)

    def unlink(self) -> None:
        """Removes the file."""
        with naming_address(self):
            self.store.rm_file(self.path)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Returns the file's content as text."""
        return self.read_bytes().decode(encoding, errors)

    def read_range(self, begin: int, size: int) -> bytes:
        """Returns up to `size` bytes of the file from byte `begin` on, in one request of at most `AT_ONCE` bytes."""
        with naming_address(self):
            return bytes(self.store.cat_file(self.path, start=begin, end=begin + min(size, AT_ONCE)))


class RemoteDisk(Disk):
    """A store, as far as checkpoints change it; paths are `RemotePath`s."""

    def folder(self, path: Path) -> None:
        """Makes a folder, if the store has folders; it may exist."""
        self.reached("create", path)
        with naming_address(path):
            path.store.makedirs(path.path, exist_ok=True)  # type: ignore[attr-defined]

    def file(self, path: Path, parts: Iterable[bytes | memoryview], read_back: bool = False) -> str:
        """Makes a file of the concatenated `parts`, replacing any other; returns its digest as `digest_of` does.

        read_back   Whether to read the file again; `RunError` if the bytes differ
        """
        self.reached("create", path)
        digest = xxhash.xxh3_128()
        with naming_address(path), path.store.open(path.path, "wb") as file:  # type: ignore[attr-defined]
            for part in parts:
                view = memoryview(part).cast("B")
                for start in range(0, len(view), CHUNK):
                    chunk = view[start : start + CHUNK]
                    digest.update(chunk)
                    self.reached("write", path)
                    file.write(chunk)
            self.reached("sync", path)
        if read_back:
            must_be(path, digest_of(path), digest.hexdigest())
        return digest.hexdigest()

    def small(self, path: Path, data: bytes) -> None:
        """Makes a small file, which may be seen half written: readers check its digest."""
        self.file(path, [data])

    def replace(self, path: Path, data: bytes) -> None:
        """Replaces the content of a small file."""
        self.file(path, [data])

    def sync_folder(self, path: Path) -> None:
        """Does nothing, since a store has no folder whose names need a sync."""

    def remove(self, path: Path) -> None:
        """Removes a file, or a folder with its content, if it exists."""
        self.reached("remove", path)
        with naming_address(path):
            if path.exists():
                path.store.rm(path.path, recursive=True)  # type: ignore[attr-defined]

    def withdraw(self, path: Path, why: str) -> Path:
        """Renames a checkpoint's manifest to manifest.json.`why`, so that no scan finds it; returns its folder."""
        # the copy first: a process that ends in between leaves the checkpoint as it was
        text = (path / "manifest.json").read_bytes()
        self.file(path / f"manifest.json.{why}", [text])
        self.remove(path / "manifest.json")
        return path


@contextmanager
def naming_address(path: Any) -> Iterator[None]:
    """Context in which every exception of the store becomes an `OSError` that names `path`."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(path)) from error


def place(text: Any) -> Path:
    """Returns `text` as a `Path`, or as a `RemotePath` (which stands in for a `Path` here) if it contains `://`.

    Raises `InputError` if fsspec, or its package for that store, is missing or rejects the address.
    """
    if "://" not in str(text):
        return Path(text)
    if isinstance(text, RemotePath):
        return text  # type: ignore[return-value]
    try:
        import fsspec

        store, path = fsspec.core.url_to_fs(str(text))
    except ImportError as error:
        raise InputError(
            f"{text}: {error}; it takes fsspec (pip install shardwise[{EXTRA}]) and what fsspec reads that store by"
        ) from error
    except ValueError as error:
        raise InputError(f"{text}: {error}") from error
    return RemotePath(store, path)  # type: ignore[return-value]


def is_remote(path: Path) -> bool:
    """Whether the path is a `RemotePath`."""
    return isinstance(path, RemotePath)


def disk_of(path: Path) -> Disk:
    """Returns the object that writes files at a path: a `RemoteDisk` for a `RemotePath`, else a `Disk`."""
    return RemoteDisk() if is_remote(path) else Disk()
