"""Inspects, converts and compares checkpoints, without ranks and without torch. The commands: cli/checkpoint.

find      finds the checkpoint that a path means: itself, or the newest of a run
summary   describes the content by kind of tensor
convert   writes the weights as one safetensors file, or as a folder of files with an index, as transformers reads them
diff      lists the differences between two checkpoints, to the bit
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint import manifest, publish
from shardwise.checkpoint.files import ITEM_BYTES, Disk, header_of
from shardwise.checkpoint.manifest import Tensor
from shardwise.checkpoint.pieces import Piece
from shardwise.checkpoint.remote import is_remote, place
from shardwise.checkpoint.stored import INDEX, SINGLE, Stored, of_checkpoint, of_safetensors
from shardwise.errors import InputError

FILE_BYTES = 5 * 10**9  # of one file of a folder, as transformers writes them
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def find(path: str | Path) -> Path:
    """Returns the checkpoint that a path means: itself, or the newest in a run's folder or its `checkpoints`.

    Raises `InputError` if there is none.
    """
    checkpoint = _checkpoint_of(place(path))
    if checkpoint is None:
        if not place(path).exists():
            raise InputError(f"{path}: there is no such file or folder")
        below = [] if is_remote(place(path)) else [run for run in sorted(Path(path).glob("*/")) if _checkpoint_of(run)]
        advice = f"as {below[-1]}" if below else "or a checkpoint in it"
        raise InputError(f"{path}: it is no checkpoint, and holds none; give the folder of a run, {advice}")
    return checkpoint


def _checkpoint_of(path: Path) -> Path | None:
    """Returns the checkpoint that `path` means, as `find` does, or None if there is none."""
    if (path / manifest.NAME).exists():
        return path
    return next((published[0] for folder in (path / "checkpoints", path) if (published := publish.scan(folder))), None)


def opened(path: str | Path) -> Stored:
    """Returns the open tensors of a checkpoint, of a run's newest checkpoint, or of a safetensors file or folder.

    Raises `InputError` for anything else, and for files whose sizes or headers are wrong (digests are not checked).
    The caller closes it.
    """
    checkpoint = _checkpoint_of(place(path))
    if checkpoint is None and not is_remote(place(path)) and Path(path).exists():
        return of_safetensors(Path(path))
    return of_checkpoint(find(path))


def summary(path: str | Path) -> dict[str, Any]:
    """Returns a description of a checkpoint as JSON. Raises `InputError` if `path` means no checkpoint.

    "checkpoint"   its path; "bytes": of all its files; "files": name -> bytes
    "step", "plan", "task", "world_size", "optimizer_class", "data", "versions"   as saved, None where absent
    "kinds"        prefix of tensors' names ("model", "buffer", "optimizer", ...) -> tensors, elements, bytes, pieces
    "weights"      name -> {"dtype", "shape", "pieces"} of weights and buffers
    """
    folder = find(path)
    content = manifest.read(folder)
    kinds: dict[str, dict[str, int]] = {}
    for name, tensor in content.tensors.items():
        row = kinds.setdefault(name.partition("/")[0], {"tensors": 0, "elements": 0, "bytes": 0, "pieces": 0})
        row["tensors"] += 1
        row["elements"] += math.prod(tensor.shape)
        row["bytes"] += tensor.size_bytes
        row["pieces"] += len(tensor.parts)
    fields = content.fields
    keys = ("step", "plan", "task", "world_size", "optimizer_class", "data", "versions")
    facts = {key: fields.get(key) for key in keys}
    return {
        "checkpoint": str(folder),
        **facts,
        "bytes": content.size_bytes,
        "files": {name: file.size_bytes for name, file in content.files.items()},
        "kinds": kinds,
        "weights": {
            name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "pieces": len(tensor.parts)}
            for name, tensor in content.tensors.items()
            if name.startswith(("model/", "buffer/"))
        },
    }


# --- weights out


def state_dict_names(stored: Stored, ema: bool = False) -> dict[str, str]:
    """Returns {name in the module's `state_dict`: name in `stored`}; for plain safetensors both are the same.

    ema   Whether trained weights are replaced by their moving averages; `InputError` if there are none
    """
    # plain safetensors have no manifest that maps names
    if stored.manifest is None:
        return {name: name for name in stored.tensors}
    # frozen weights that the checkpoint leaves to the task's files
    lie_elsewhere = {f"model/{name}" for name in stored.elsewhere}
    names = {name: key for name, key in stored.manifest.fields["names"].items() if key not in lie_elsewhere}
    if ema:
        averages = {name: "ema" + key.removeprefix("model") for name, key in names.items()}
        # untrained weights and buffers have no average: they stand as they are
        if not any(key in stored.tensors for key in averages.values()):
            raise InputError(f"{stored.folder} has no moving average: train.ema_decay was not set")
        names = {name: averages[name] if averages[name] in stored.tensors else key for name, key in names.items()}
    return names


def convert(
    source: str | Path, target: str | Path, *, ema: bool = False, file_bytes: int = FILE_BYTES, trained: bool = False
) -> list[Path]:  # fmt: skip
    """Writes weights and persistent buffers as safetensors under the names of the `state_dict`; returns the files.

    source      as `opened` takes it; a checkpoint's digests are verified first
    target      a new file `*.safetensors`, or a new folder for `model.safetensors` or several files and their index
    ema         Whether trained weights are replaced by their moving averages
    file_bytes  largest size of one file in a folder
    trained     Whether to accept a checkpoint without its frozen weights, and write what was trained alone

    Raises `InputError` if the target exists, the source is damaged, or it lacks weights or averages.
    """
    target = Path(target)
    if os.path.lexists(target):
        raise InputError(f"{target} exists: give a new name")
    with opened(source) as stored:
        wrong = publish.verify(stored.folder) if stored.manifest is not None else []
        if wrong:
            raise InputError("; ".join(wrong))
        # files without the frozen weights would load into no model
        if stored.elsewhere and not trained:
            raise InputError(
                f"{stored.folder} holds what was trained; {len(stored.elsewhere)} frozen weights are in the files that "
                "its task reads: --merge writes the whole model of a run with [lora], and a run that has ended has "
                "all its weights in model.safetensors"
            )
        names = state_dict_names(stored, ema)
        # written under another name, then renamed, so that an existing target is always complete
        partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
        if target.suffix == ".safetensors":
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(stored, names, partial)
            Disk().rename(partial, target)
            return [target]
        partial.mkdir(parents=True)
        files = _write_folder(stored, names, partial, file_bytes)
        Disk().rename(partial, target)
        return [target / file for file in files]


def _write_folder(stored: Stored, names: dict[str, str], folder: Path, file_bytes: int) -> list[str]:
    """Writes tensors as safetensors files of at most `file_bytes`, with an index if there are several.

    names   name in the files -> name in `stored`

    Returns the names of the safetensors files. A larger tensor has a file of its own.
    """
    groups: list[dict[str, str]] = [{}]
    size_bytes = 0
    for name, key in names.items():
        size = stored.tensors[key].size_bytes
        # never start a second file while the first is empty, even if one tensor exceeds the limit
        if groups[-1] and size_bytes + size > file_bytes:
            groups.append({})
            size_bytes = 0
        groups[-1][name] = key
        size_bytes += size
    count = len(groups)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for file, group in zip(files, groups, strict=True):
        _write(stored, group, folder / file)
    # transformers finds a single file by its name, several by their index
    if count > 1:
        total = sum(stored.tensors[key].size_bytes for key in names.values())
        of = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(of.items()))}
        Disk().file(folder / INDEX, [json.dumps(index, indent=2).encode() + b"\n"])
    return files


def _write(stored: Stored, names: dict[str, str], path: Path) -> None:
    """Writes tensors of `stored` as one safetensors file; `names`: {name in the file: name in `stored`}."""
    tensors = {name: stored.tensors[key] for name, key in names.items()}
    header, entries = header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for name in sorted(entries, key=lambda name: entries[name].begin):
            if tensors[name].size_bytes:
                yield _whole(stored, names[name]).view(np.uint8).data

    Disk().file(path, parts())


def _whole(stored: Stored, name: str) -> np.ndarray:
    return stored.read(name, Piece.whole(stored.tensors[name].shape))


# --- what is different


def diff(first_path: str | Path, other: str | Path) -> list[dict[str, Any]]:
    """Returns a row {"name", "what", "largest"} for each difference between two checkpoints or safetensors, to the bit.

    name     of the tensor, or of a field of the manifest such as "step"
    what     the difference, in words
    largest  largest absolute difference of elements; None unless both tensors are floats of one shape, and finite

    Two checkpoints are compared in all tensors and in their fields; a checkpoint and safetensors by the names of the
    module's `state_dict`.
    """
    with opened(first_path) as first, opened(other) as second:
        names = [{name: name for name in stored.tensors} for stored in (first, second)]
        if (first.manifest is None) != (second.manifest is None):  # a checkpoint beside safetensors
            names = [state_dict_names(stored) for stored in (first, second)]
        rows = [
            {"name": name, "what": f"only in {first_path if name in names[0] else other}", "largest": None}
            for name in sorted(names[0].keys() ^ names[1].keys())
        ]
        for name in sorted(names[0].keys() & names[1].keys()):
            row = _differs(first, names[0][name], second, names[1][name])
            if row is not None:
                rows.append({"name": name, **row})
        # safetensors alone have no step, plan or data position to compare
        if first.manifest is not None and second.manifest is not None:
            rows += _facts(first.manifest.fields, second.manifest.fields)
        return rows


def _facts(first: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns rows (as `diff`) for the fields of two manifests that differ: step, data position, optimizer, groups."""
    rows = []
    large = {"optimizer": "other numbers", "groups": "other options of its groups"}
    for key in ("step", "data", "engine", "optimizer_class", *large):
        if first.get(key) != other.get(key):
            what = large.get(key) or f"{_short(first.get(key))} and {_short(other.get(key))}"
            rows.append({"name": key, "what": what, "largest": None})
    return rows


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else text[:97] + "..."


def _differs(first: Stored, a: str, second: Stored, b: str) -> dict[str, Any] | None:
    """Returns {"what", "largest"}, as `diff`, of tensors `a` (of `first`) and `b` (of `second`); None if bits agree."""
    left, right = first.tensors[a], second.tensors[b]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return {"what": f"{left.dtype} {left.shape} and {right.dtype} {right.shape}", "largest": None}
    values, others = _whole(first, a), _whole(second, b)
    differ = np.flatnonzero(values != others)
    if not differ.size:
        return None
    largest = None
    if left.dtype in _FLOATS or left.dtype == "BF16":
        gaps = np.abs(_floats(values[differ], left) - _floats(others[differ], left))
        largest = float(gaps.max()) if np.isfinite(gaps).all() else None
    return {"what": f"{differ.size} of {values.size} elements differ", "largest": largest}


def _floats(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Returns a tensor's stored values as float64."""
    if tensor.dtype == "BF16":
        # numpy has no bfloat16; it is the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert values.itemsize == ITEM_BYTES[tensor.dtype]
    return values.view(_FLOATS[tensor.dtype]).astype(np.float64)
