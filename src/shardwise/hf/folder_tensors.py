"""Read a checkpoint folder of safetensors files, one tensor at a time.

    model.safetensors.index.json   name -> file, where there are several
    model-00001-of-00002.safetensors, ...   or   model.safetensors

A rank that holds a shard of each weight reads a weight, keeps its slice and forgets the rest, so it never holds more
than its shard and one weight.

What this does not do: read pickles (`pytorch_model.bin`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import InputError

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a folder. Raises `InputError` naming the file that is missing or damaged."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files = _files(self.folder)
        self._open: dict[str, Any] = {}
        for file in sorted(set(self.files.values())):
            if not (self.folder / file).exists():
                held = sum(other == file for other in self.files.values())
                raise InputError(
                    f"{self.folder / file} is missing: {INDEX} says that it holds {held} of {len(self.files)} tensors; "
                    "fetch the file again"
                )

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> torch.Tensor:
        """Returns one whole tensor on the CPU."""
        file = self.files[name]
        if file not in self._open:
            self._open[file] = _opened(self.folder / file)
        try:
            return self._open[file].get_tensor(name)
        except Exception as error:  # the library's own error class
            raise InputError(f"{self.folder / file} does not give '{name}': {error}") from error

    def outline(self, name: str) -> torch.Tensor:
        """Returns the tensor's shape and dtype alone, on the meta device."""
        file = self.files[name]
        if file not in self._open:
            self._open[file] = _opened(self.folder / file)
        piece = self._open[file].get_slice(name)
        dtype = getattr(torch, _DTYPES.get(piece.get_dtype(), "float32"))
        return torch.empty(piece.get_shape(), dtype=dtype, device="meta")

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "files": self.files, "_open": {}}


def _files(folder: Path) -> dict[str, str]:
    """Returns name -> file of each tensor."""
    if (folder / INDEX).exists():
        try:
            found = json.loads((folder / INDEX).read_bytes())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder / INDEX} cannot be read ({error!r}): fetch it again") from error
        return {str(name): str(file) for name, file in found.items()}
    if (folder / SINGLE).exists():
        return dict.fromkeys(_opened(folder / SINGLE).keys(), SINGLE)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give one with config.json and {SINGLE}")
    pickled = next(folder.glob("*.bin"), None)
    hint = (
        f"; {pickled.name} is a pickle, which is not read: load it once with from_pretrained and save it with "
        "save_pretrained"
        if pickled is not None
        else ""
    )
    raise InputError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except Exception as error:  # the library's own error class, and OSError
        raise InputError(f"{path} cannot be read as safetensors ({error}): fetch it again") from error
