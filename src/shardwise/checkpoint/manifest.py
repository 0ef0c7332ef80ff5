"""The manifest of a checkpoint, one JSON file: tensors, their pieces, the files with their digests, all other state.

    {"format": "shardwise checkpoint", "version": 1, "digest": xxh3-128 of the content's canonical text, "content":
      {"files":   {"rank-00000.safetensors": {"bytes": 4096, "xxh3_128": "..."}, ...},
       "tensors": {"model/w": {"dtype": "F32", "shape": [6, 4], "parts": [[file, first byte, piece], ...]}, ...},
       "step": 12, "plan": "...", "optimizer": {...}, ...}}

`file` in "parts" is the position of the file's name in "files", sorted. The digest shows corruption, not tampering,
since whoever can write the file can write its digest too. So every size in it is checked against the sizes of the files
before it is used; a false manifest cannot make a reader allocate more than the files hold.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardwise.checkpoint.files import ITEM_BYTES, parsed, size_of
from shardwise.checkpoint.pieces import Piece, common_count, from_json, to_json
from shardwise.errors import InputError

NAME = "manifest.json"
FORMAT, VERSION = "shardwise checkpoint", 1
MAX_BYTES = 2**28
_DIMS = 64
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_EXACT = 64  # up to so many pieces of a tensor, each pair is checked for overlap


@dataclass(frozen=True)
class FilePiece:
    """A piece of a tensor, stored contiguously in a file from byte `begin` on."""

    file: str  # its name, in the checkpoint's folder
    begin: int
    piece: Piece  # which elements of the whole tensor these are


@dataclass(frozen=True)
class Tensor:
    """An unsharded tensor of a checkpoint and the pieces in which it is stored."""

    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    parts: tuple[FilePiece, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the size of the unsharded tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class File:
    """The size of a file in bytes and the xxh3-128 digest of its content, in hexadecimal."""

    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    files    name of each file in the folder -> its size and digest
    tensors  name, such as "model/W" -> dtype, shape and pieces
    fields   all other state as JSON, such as "step", "plan" and "optimizer"
    """

    files: dict[str, File]
    tensors: dict[str, Tensor]
    fields: dict[str, Any]

    @property
    def step(self) -> int:
        """Returns how many optimizer steps are done."""
        return int(self.fields["step"])

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of all files of the checkpoint but the manifest itself."""
        return sum(file.size_bytes for file in self.files.values())

    def content(self) -> dict[str, Any]:
        """Returns the JSON object under "content" of the file, as this module's docstring shows it."""
        places = {name: place for place, name in enumerate(self.files)}
        return {
            **self.fields,
            "files": {name: {"bytes": f.size_bytes, "xxh3_128": f.digest} for name, f in self.files.items()},
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "parts": [[places[part.file], part.begin, to_json(part.piece)] for part in tensor.parts],
                }
                for name, tensor in self.tensors.items()
            },
        }


