"""Write a safetensors file tensor by tensor, so that no process must hold the whole model.

    file   8 bytes: length of the header | header: JSON, name -> dtype, shape, [begin, end) | spaces | tensors

The header comes first in the file but is complete only at the end. Room for it is reserved from the number and length
of the names, and the rest of the room is filled with spaces, as the format allows.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import RefusedPlan

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ENTRY = 256  # bytes of a tensor's entry in the header, beside its name: dtype, up to 8 dims, two offsets
_BLOCK = 2**26  # bytes that are written at once


def dtype_code(key: str, dtype: torch.dtype) -> str:
    """Returns a dtype's name in a safetensors file ("F32"); `RefusedPlan`, naming the tensor `key`, without one."""
    if dtype not in _CODES:
        raise RefusedPlan(f"'{key}' has dtype {dtype}, which the files of weights and checkpoints have no name for")
    return _CODES[dtype]


class WeightsFile:
    """A safetensors file that `add` extends, under the name `path`.partial until `publish` renames it to `path`."""

    def __init__(self, path: Path, names: Collection[str]) -> None:
        """Opens the file and reserves room for the header. `names`: of all tensors that will be added."""
        self.path, self._partial = path, Path(f"{path}.partial")
        self._room = sum(_ENTRY + len(json.dumps(name)) for name in names) + 2 * _ENTRY
        self._room += -self._room % 8  # the tensors begin at a whole number of 8 bytes, as readers map them
        self._entries: dict[str, Any] = {}
        self._end = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("wb")
        self._file.seek(8 + self._room)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Appends a tensor to the file. Raises `RefusedPlan` for a dtype that the format lacks, or OSError."""
        begin, self._end = self._end, self._end + tensor.nbytes
        entry = {"dtype": dtype_code(name, tensor.dtype), "shape": [*tensor.shape]}
        self._entries[name] = entry | {"data_offsets": [begin, self._end]}
        elements = tensor.detach().resolve_conj().reshape(-1)
        step = max(1, _BLOCK // max(1, tensor.element_size()))
        for block in elements.split(step) if elements.numel() else ():
            self._file.write(block.cpu().contiguous().view(torch.uint8).numpy().data)

    def publish(self, metadata: dict[str, str]) -> None:
        """Writes the header and renames the file to `path`, so that nobody reads an incomplete file.

        metadata  of the header's `__metadata__`
        """
        header = {"__metadata__": dict(sorted(metadata.items()))} | self._entries
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= self._room, "the header is larger than what was kept for it"
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))
        self._file.close()
        self._partial.replace(self.path)

    def discard(self) -> None:
        """Deletes the unfinished file."""
        with suppress(OSError):  # what was still to be flushed has no room either
            self._file.close()
        self._partial.unlink(missing_ok=True)
