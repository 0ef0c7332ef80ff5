"""Writes files that survive a crash (sync, then rename); reads and writes safetensors. Stores: checkpoint/remote.

Every change of the file system goes through a method of `Disk`, so that a test can end the process before any change,
or log the changes and drop those that were not yet synced.

    file   8 bytes: length of the header | header: JSON, name -> dtype, shape, [begin, end) | the tensors' bytes
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardwise.errors import InputError, RunError
from shardwise.guard.points import reach

CHUNK = 2**20  # bytes of one write, and of one read: what is hashed is still in the cache when it is copied
LFS = b"version https://git-lfs"  # first bytes of the pointer that git lfs leaves in place of an unfetched file
MAX_HEADER = 100 * 2**20  # bytes; what the safetensors library allows
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class Disk:
    """The file system, as far as checkpoints change it. Subclasses may act before each change, or use a store."""

    def reached(self, change: str, path: Path) -> None:
        """Called before each `change` ("create", "write", "sync", "rename", "sync folder", "remove") of `path`."""
        reach("disk", subject=(change, path))

    def folder(self, path: Path) -> None:
        """Makes a folder and its parents; it may exist."""
        self.reached("create", path)
        path.mkdir(parents=True, exist_ok=True)

    def file(self, path: Path, parts: Iterable[bytes | memoryview], read_back: bool = False) -> str:
        """Makes a new file of the concatenated `parts`, synced; returns its digest as `digest_of` does.

        read_back   Whether to read the file again during the sync; `RunError` if the bytes differ

        Raises `OSError` if the file exists.
        """
        self.reached("create", path)
        digest = xxhash.xxh3_128()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                for start in range(0, len(view), CHUNK):
                    chunk = view[start : start + CHUNK]
                    digest.update(chunk)
                    self.reached("write", path)
                    while chunk:  # a write may take fewer bytes than it is given
                        chunk = chunk[os.write(handle, chunk) :]
            self.reached("sync", path)
            read_digest = _synced(handle, path if read_back else None)
        except OSError as error:
            error.filename = error.filename or str(path)  # a write by descriptor does not name the file
            raise
        finally:
            os.close(handle)
        if read_back:
            must_be(path, read_digest, digest.hexdigest())
        return digest.hexdigest()

    def small(self, path: Path, data: bytes) -> None:
        """Makes a new small file, which is complete as soon as its name exists."""
        partial = path.with_name(path.name + ".partial")
        self.file(partial, [data])
        self.rename(partial, path)

    def rename(self, path: Path, to: Path) -> None:
        """Renames a file or a folder; an existing file `to` is replaced."""
        self.reached("rename", path)
        os.rename(path, to)

    def sync_folder(self, path: Path) -> None:
        """Syncs a folder, so that the names in it survive a crash."""
        self.reached("sync folder", path)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def withdraw(self, path: Path, why: str) -> Path:
        """Renames a checkpoint's folder to NAME.`why`, which no scan takes for a checkpoint; returns the new path."""
        to = path.with_name(f"{path.name}.{why}")
        self.rename(path, to)
        return to

    def remove(self, path: Path) -> None:
        """Removes a file, if it exists, or a folder with its content."""
        self.reached("remove", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def replace(self, path: Path, data: bytes) -> None:
        """Replaces the content of a small file; a reader sees the old or the new content, never a mixture."""
        partial = path.with_name(path.name + ".partial")
        self.remove(partial)  # a process killed here leaves one, and `file` refuses to overwrite
        self.file(partial, [data])
        self.rename(partial, path)
        self.sync_folder(path.parent)


def must_be(path: Path, read_digest: str, written: str) -> None:
    """Raises `RunError` if the digest that was read back differs from that of the bytes `written`."""
    if read_digest != written:
        raise RunError(
            f"{path} reads back with digest {read_digest}, and {written} was written: the disk is not to be trusted"
        )


def _synced(handle: int, path: Path | None) -> str:
    """Syncs the open file; returns the digest of `path` as read back during the sync ("" if `path` is None)."""
    if path is None:
        os.fsync(handle)
        return ""
    with ThreadPoolExecutor(1) as beside:  # one thread waits for the disk, the other computes
        synced = beside.submit(os.fsync, handle)
        read_digest = digest_of(path)
        synced.result()
    return read_digest


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file: its bytes lie at [begin, end) of the file."""

    dtype: str  # in the notation of safetensors, such as "F32" or "BF16"
    shape: tuple[int, ...]
    begin: int
    end: int


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Returns (header bytes of a safetensors file, {name: entry with its bytes}); `tensors`: name -> (dtype, shape).

    Tensors lie in order of their item's size, largest first, so that each is aligned to its items.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-ITEM_BYTES[item[1][0]], item[0])):
        size = math.prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes, as the format asks
    base = 8 + len(text)
    entries = {
        name: TensorEntry(field["dtype"], tuple(field["shape"]), *(base + offset for offset in field["data_offsets"]))
        for name, field in fields.items()
        if name != "__metadata__"
    }
    return len(text).to_bytes(8, "little") + text, entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns {name: entry} of a safetensors file. `InputError` if it is damaged, truncated, or of another format."""
    try:
        size = size_of(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # before that much is read: a hostile length must not cost memory
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            fields = parsed(file.read(length))
        if not isinstance(fields, dict):
            raise ValueError("the header is not a table")
        fields.pop("__metadata__", None)
        entries = {name: _entry(field, 8 + length) for name, field in fields.items()}
        at = 8 + length
        # entries must be contiguous, which catches truncated files and two names for one range
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
            if entry.begin != at:
                raise ValueError("tensors overlap, or there is a hole between them")
            at = entry.end
        if at != size:
            raise ValueError(f"{size} bytes, and the header tells of {at}")
        return entries
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        again = "fetch it again" if path.suffix == ".safetensors" else "give a .safetensors file, or a run's folder"
        # say what the file is instead, if that can be seen from its first bytes
        if path.is_file() and path.open("rb").read(len(LFS)) == LFS:
            raise InputError(f"{path} is a pointer of git lfs, not the weights themselves: git lfs pull") from error
        if path.is_file() and begins_as_pickle(path):
            again = "it begins as pickles do, whose tensors `shardwise checkpoint convert --allow-pickle` takes"
        raise InputError(f"{path} cannot be read as safetensors ({error}): {again}") from error


def begins_as_pickle(path: Path) -> bool:
    """Whether a file begins like a file of torch.save: a zip archive, or a pickle of protocol 2 or later."""
    with path.open("rb") as file:
        return file.read(4).startswith((b"PK\x03\x04", b"\x80"))


def _entry(field: Mapping[str, Any], base: int) -> TensorEntry:
    """Returns the entry of one field of a safetensors header; `ValueError` if the field is damaged.

    base   byte of the file at which tensors begin, to which the field's offsets are relative
    """
    shape, (begin, end) = tuple(field["shape"]), field["data_offsets"]
    # `type`, since JSON's true is an int to isinstance
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("sizes and offsets are whole numbers")
    if field["dtype"] not in ITEM_BYTES:
        raise ValueError(f"dtype {field['dtype']} is not known")
    if math.prod(shape) * ITEM_BYTES[field["dtype"]] != end - begin:
        raise ValueError(f"shape {shape} does not fill bytes [{begin}, {end})")
    return TensorEntry(field["dtype"], shape, base + begin, base + end)


def parsed(text: bytes) -> Any:
    """Returns the value of a strict JSON text: UTF-8, without repeated keys or NaN; `ValueError` for anything else."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("a name stands twice in one table")
        return fields

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=table, parse_constant=refuse)
    except RecursionError:
        raise ValueError("tables within tables without end") from None


def size_of(path: Path) -> int:
    """Returns the size of a regular file in bytes; `ValueError` for anything else, whose reading might not end."""
    own = getattr(path, "size", None)  # the method of a `RemotePath`
    if own is not None:
        return int(own())
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    return status.st_size


def digest_of(path: Path) -> str:
    """Returns the xxh3-128 of a file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()
