"""Read a checkpoint folder of safetensors files, one tensor at a time.

    model.safetensors.index.json   name -> file, if there are several
    model-00001-of-00002.safetensors, ...   or   model.safetensors

A rank reads a weight, keeps its shard and frees the rest, so it never holds more than its shards and one weight.

What this does not do: read pickles (`pytorch_model.bin`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.load import tensor_of
from shardwise.checkpoint.pieces import Piece
from shardwise.checkpoint.stored import INDEX, SINGLE, Stored, of_safetensors
from shardwise.engine.weights_file import DTYPES
from shardwise.errors import InputError, RunError

AT_ONCE = 2**20  # elements read at once


class Checkpoint:
    """The tensors of a checkpoint folder; `InputError`, naming the file, if one is missing or damaged.

    files  name of a tensor -> name of its file
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files = _files(self.folder)
        self._open: dict[str, Stored] = {}
        for file in sorted(set(self.files.values())):
            if not (self.folder / file).exists():
                held = sum(other == file for other in self.files.values())
                raise InputError(
                    f"{self.folder / file} is missing: {INDEX} says that it holds {held} of {len(self.files)} tensors; "
                    "fetch the file again"
                )

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns one tensor on the CPU, in `dtype` (None: the file's); `InputError` if it cannot be read.

        It is read and converted in blocks of some MB, since pages of a mapped file would count as this process's
        memory, and converting the tensor as a whole would need it twice.
        """
        stored = self._file_of(name)
        shape, own = stored.tensors[name].shape, DTYPES[stored.tensors[name].dtype]
        whole, value = Piece.whole(shape), torch.empty(shape, dtype=dtype or own)
        try:
            for first in range(0, whole.count, AT_ONCE):
                last = min(first + AT_ONCE, whole.count)
                value.view(-1)[first:last] = tensor_of(stored, name, whole.part(first, last))
        except RunError as error:
            raise InputError(f"{self.folder / self.files[name]} does not give '{name}': {error}") from error
        return value

    def outline(self, name: str) -> torch.Tensor:
        """Returns a meta tensor with the tensor's shape and dtype."""
        tensor = self._file_of(name).tensors[name]
        return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")

    def _file_of(self, name: str) -> Stored:
        """Returns the opened file that holds the tensor `name`; `InputError` if the index is wrong about it."""
        file = self.files[name]
        if file not in self._open:
            self._open[file] = of_safetensors(self.folder / file)
        if name not in self._open[file].tensors:
            raise InputError(f"{self.folder / file} lacks '{name}', which {INDEX} says it holds: fetch both again")
        return self._open[file]

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "files": self.files, "_open": {}}


def _files(folder: Path) -> dict[str, str]:
    """Returns {tensor's name: name of its file} of a folder; `InputError` if it has no safetensors files."""
    if (folder / INDEX).exists():
        try:
            found = json.loads((folder / INDEX).read_bytes())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder / INDEX} cannot be read ({error!r}): fetch it again") from error
        return {str(name): str(file) for name, file in found.items()}
    if (folder / SINGLE).exists():
        return dict.fromkeys(of_safetensors(folder / SINGLE).tensors, SINGLE)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give one with config.json and {SINGLE}")
    # a pickle is not read, since it may run code
    pickled = next(folder.glob("*.bin"), None)
    hint = (
        f"; {pickled.name} is a pickle, which is not read: load it once with from_pretrained and save it with "
        "save_pretrained"
        if pickled is not None
        else ""
    )
    raise InputError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
