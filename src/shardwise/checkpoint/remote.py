"""Checkpoints in a store with an address (s3://, gs://), by fsspec; save, publish, resume ask `is_remote`. No torch.

    step-00000012-1795400000000000/rank-00003.safetensors    written, read back
                                   rank-00003.json           what is in it, and its digest
                                   manifest.json             last: with it the folder is a checkpoint, without it none

No rename is relied on, and nothing that is there is written again. What is not whole (a store may show half a file) has
not its digest, and is not believed. To withdraw a checkpoint is to remove its manifest first.

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
    """A place in a store, with as much of `Path` as checkpoints need. What the store raises comes as `OSError`."""

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
        """Returns the place one level up, as `Path.parent`."""
        return RemotePath(self.store, self.path.rpartition("/")[0])

    def absolute(self) -> RemotePath:
        """Returns this place: an address is absolute."""
        return self

    def is_symlink(self) -> bool:
        """Returns False: a store has no links that anybody could follow."""
        return False

    def exists(self) -> bool:
        """Returns whether a file or folder has this address now, whatever was listed before."""
        with naming_address(self):
            self.store.invalidate_cache()  # fsspec keeps listings, and other ranks write here
            return bool(self.store.exists(self.path))

    def is_file(self) -> bool:
        """Returns whether a file has this address."""
        with naming_address(self):
            return bool(self.store.isfile(self.path))

    def is_dir(self) -> bool:
        """Returns whether anything lies below this address."""
        with naming_address(self):
            return bool(self.store.isdir(self.path))

    def size(self) -> int:
        """Returns the bytes of a file."""
        with naming_address(self):
            return int(self.store.info(self.path)["size"])

    def names(self) -> list[str]:
        """Returns the names of files and folders directly below this address; [] where there are none."""
        with naming_address(self):
            self.store.invalidate_cache()
            if not self.store.exists(self.path):
                return []
            return [str(path).rstrip("/").rpartition("/")[2] for path in self.store.ls(self.path, detail=False)]

    @contextmanager
    def open(self, mode: str = "rb", buffering: int = -1) -> Iterator[Any]:
        """Context: the file, to be read."""
        with naming_address(self), self.store.open(self.path, mode) as file:
            yield file

    def read_bytes(self) -> bytes:
        """Returns the file's content."""
        with naming_address(self):
            return bytes(self.store.cat_file(self.path))

    def write_bytes(self, data: bytes) -> None:
        """Write the whole file, anew."""
        with naming_address(self):
            self.store.pipe_file(self.path, data)

    def unlink(self) -> None:
        """Remove the file."""
        with naming_address(self):
            self.store.rm_file(self.path)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Returns the file's content as text."""
        return self.read_bytes().decode(encoding, errors)

    def read_range(self, begin: int, size: int) -> bytes:
        """Returns the file's bytes from `begin` on, at most `size`; fewer where `size` is too much for one request."""
        with naming_address(self):
            return bytes(self.store.cat_file(self.path, start=begin, end=begin + min(size, AT_ONCE)))


class RemoteDisk(Disk):
    """Changes files of a store."""

    def folder(self, path: Path) -> None:
        """Make a folder, where a store has any."""
        self.reached("create", path)
        with naming_address(path):
            path.store.makedirs(path.path, exist_ok=True)  # type: ignore[attr-defined]

    def file(self, path: Path, parts: Iterable[bytes | memoryview], read_back: bool = False) -> str:
        """Make a file with these bytes, in place of one that is there; returns their digest."""
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
        """Make a small file; who reads it looks at its digest."""
        self.file(path, [data])

    def replace(self, path: Path, data: bytes) -> None:
        """Put a small file in place of another."""
        self.file(path, [data])

    def sync_folder(self, path: Path) -> None:
        """Do nothing: a store has no folders whose names would have to be synced."""

    def remove(self, path: Path) -> None:
        """Remove a file or a folder with all that is in it."""
        self.reached("remove", path)
        with naming_address(path):
            if path.exists():
                path.store.rm(path.path, recursive=True)  # type: ignore[attr-defined]

    def withdraw(self, path: Path, why: str) -> Path:
        """Rename a checkpoint's manifest, so that it is no checkpoint any more; returns its folder."""
        # the copy first: a process that ends in between leaves the checkpoint as it was
        text = (path / "manifest.json").read_bytes()
        self.file(path / f"manifest.json.{why}", [text])
        self.remove(path / "manifest.json")
        return path


@contextmanager
def naming_address(path: Any) -> Iterator[None]:
    """Context: what a store raises becomes an `OSError` that names the address."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(path)) from error


def place(text: Any) -> Path:
    """Returns a `Path`, or a place in a store where the text has `://`; `InputError` for a store that cannot be had.

    What comes back for an address is a `RemotePath`, which stands in for a `Path` in this room.
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
    """Returns whether the path is a place in a store."""
    return isinstance(path, RemotePath)


def disk_of(path: Path) -> Disk:
    """Returns the `Disk` that changes files at a path: a store's, or the file system's."""
    return RemoteDisk() if is_remote(path) else Disk()
