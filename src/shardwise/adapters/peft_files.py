"""Write adapters as peft's two files, which `PeftModel.from_pretrained` reads, and check such files for loading.

adapter_config.json         peft's own configuration of the module
adapter_model.safetensors   the adapters' tensors, and modules trained whole, under peft's names
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
# field of peft's configuration -> key of our configuration; adapters with other values compute something else
_KEYS = {"r": "lora.rank", "lora_alpha": "lora.alpha", "use_rslora": "lora.rslora", "use_dora": "lora.dora"}
_BY_LAYER = ("rank_pattern", "alpha_pattern")  # other values for some layers, which no key here sets
_PREFIX = "base_model.model."  # of every name in the file, from peft's two wrapper classes


def has_adapters(module: nn.Module) -> bool:
    """Whether the module has adapters of peft, injected or by a wrapper."""
    return isinstance(getattr(module, "peft_config", None), dict)


def are_prompts(module: Any) -> bool:
    """Whether all adapters of a module that has some are learned prompts, which are no layers of it."""
    return all(config.is_prompt_learning for config in module.peft_config.values())


def of_adapters(module: Any, names: Iterable[str]) -> list[str]:
    """Returns those of `names` that are parameters of adapters, whose paths contain an adapter's name ("default")."""
    return [name for name in names if not module.peft_config.keys().isdisjoint(name.split("."))]


def write_adapters(module: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """Writes adapters as peft's files into `folder`, which is replaced if it exists; returns it.

    module    with the adapters; its weights' values are not read
    tensors   name in the module -> unsharded tensor, of the adapters' parameters, modules trained whole, and buffers

    An adapter that is not named "default" gets a subfolder of its name, as peft does it. Raises `InputError` for
    learned prompts.
    """
    from peft import get_peft_model_state_dict

    if are_prompts(module):
        (kind,) = {config.peft_type.value for config in module.peft_config.values()}
        raise InputError(f"the adapters ({kind}) are no layers of the model: peft alone can write them")
    # renamed at the end, so that a folder of the final name is complete
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    every = _by_each_name(module, tensors)
    for name, config in module.peft_config.items():
        state = get_peft_model_state_dict(module, state_dict=every, adapter_name=name, save_embedding_layers=False)
        if not config.is_prompt_learning:
            _write_one(module, config, state, partial / ("" if name == ADAPTER else name))
    if folder.exists():  # from an earlier attempt of the run
        shutil.rmtree(folder)
    partial.replace(folder)
    return folder


def _by_each_name(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns {name: tensor} with every name that the module has for a tensor, since layers may share one."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    value_of = {id(own): tensors[name] for name, own in named if name in tensors}
    return {name: value_of[id(own)] for name, own in named if id(own) in value_of}


def _write_one(module: Any, config: Any, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes one adapter's tensors (`state`: peft's name -> tensor) and its configuration into a folder."""
    from peft import PeftModel
    from safetensors.torch import save_file

    prefix = "" if isinstance(module, PeftModel) else _PREFIX
    own = {f"{prefix}{name}": tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    folder.mkdir(exist_ok=True)
    save_file(own, str(folder / WEIGHTS), metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def adapters_at(path: str | Path) -> Path | None:
    """Returns the file of adapters' weights that `path` is, or that its folder contains; None if there is none."""
    file = Path(path) / WEIGHTS if Path(path).is_dir() else Path(path)
    return file if file.name == WEIGHTS and (file.parent / CONFIG).is_file() else None


def refuse_other_adapters(file: Path, module: Any) -> None:
    """Raise `InputError` if the adapters of a file were made with other settings than those of the module.

    file  a path from `adapters_at`
    """
    theirs = json.loads((file.parent / CONFIG).read_text(encoding="utf-8"))
    # the module must have adapters to load into; the message gives the settings for them
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
    # only settings that the file has are compared
    for name, key in _KEYS.items():
        value = getattr(own, name, None)
        if name in theirs and value != theirs[name]:
            wanted = json.dumps(theirs[name])
            raise InputError(
                f"{file} was trained with {key} = {wanted}, and this run has {value}: --set {key}={wanted}"
            )
