"""Reads pieces of tensors from the files of a checkpoint, or from any safetensors files. Without torch.

Files are read with plain reads of limited size, not memory-mapped: if a file is truncated meanwhile, a read gives an
error, where a mapping would give zeros or end the process (SIGBUS).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardwise.checkpoint import manifest
from shardwise.checkpoint.files import ITEM_BYTES, MAX_HEADER, parsed, read_header, size_of
from shardwise.checkpoint.manifest import FilePiece, Manifest, Tensor
from shardwise.checkpoint.pieces import Piece, common_count, copy_common
from shardwise.errors import InputError, RunError

AT_ONCE = 2**22  # elements of one read
ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by item size; values are only moved
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Stored:
    """The tensors in a folder of files, from which pieces can be read. A context manager that closes its files.

    folder    the folder that holds the files
    tensors   name -> dtype, unsharded shape, and the parts of files that hold it
    manifest  the checkpoint's manifest; None for plain safetensors
    """

    def __init__(self, folder: Path, tensors: dict[str, Tensor], whole: Manifest | None = None) -> None:
        self.folder, self.tensors, self.manifest = folder, tensors, whole
        self._open: dict[str, int] = {}

    @property
    def elsewhere(self) -> dict[str, str]:
        """Returns {name: digest} of frozen weights that the checkpoint left out, since the task's files hold them."""
        return {} if self.manifest is None else self.manifest.fields.get("elsewhere", {})

    def read(self, name: str, wanted: Piece, into: np.ndarray | None = None) -> np.ndarray:
        """Returns the elements of the piece `wanted` of a tensor, (count,), as unsigned integers of the item size.

        into   an array of that shape and dtype to fill and return; None: a new one is made

        Raises `RunError` for a file that cannot be read or is truncated.
        """
        tensor = self.tensors[name]
        item = ITEM_BYTES[tensor.dtype]
        target = np.empty(wanted.count, ITEMS[item]) if into is None else into
        done = sum(self._read_part(part, item, target, wanted) for part in tensor.parts)
        if done != wanted.count:
            raise RunError(f"{self.folder}: '{name}' gives {done} of {wanted.count} elements")
        return target

    def _read_part(self, part: FilePiece, item: int, target: np.ndarray, wanted: Piece) -> int:
        """Reads the elements that a part and the piece `wanted` have in common into `target`; returns how many.

        item    bytes of one element
        target  array (wanted.count,) with the elements of `wanted` in order
        """
        piece = part.piece
        if piece.runs == wanted.runs:  # two intervals of one flattening: one contiguous read
            first, last = max(piece.first, wanted.first), min(piece.last, wanted.last)
            if first < last:
                place = target[first - wanted.first : last - wanted.first]
                self._bytes(part, (first - piece.first) * item, place.view(np.uint8))
            return max(last - first, 0)
        done = 0
        for first in range(0, piece.count, AT_ONCE):  # in steps, so that the buffer stays small
            some = piece.part(first, min(first + AT_ONCE, piece.count))
            if common_count(some, wanted):
                source = np.empty(some.count, ITEMS[item])
                self._bytes(part, first * item, source.view(np.uint8))
                done += copy_common(source, some, target, wanted)
        return done

    def _bytes(self, part: FilePiece, begin: int, buffer: np.ndarray) -> None:
        """Fills `buffer` with the part's bytes from its byte `begin` on; `RunError` if that fails or the file ends."""
        path = self.folder / part.file
        ranged = getattr(path, "read_range", None)  # the method of a `RemotePath`
        try:
            if ranged is None and part.file not in self._open:
                self._open[part.file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            view, at = memoryview(buffer.data), part.begin + begin
            while view:
                size = os.preadv(self._open[part.file], [view], at) if ranged is None else _into(view, ranged, at)
                # a truncated file: the loop would never end
                if size == 0:
                    raise RunError(f"{path} ends at byte {at}, where '{part.piece.shape}' goes on")
                view, at = view[size:], at + size
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Closes the files that reads have opened."""
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _into(view: memoryview, ranged: Callable[[int, int], bytes], at: int) -> int:
    """Fills the beginning of `view` by one request to a store for the bytes from `at` on; returns how many came.

    ranged   (first byte, size) -> bytes, as `RemotePath.read_range`
    """
    data = ranged(at, len(view))[: len(view)]
    view[: len(data)] = data
    return len(data)


def of_checkpoint(folder: Path) -> Stored:
    """Returns the tensors of a published checkpoint; `InputError` if it is none or a file's size is wrong.

    Digests of files are not checked.
    """
    whole = manifest.read(folder)
    return Stored(folder, whole.tensors, whole)


def of_safetensors(path: Path) -> Stored:
    """Returns the tensors of a safetensors file, or of a folder with `model.safetensors` or an index of several files.

    Raises `InputError` for anything else, and for damaged headers.
    """
    if path.is_dir():
        folder, files = path, _indexed(path)
    else:
        folder, files = path.parent, [path.name]
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, entry in read_header(folder / file).items():
            if name in tensors:
                raise InputError(f"{folder}: '{name}' is in {file} and in {tensors[name].parts[0].file}")
            tensors[name] = Tensor(entry.dtype, entry.shape, (FilePiece(file, entry.begin, Piece.whole(entry.shape)),))
    return Stored(folder, tensors)


def _indexed(folder: Path) -> list[str]:
    """Returns the names of a folder's safetensors files, in Hugging Face's layout; `InputError` if one is missing."""
    index = folder / INDEX
    # Hugging Face's layout: one file without an index, or several with one
    if not index.exists():
        if (folder / SINGLE).exists():
            return [SINGLE]
        raise InputError(
            f"{folder} is no checkpoint and has neither {SINGLE} nor {INDEX}"
            + (_pickles(folder) or ": give a .safetensors file, or a run's folder")
        )
    try:
        # an index is read whole into memory
        if size_of(index) > MAX_HEADER:
            raise ValueError("it is too large")
        names = sorted(set(parsed(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} cannot be read ({error}): fetch it again") from error
    # a name with a path could make this read any file of the host
    for name in names:
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise InputError(f"{index} names {json.dumps(name)[:60]}, which is no file of this folder")
        if not (folder / name).exists():
            raise InputError(f"{folder / name} is missing: {INDEX} names it; fetch it again")
    return names


def _pickles(folder: Path) -> str:
    """Returns a remark on a folder's pickled files, to end an error message; "" if it has none."""
    kinds = {".bin", ".pt", ".pth", ".ckpt", ".distcp"}
    pickled = next((path for path in sorted(folder.glob("*")) if path.suffix in kinds), None)
    if pickled is None:
        return ""
    return (
        f"; {pickled.name} may be a pickle, which runs code when it is loaded and is not read (`shardwise checkpoint "
        "convert --allow-pickle` takes its tensors alone)"
    )
