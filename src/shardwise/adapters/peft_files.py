"""Adapters as peft's two files: `write_adapters(module, tensors, folder)`, read by `PeftModel.from_pretrained`.

adapter_config.json         peft's own configuration of the module
adapter_model.safetensors   the trained tensors alone, under the names that peft gives them
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import InputError

ADAPTER, WEIGHTS, CONFIG = "default", "adapter_model.safetensors", "adapter_config.json"
# what peft's configuration calls it -> the key of a configuration here: all of them are part of what adapters compute
_KEYS = {"r": "lora.rank", "lora_alpha": "lora.alpha", "use_rslora": "lora.rslora", "use_dora": "lora.dora"}
_PREFIX = "base_model.model."  # of every name in the file: peft's two wrappers


def has_adapters(module: nn.Module) -> bool:
    """Whether peft has written adapters into the module, or around it."""
    return isinstance(getattr(module, "peft_config", None), dict)


def write_adapters(module: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """Write whole trained tensors, by their names in the module, as peft's files in a new folder; returns it.

    module   only its layers' kinds are looked at, not its weights

    Raises `InputError` for adapters that are no layers of the module.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import save_file

    config = module.peft_config[ADAPTER]
    if config.is_prompt_learning:
        raise InputError(
            f"the adapters ({config.peft_type.value}) are no layers of the model: peft alone can write them"
        )
    state = get_peft_model_state_dict(
        module, state_dict=dict(tensors), adapter_name=ADAPTER, save_embedding_layers=False
    )
    prefix = "" if isinstance(module, PeftModel) else _PREFIX
    own = {f"{prefix}{name}": tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(own, str(partial / WEIGHTS), metadata={"format": "pt"})
    config.save_pretrained(str(partial))
    if folder.exists():  # of an earlier attempt at the same run
        shutil.rmtree(folder)
    partial.replace(folder)
    return folder


def adapters_at(path: str | Path) -> Path | None:
    """Returns the file of peft's weights that a path is, or that lies in the folder; None for anything else."""
    file = Path(path) / WEIGHTS if Path(path).is_dir() else Path(path)
    return file if file.name == WEIGHTS and (file.parent / CONFIG).is_file() else None


def refuse_other_adapters(file: Path, module: Any) -> None:
    """Raise `InputError` where a file's adapters would compute something else in the module than they do in peft."""
    theirs = json.loads((file.parent / CONFIG).read_text(encoding="utf-8"))
    if not has_adapters(module):
        keys = " ".join(f"--set {key}={json.dumps(theirs[name])}" for name, key in _KEYS.items() if theirs.get(name))
        raise InputError(f"{file} holds adapters, and the model has none: {keys}")
    own = module.peft_config[ADAPTER]
    for name, key in _KEYS.items():
        value = getattr(own, name, None)
        if name in theirs and value != theirs[name]:
            wanted = json.dumps(theirs[name])
            raise InputError(
                f"{file} was trained with {key} = {wanted}, and this run has {value}: --set {key}={wanted}"
            )
