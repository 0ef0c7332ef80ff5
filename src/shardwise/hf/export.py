"""`export(weights, folder, source)`: write a folder that `from_pretrained` and inference servers read.

Unsharded weights are gathered one by one (collective, from an engine's shards), and rank 0 writes them in files of at
most `file_bytes`, with an index if there are several, under the names that `save_pretrained` would use. A tied weight
is written once, under its first name. The folder is written under a temporary name and renamed when it is complete.

What this does not do: stream a model whose tensors transformers merges or splits between disk and memory; rank 0 then
holds all of them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.adapters.peft_files import has_adapters, of_adapters, write_adapters
from shardwise.checkpoint.inspect import FILE_BYTES
from shardwise.comm import gather_json
from shardwise.engine.engine import Engine
from shardwise.engine.weights_out import trained_tensors
from shardwise.errors import InputError
from shardwise.heads import read_config
from shardwise.hf.folder_tensors import INDEX, SINGLE
from shardwise.hf.names import as_on_disk, is_renamed
from shardwise.task_files import folder_above

# ends of names of files in `source` that hold weights, which are not copied
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".msgpack", ".h5", ".onnx")


def export(
    weights: Engine | str | Path, folder: str | Path, source: Any, *, dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES, merge: bool = False,
) -> Path:  # fmt: skip
    """Writes a model as a Hugging Face checkpoint folder; returns the folder. Collective with an engine, then closed.

    weights    an engine, or a path: the `model.safetensors` of a run; with `merge` a folder of peft's adapters
    folder     to be made; must not exist
    source     the checkpoint folder, or the configuration, that the task was made of; a folder's other files
               (tokenizer, generation settings) are copied
    dtype      of floating-point weights; None: as they are
    file_bytes largest size of a weights file
    merge      whether to merge adapters into the model of the folder `source`, in float32, on rank 0 alone

    Raises `InputError`, before anything is written, if the folder exists, and for weights (such as adapters) whose
    names `from_pretrained` would not find.
    """
    folder = Path(folder)
    writes = not isinstance(weights, Engine) or weights.rank == 0
    config = read_config(source)
    there = folder.exists()
    if isinstance(weights, Engine):  # all ranks look before rank 0 writes, and all raise if one found it
        there = any(gather_json(there, weights.mesh.world, weights.device))
    if there:
        raise InputError(f"{folder} exists: export writes a new folder")
    if merge:
        return _export_merged(weights, folder, source, dtype, file_bytes)
    _check_names(weights, config)
    partial = folder.with_name(f".{folder.name}.partial")
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    tensors = _of_engine(weights) if isinstance(weights, Engine) else _of_file(Path(weights))
    named = _named(tensors, weights, config, writes)
    files = _Files(partial, file_bytes) if writes else None
    for name, tensor in named:
        if files is not None:
            wide = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            files.add(name, tensor.detach().to("cpu", wide).contiguous().clone())
    if files is not None:
        _save_config(config, partial, _class_of(weights, config), dtype or files.dtype)
        _copy_others(source, partial)
        files.finish()
        partial.replace(folder)
    if isinstance(weights, Engine):
        weights.close()  # waits for all ranks, so that none continues before the folder exists
    return folder


def _export_merged(
    weights: Engine | str | Path, folder: Path, source: Any, dtype: torch.dtype | None, file_bytes: int
) -> Path:
    """Writes the model with its adapters merged; arguments and result as of `export`. Collective with an engine."""
    from shardwise.hf.merge import save_merged

    partial = folder.with_name(f".{folder.name}.partial")
    with tempfile.TemporaryDirectory() as between:
        adapters = weights if not isinstance(weights, Engine) else save_adapters(weights, Path(between) / "adapter")
        if not isinstance(weights, Engine) or weights.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            save_merged(Path(adapters), source, dtype, partial, file_bytes)
            _copy_others(source, partial)
            partial.replace(folder)
    if isinstance(weights, Engine):
        weights.close()
    return folder


def save_adapters(engine: Engine, folder: str | Path) -> Path:
    """Writes the engine's adapters as files for `peft.PeftModel.from_pretrained`; returns the folder. Collective.

    Only trained tensors and adapters are gathered, one by one; rank 0 writes. Raises `InputError` without adapters.
    """
    if not has_adapters(engine.module):
        raise InputError("save_adapters: peft has written no adapters into this model: hf.export writes whole weights")
    frozen = of_adapters(engine.module, engine.state.frozen_names)
    tensors = trained_tensors(engine.state, frozen, rank_0_only=True)
    if engine.rank == 0:
        write_adapters(engine.module, tensors, Path(folder))
    return Path(folder)


def _check_names(weights: Engine | str | Path, config: Any) -> None:
    """Raise `InputError` if the weights' names are not the architecture's; `from_pretrained` would make up the rest."""
    kind = _class_of(weights, config)
    # no class is known whose names could be compared
    if kind is None:
        return
    if isinstance(weights, Engine):
        buffers = set(weights.module.state_dict()) & {name for name, _ in weights.module.named_buffers()}
        names = {*weights.state.all_names, *weights.state.frozen_names, *buffers}
    else:
        names = _names_in(Path(weights))
    try:
        with torch.device("meta"):
            model = kind(config)
    except TypeError as error:  # a wrapper around a model of transformers
        raise InputError(f"export: {kind.__name__} is no model of transformers that its configuration makes") from error
    own = dict(model.state_dict(keep_vars=True))
    # a tied weight has several names and is stored under one, so missing names are compared by identity
    stored = {id(own[name]) for name in names & own.keys()}
    missing = sorted(name for name, tensor in own.items() if name not in names and id(tensor) not in stored)
    unknown = sorted(names - own.keys())
    if missing or unknown:
        told = [f"{what} {', '.join(some[:2])}" for what, some in (("lack", missing), ("have", unknown)) if some]
        adapters = ": merge=True merges the adapters into the model" if any("lora_" in name for name in unknown) else ""
        raise InputError(
            f"export: the weights {' and '.join(told)} ({len(missing)} and {len(unknown)} in all), so that "
            f"{kind.__name__}.from_pretrained would not be this model{adapters}"
        )


def _of_engine(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, unsharded tensor) of parameters and persistent buffers. Collective."""
    yield from engine.full_parameters()
    kept = set(engine.module.state_dict())
    for name, buffer in engine.module.named_buffers():
        if name in kept:
            yield name, buffer


