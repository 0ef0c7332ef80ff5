"""Reads state dicts of `torch.save` and folders of `torch.distributed.checkpoint`; writes such a folder.

For `checkpoint convert`. No code in the files is executed. A file is read with torch's restricted unpickler
(`weights_only`), which makes tensors and plain containers alone; from a folder's `.metadata` only torch's classes that
describe tensors are made, and only tensors are read. Anything else is refused.
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
SHARED = 16  # tensors may have so many times the bytes of their file, since several names may share a storage
_PLAIN = {("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("pathlib", "Path"), ("torch", "Size"),
          ("torch.serialization", "_get_layout")}  # fmt: skip


def write_folder(weights: Path, target: Path, key: str | None = None) -> list[Path]:
    """Writes a safetensors file's tensors as a folder for `torch.distributed.checkpoint.load`; returns its files.

    key   the state dict's key in the saved dict, such as "model"; None: tensors are saved at the top level

    Tensors are memory-mapped from the file. Raises `InputError` if the target exists.
    """
    if os.path.lexists(target):
        raise InputError(f"{target} exists: give a new name")
    partial = target.with_name(
        f".{target.name}.partial-{os.getpid()}"
    )  # written beside: a target that is there is whole
    try:
        with safe_open(weights, "pt") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is no process group, which is intended here
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            dcp.save(tensors if key is None else {key: tensors}, checkpoint_id=partial, no_dist=True)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sorted(target.iterdir())


def is_foreign(path: Path) -> bool:
    """Whether `path` is a file that begins like one of torch.save, or a folder of `torch.distributed.checkpoint`."""
    if path.is_dir():
        return (path / METADATA).is_file()
    return path.is_file() and begins_as_pickle(path)


def read(path: Path, key: str | None = None) -> dict[str, torch.Tensor]:
    """Returns {name: tensor on the CPU} of the state dict in a file of torch.save, or a DCP folder.

    key   dotted path of the state dict within the saved object, such as "model"; None: all of a folder, or the only
          state dict in a file

    Raises `InputError` if reading would run code of the file, or if a file has several state dicts and no key is given.
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
    # a file with one state dict needs no key, at whatever depth it lies
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
    """Raises `InputError` if a zip archive has compressed records, which torch.save never writes and have any size."""
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
    """Raises `InputError` for tensors that are not dense and on the CPU, or far larger in sum than their file."""
    for name, value in state.items():
        if value.layout != torch.strided or value.is_quantized or not value.is_cpu:
            raise InputError(f"{path}: '{name[:80]}' is no plain array ({value.layout} on {value.device})")
    wanted, there = sum(value.numel() * value.element_size() for value in state.values()), path.stat().st_size
    if wanted > SHARED * there:
        raise InputError(f"{path}: its tensors would have {wanted} bytes, and the file has {there}")


def _state_dicts(value: Any, name: str) -> Any:
    """Yields (dotted path, {name: tensor}) of each dict within `value` that holds tensors alone.

    name   dotted path of `value` itself; "" at the top
    """
    # only dicts with str keys are searched, since a state dict needs names
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return
    # only tensors: this is a state dict, at path `name` (a file may hold several)
    if all(isinstance(tensor, torch.Tensor) for tensor in value.values()):
        yield name, dict(value)
        return
    for key, inner in value.items():
        yield from _state_dicts(inner, f"{name}.{key}" if name else key)


# --- folders of torch.distributed.checkpoint


class _Describing(pickle.Unpickler):
    """An unpickler that makes torch's dataclasses and enums that describe tensors, and refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class or dtype `module`.`name` if it only describes tensors; else raises `UnpicklingError`."""
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
    """torch's reader of a folder, with the metadata that `_described` has checked in place of its own unpickling."""

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
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: one process reads
            dcp.load(state, storage_reader=_Reader(folder, description), no_dist=True)
    except Exception as error:  # a damaged folder may raise any class
        raise InputError(f"{folder} cannot be read: {first_line(error)[:300]}") from error
    return state


def _described(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Returns (the folder's metadata, {name: metadata of that tensor}); `InputError` if it is damaged or unsafe.

    Checked are the classes it names, that its files lie in the folder, and that its tensors are no larger than those.
    """
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
