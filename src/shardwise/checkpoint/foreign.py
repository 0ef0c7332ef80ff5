"""Read others' state dicts for `checkpoint convert` (`torch.save`, DCP folders); write such a folder. A run: stored.

Nothing in them is executed. Of a file, torch's restricted reader makes tensors and plain containers alone
(`weights_only`); of a folder's `.metadata` only torch's classes that describe tensors are made, and only tensors are
read. What needs more is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import filesystem, metadata

from shardwise.checkpoint.files import begins_as_pickle
from shardwise.errors import InputError, first_line

METADATA = ".metadata"
SHARED = 16  # names of one storage: by how much tensors may be more than their file
_PLAIN = {("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("pathlib", "Path"), ("torch", "Size"),
          ("torch.serialization", "_get_layout")}  # fmt: skip


def write_folder(weights: Path, target: Path, key: str | None = None) -> list[Path]:
    """Write a safetensors file's tensors as a folder that `torch.distributed.checkpoint.load` reads; returns its files.

    key   under which the state dict lies there, such as "model"; None: the names are those of the tensors

    Tensors are mapped from the file, not held. Raises `InputError` where the target exists.
    """
    if os.path.lexists(target):
        raise InputError(f"{target} exists: give a new name")
    partial = target.with_name(
        f".{target.name}.partial-{os.getpid()}"
    )  # written beside: a target that is there is whole
    try:
        with safe_open(weights, "pt") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there, which is meant
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            dcp.save(tensors if key is None else {key: tensors}, checkpoint_id=partial, no_dist=True)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sorted(target.iterdir())


def is_foreign(path: Path) -> bool:
    """Whether `path` is a file that begins as pickles do, or a folder of `torch.distributed.checkpoint`."""
    if path.is_dir():
        return (path / METADATA).is_file()
    return path.is_file() and begins_as_pickle(path)


def read(path: Path, key: str | None = None) -> dict[str, torch.Tensor]:
    """Returns {name: tensor on the CPU} of the state dict in a pickled file or folder.

    key   where the state dict lies in what was saved, such as "model"; None: it is all of it, or the only one in it

    Raises `InputError` for what cannot be read without running code of the file, and where it is not clear which one
    is meant.
    """
    if path.is_dir():
        tensors = _of_folder(path)
        begin = "" if key is None else f"{key}."
        tensors = {name.removeprefix(begin): value for name, value in tensors.items() if name.startswith(begin)}
        # a key that no name begins with would convert to an empty file
        if not tensors:
            raise InputError(f"{path} has no tensor" + (f" below '{key}'" if key else ""))
        return tensors
    _refuse_compressed(path)
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged or hostile file raises in there is anything, no memory left included
        needs = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        reason = f"it holds {needs[1]}" if needs else first_line(error)[:200]
        raise InputError(
            f"{path} cannot be read without running code that is in it ({reason}): where you trust it, load it "
            "by torch.load in a script of yours, and save its state_dict with safetensors"
        ) from error
    states = dict(_state_dicts(whole, ""))
    # nothing to choose: a file of one state dict, at whatever depth, needs no key
    if key is None and len(states) == 1:
        key = next(iter(states))
    if key is not None and key in states:
        _refuse_larger(path, states[key])
        return states[key]
    there = ", ".join(repr(name) for name in list(states)[:5]) or "none"
    if key is not None:
        raise InputError(f"{path} has no state dict {key!r}; --key takes one of {there}")
    if not states:
        raise InputError(f"{path} holds no state dict: no table of names and tensors is in it")
    raise InputError(f"{path} holds {len(states)} state dicts: --key says which, one of {there}")


def _refuse_compressed(path: Path) -> None:
    """Raises `InputError` for packed records, which torch.save never writes: they can be of any size."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [record.filename for record in archive.infolist() if record.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{path} cannot be read as a file of torch.save: {str(error)[:200]}") from error
    if packed:
        raise InputError(f"{path} is no file of torch.save: its record {packed[0][:60]!r} is compressed")


def _refuse_larger(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Raises `InputError` for tensors that are no plain arrays, or that would take far more than lies in the file."""
    for name, value in state.items():
        if value.layout != torch.strided or value.is_quantized or not value.is_cpu:
            raise InputError(f"{path}: '{name[:80]}' is no plain array ({value.layout} on {value.device})")
    wanted, there = sum(value.numel() * value.element_size() for value in state.values()), path.stat().st_size
    if wanted > SHARED * there:
        raise InputError(f"{path}: its tensors would have {wanted} bytes, and the file has {there}")


def _state_dicts(value: Any, name: str) -> Any:
    """Yields (dotted place in `value`, {name: tensor}) of each nested dict that holds tensors alone."""
    # weights are looked for in dicts with text as keys alone: lists have no names to match by
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return
    # nothing but tensors: this is a state dict, found at `name` (a file may hold several)
    if all(isinstance(tensor, torch.Tensor) for tensor in value.values()):
        yield name, dict(value)
        return
    for key, inner in value.items():
        yield from _state_dicts(inner, f"{name}.{key}" if name else key)


# --- folders of torch.distributed.checkpoint


class _Describing(pickle.Unpickler):
    """Unpickler that makes torch's descriptions of tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class or dtype that a pickle names, of a few that only describe; refuses all others as unsafe."""
        cls = None
        if (module, name) in _PLAIN:
            cls = super().find_class(module, name)
        elif module in (metadata.__name__, filesystem.__name__) and isinstance(
            kind := getattr({metadata.__name__: metadata, filesystem.__name__: filesystem}[module], name, None), type
        ):
            # not torch's functions or readers, and not what those modules have imported from elsewhere
            describes = dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum)
            cls = kind if kind.__module__ == module and describes else None
        elif module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            cls = kind
        if cls is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return cls


class _Reader(filesystem.FileSystemReader):
    """torch's reader, over a description that was read by `_described`."""

    def __init__(self, folder: Path, description: Any) -> None:
        super().__init__(folder)
        self.description = description

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.description, "storage_meta", None) is None:
            self.description.storage_meta = metadata.StorageMeta()
        self.description.storage_meta.load_id = self.load_id
        return self.description


def _of_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a folder of `torch.distributed.checkpoint` by name; `InputError` if it is damaged."""
    description, kinds = _described(folder)
    state = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant: one process reads
            dcp.load(state, storage_reader=_Reader(folder, description), no_dist=True)
    except Exception as error:  # what a damaged folder raises in there is anything
        raise InputError(f"{folder} cannot be read: {first_line(error)[:300]}") from error
    return state


def _described(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Returns (the folder's metadata, {name: metadata of that tensor}), checked; `InputError` if it is damaged."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            description = _Describing(file).load()
        kinds = {
            name: kind
            for name, kind in description.state_dict_metadata.items()
            if isinstance(kind, metadata.TensorStorageMetadata)
        }
        wanted = sum(math.prod(kind.size) * kind.properties.dtype.itemsize for kind in kinds.values())
        files = {str(place.relative_path) for place in description.storage_data.values()}
        outside = [name for name in files if Path(name).name != name]  # "../secret", or an absolute path
        if outside:
            raise ValueError(f"it names {outside[0][:60]!r}, which is no file of this folder")
        # a few bytes of description can ask for any amount of memory
        there = sum((folder / name).stat().st_size for name in files)
        if wanted > there:
            raise ValueError(f"its tensors have {wanted} bytes, and its files {there}")
    except (pickle.UnpicklingError, OSError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise InputError(f"{path} cannot be read as a description of tensors: {str(error)[:200]}") from error
    return description, kinds