def _names_in(path: Path) -> set[str]:
    """Returns the names of tensors in a safetensors file, or in all files of its folder if it is a checkpoint's."""
    from safetensors import safe_open

    from shardwise.hf.folder_tensors import Checkpoint

    if path.name in (SINGLE, INDEX):
        return set(Checkpoint(path.parent).files)
    with safe_open(str(path), framework="pt", device="cpu") as file:
        return set(file.keys())


def _of_file(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of a safetensors file, or of all files of its folder if it is a checkpoint's."""
    from safetensors import safe_open

    from shardwise.hf.folder_tensors import Checkpoint

    checkpoint = Checkpoint(path.parent) if path.name in (SINGLE, INDEX) else None
    if checkpoint is not None:
        for name in checkpoint.files:
            yield name, checkpoint.read(name)
        return
    with safe_open(str(path), framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)


def _named(
    tensors: Iterator[tuple[str, torch.Tensor]], weights: Any, config: Any, writes: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name on disk, tensor). If transformers renames, merges or splits some, rank 0 holds all of them.

    tensors  (name in the model, tensor);  writes  whether this rank writes
    """
    kind = _class_of(weights, config)
    if kind is None:
        yield from tensors
        return
    with torch.device("meta"):
        model = kind(config)
    if not is_renamed(model):
        yield from tensors
        return
    whole = {}
    for name, tensor in tensors:  # collective, so every rank iterates
        if writes:
            whole[name] = tensor.detach().to("cpu")
    yield from as_on_disk(model, whole).items()


def _class_of(weights: Any, config: Any) -> Any:
    """Returns the model's class: that of the engine's module, else the configuration's first architecture, or None."""
    if isinstance(weights, Engine):
        return next((kind for kind in type(weights.module).__mro__ if "FSDP" not in kind.__name__), None)
    import transformers

    names = getattr(config, "architectures", None) or []
    return getattr(transformers, names[0], None) if names else None


class _Files:
    """Writes tensors into files of at most `file_bytes` each, which get their final names when their number is known.

    dtype  of the first floating-point tensor, or None
    """

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self.folder, self.file_bytes = folder, file_bytes
        self.waiting: dict[str, torch.Tensor] = {}  # tensors of the next file
        self.waiting_bytes = self.total_bytes = 0
        self.names: list[list[str]] = []  # names of the tensors in each file written
        self.dtype: torch.dtype | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one tensor; first writes a file if it would exceed `file_bytes` with the tensor."""
        if self.waiting and self.waiting_bytes + tensor.nbytes > self.file_bytes:
            self._write()
        self.waiting[name] = tensor
        self.waiting_bytes += tensor.nbytes
        if self.dtype is None and tensor.is_floating_point():
            self.dtype = tensor.dtype

    def _write(self) -> None:
        """Writes the waiting tensors as one file with a temporary name."""
        from safetensors.torch import save_file

        save_file(self.waiting, str(self.folder / f"part-{len(self.names)}"), metadata={"format": "pt"})
        self.names.append(list(self.waiting))
        self.total_bytes += self.waiting_bytes
        self.waiting, self.waiting_bytes = {}, 0

    def finish(self) -> None:
        """Writes the last file, renames all files, and writes an index if there are several."""
        if self.waiting:
            self._write()
        count = len(self.names)
        weight_map: dict[str, str] = {}
        for place, names in enumerate(self.names):
            file = SINGLE if count == 1 else f"model-{place + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"part-{place}").rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save_config(config: Any, folder: Path, architecture: Any, dtype: torch.dtype | None) -> None:
    """Writes config.json as transformers does, with the name of the class `architecture` and `dtype`, unless None."""
    config.save_pretrained(str(folder))
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    if architecture is not None:
        fields["architectures"] = [architecture.__name__]
    if dtype is not None:
        fields["dtype"] = str(dtype).removeprefix("torch.")
    fields.pop("use_cache", None)  # it was switched off for training only
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_others(source: Any, folder: Path) -> None:
    """Copies the other files (tokenizer, chat template) of the folder `source`; nothing if it is a configuration."""
    if not isinstance(source, str | Path):
        return
    for path in Path(source).iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_NOT_COPIED):
            shutil.copy2(path, folder / path.name)


def merge_run(run: Path, source: str | None, target: Path) -> Path:
    """Writes a run's model, with its adapters merged, to the folder `target`; returns that.

    run      the run's folder
    source   checkpoint folder of the base model; None: that of the run's task
    Raises `InputError` for a run without adapters, and if the base model's folder is unknown.
    """
    from shardwise.checkpoint.inspect import convert
    from shardwise.config import load
    from shardwise.hf.merge import adapters_of_checkpoint
    from shardwise.training.job import find_task

    if not (run / "config.toml").is_file():
        raise InputError(f"--merge: {run} is no run's folder (it has no config.toml)")
    if "rank" not in tomllib.loads((run / "config.toml").read_text(encoding="utf-8")).get("lora", {}):
        raise InputError(f"--merge: {run} has no adapters of [lora]: convert it without --merge")
    task = find_task(load(run / "config.toml"), None)
    source = source or getattr(task.weights, "folder", None)
    if source is None:
        raise InputError("--merge: the task's model is no folder's: give --like FOLDER, whose weights were adapted")
    with tempfile.TemporaryDirectory(dir=folder_above(target)) as between:
        adapters = run / "adapter"
        if not adapters.is_dir():  # the run has not ended, so its last checkpoint is used
            (weights,) = convert(run, Path(between) / "weights.safetensors", trained=True)
            with torch.device("meta"):
                module = task.model()
            adapters = adapters_of_checkpoint(weights, module, Path(between) / "adapter")
        return export(adapters, target, source, merge=True)