def sealed(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a JSON file {"format", "version", "digest", "content"} with this content and its digest."""
    text = canonical(content)
    return canonical(
        {"format": FORMAT, "version": VERSION, "digest": xxhash.xxh3_128_hexdigest(text), "content": json.loads(text)}
    )


def canonical(value: Any) -> bytes:
    """Returns a JSON value as canonical bytes: equal values give the same ones."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def unsealed(path: Path) -> dict[str, Any]:
    """Returns the content of a file that `sealed` wrote; `InputError` if it is missing, damaged or another file."""
    try:
        size = size_of(path)
        # the file is read at once, so its size is checked first
        if size > MAX_BYTES:
            raise ValueError(f"{size} bytes are more than any checkpoint needs")
        # any JSON file may be given
        whole = parsed(path.read_bytes())
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            raise ValueError("it is no manifest of a checkpoint")
        if whole.get("version") != VERSION:
            raise ValueError(
                f"it has version {str(whole.get('version'))[:20]} of the format, this is version {VERSION}"
            )
        content = whole["content"]
        # the digest is of the canonical text, so any changed value shows
        actual = xxhash.xxh3_128_hexdigest(canonical(content))
        if actual != whole["digest"]:
            raise ValueError(f"its digest should be {str(whole['digest'])[:40]} and is {actual}")
        # the digest covers "content" alone, so further fields would be unprotected
        if not isinstance(content, dict) or set(whole) != {"format", "version", "digest", "content"}:
            raise ValueError("it has other fields than a manifest")
        return content
    except (OSError, ValueError, KeyError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: {reason}") from error


def read(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint's folder, checked against itself and against the sizes of its files.

    Raises `InputError` that names what is wrong.
    """
    path = folder / NAME
    content = unsealed(path)
    try:
        manifest = _manifest(content)
    except (ValueError, TypeError, KeyError, AttributeError, InputError) as error:
        raise InputError(f"{path}: {error}") from error
    for name, file in manifest.files.items():
        _check_size(folder / name, file)
    return manifest


def _check_size(path: Path, file: File) -> None:
    """Raises `InputError` if a file of the checkpoint is missing or has another size than the manifest says."""
    if path.is_symlink() or not path.is_file():  # a link could lead out of the folder
        raise InputError(f"{path} is missing: it should have {file.size_bytes} bytes")
    size = size_of(path)
    if size != file.size_bytes:
        raise InputError(f"{path} has {size} bytes and should have {file.size_bytes}")


def _manifest(content: dict[str, Any]) -> Manifest:
    """Returns the manifest in a JSON file's content, from which "files" and "tensors" are removed.

    Raises `ValueError`, `KeyError`, `TypeError` or `InputError` for content that a save would not write.
    """
    files = {}
    for name, row in content.pop("files").items():
        # a forged manifest could name a file outside the folder
        if not _FILE.fullmatch(name):
            raise ValueError(f"{name[:40]!r} is no name of a file in this folder")
        files[name] = File(_count(row["bytes"]), str(row["xxh3_128"]))
    names = list(files)
    tensors = {}
    for name, row in content.pop("tensors").items():
        shape, dtype = tuple(_count(size) for size in row["shape"]), row["dtype"]
        # sizes are computed from these before a file is opened
        if dtype not in ITEM_BYTES or len(shape) > _DIMS:
            raise ValueError(f"tensor '{name[:80]}' has dtype {str(dtype)[:20]} and {len(shape)} dims")
        parts = tuple(FilePiece(names[_count(at)], _count(begin), from_json(shape, piece))
                      for at, begin, piece in row["parts"])  # fmt: skip
        tensors[name] = Tensor(dtype, shape, parts)
        check_parts(name[:80], tensors[name], files)
    _count(content["step"])
    return Manifest(files, tensors, content)


def check_parts(name: str, tensor: Tensor, files: Mapping[str, File]) -> None:
    """Raises `ValueError` unless each element of a tensor lies in exactly one part, inside its file.

    name    of the tensor, for the message; `files`: name -> size and digest

    If there are more than `_EXACT` parts, overlaps are not looked for; only the number of elements is checked.
    """
    item = ITEM_BYTES[tensor.dtype]
    for part in tensor.parts:
        if part.begin + part.piece.count * item > files[part.file].size_bytes:
            raise ValueError(f"tensor '{name}' reaches past the end of {part.file}")
    written, wanted = sum(part.piece.count for part in tensor.parts), math.prod(tensor.shape)
    if written != wanted:
        raise ValueError(f"tensor '{name}' has {wanted} elements, its pieces {written}")
    # if the sum is right and no two parts overlap, each element is there once; comparing pairs is quadratic, so it
    # is left out for many parts
    if 1 < len(tensor.parts) <= _EXACT:
        for first, other in overlapping([part.piece for part in tensor.parts]):
            raise ValueError(f"pieces {first} and {other} of tensor '{name}' overlap")


def overlapping(pieces: list[Piece]) -> Iterator[tuple[int, int]]:
    """Yields (i, j), i < j, for each two pieces of one tensor that have an element in common."""
    for other in range(len(pieces)):
        for first in range(other):
            if common_count(pieces[first], pieces[other]):
                yield first, other


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number, got {str(value)[:20]}")
    return value
