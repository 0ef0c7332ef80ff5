"""Adapters as peft's two files: `write_adapters(module, tensors, folder)`, read by `PeftModel.from_pretrained`.

adapter_config.json         peft's own configuration of the module
adapter_model.safetensors   the trained tensors alone, under the names that peft gives them
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import InputError

ADAPTER, WEIGHTS, CONFIG = "default", "adapter_model.safetensors", "adapter_config.json"
# what peft's configuration calls it -> the key of a configuration here: all of them are part of what adapters compute
_KEYS = {"r": "lora.rank", "lora_alpha": "lora.alpha", "use_rslora": "lora.rslora", "use_dora": "lora.dora"}
_BY_LAYER = ("rank_pattern", "alpha_pattern")  # other values for some layers, which no key here sets
_PREFIX = "base_model.model."  # of every name in the file: peft's two wrappers


def has_adapters(module: nn.Module) -> bool:
    """Whether peft has written adapters into the module, or around it."""
    return isinstance(getattr(module, "peft_config", None), dict)


def are_prompts(module: Any) -> bool:
    """Whether the adapters of a module that has some are learned prompts, which are no layers of it."""
    return all(config.is_prompt_learning for config in module.peft_config.values())


def of_adapters(module: Any, names: Iterable[str]) -> list[str]:
    """Returns those names of parameters that are of the module's adapters: an adapter's name is a part of each."""
    return [name for name in names if not module.peft_config.keys().isdisjoint(name.split("."))]


def write_adapters(module: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """Write whole tensors, by their names in the module, as peft's files; returns `folder`, which is replaced.

    module    only its layers' kinds are looked at, not its weights
    tensors   all parameters of the adapters, whole modules that are trained, and buffers

    As peft has it, an adapter that is not named "default" lies in a folder of its name in the folder.
    Raises `InputError` for adapters that are no layers of the module.
    """
    from peft import get_peft_model_state_dict

    if are_prompts(module):
        (kind,) = {config.peft_type.value for config in module.peft_config.values()}
        raise InputError(f"the adapters ({kind}) are no layers of the model: peft alone can write them")
    # renamed at the end: a folder of that name is whole
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    every = _by_each_name(module, tensors)
    for name, config in module.peft_config.items():
        state = get_peft_model_state_dict(module, state_dict=every, adapter_name=name, save_embedding_layers=False)
        if not config.is_prompt_learning:
            _write_one(module, config, state, partial / ("" if name == ADAPTER else name))
    if folder.exists():  # of an earlier attempt at the same run
        shutil.rmtree(folder)
    partial.replace(folder)
    return folder


def _by_each_name(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors by all names that the module has for them: layers may share one, under a name each."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    value_of = {id(own): tensors[name] for name, own in named if name in tensors}
    return {name: value_of[id(own)] for name, own in named if id(own) in value_of}


def _write_one(module: Any, config: Any, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write one adapter's tensors, by peft's names for them, and its configuration."""
    from peft import PeftModel
    from safetensors.torch import save_file

    prefix = "" if isinstance(module, PeftModel) else _PREFIX
    own = {f"{prefix}{name}": tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    folder.mkdir(exist_ok=True)
    save_file(own, str(folder / WEIGHTS), metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def adapters_at(path: str | Path) -> Path | None:
    """Returns the file of peft's weights that a path is, or that lies in the folder; None for anything else."""
    file = Path(path) / WEIGHTS if Path(path).is_dir() else Path(path)
    return file if file.name == WEIGHTS and (file.parent / CONFIG).is_file() else None


def refuse_other_adapters(file: Path, module: Any) -> None:
    """Raise `InputError` where a file's adapters would compute something else in the module than they do in peft."""
    theirs = json.loads((file.parent / CONFIG).read_text(encoding="utf-8"))
    # adapters must be there before their tensors can be put in; the message gives what they were made with
    if not has_adapters(module):
        keys = " ".join(f"--set {key}={json.dumps(theirs[name])}" for name, key in _KEYS.items() if theirs.get(name))
        raise InputError(f"{file} holds adapters, and the model has none: {keys}")
    own = module.peft_config.get(ADAPTER)
    if own is None:
        raise InputError(f"{file} goes into the adapter '{ADAPTER}', and the model has {', '.join(module.peft_config)}")
    for name in _BY_LAYER:
        if (theirs.get(name) or {}) != (getattr(own, name, None) or {}):
            raise InputError(
                f"{file} was trained with {name} = {json.dumps(theirs.get(name) or {})}, and this run has another, and "
                "[lora] has no key for it: make the adapters in the task, by peft.get_peft_model"
            )
    # a key that the file does not have leaves the run's own setting as it is
    for name, key in _KEYS.items():
        value = getattr(own, name, None)
        if name in theirs and value != theirs[name]:
            wanted = json.dumps(theirs[name])
            raise InputError(
                f"{file} was trained with {key} = {wanted}, and this run has {value}: --set {key}={wanted}"
            )
