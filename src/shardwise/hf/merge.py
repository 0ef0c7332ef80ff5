"""Merge adapters into their base model, in one process, and write a folder that `from_pretrained` reads.

    W + (alpha / rank) B A        in float32, by peft's own layers

What this does not do: merge without the whole model in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwise.adapters.peft_files import CONFIG, WEIGHTS, of_adapters, write_adapters
from shardwise.errors import InputError


def save_merged(
    adapters: Path, source: str | Path, dtype: torch.dtype | None, folder: Path, file_bytes: int
) -> None:  # fmt: skip
    """Writes the transformers model of the folder `source`, with adapters merged, to `folder`; raises as `merged`.

    adapters    folder of peft's files;  dtype  of the weights written; None: float32
    file_bytes  largest size of a weights file
    transformers' progress bars are switched off.
    """
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        merged(adapters, source, dtype).save_pretrained(str(folder), max_shard_size=file_bytes)
    finally:
        if were_shown:
            logging.enable_progress_bar()


def merged(adapters: Path, source: str | Path, dtype: torch.dtype | None = None) -> Any:
    """Returns the transformers model of the folder `source` with the adapters of a folder merged, in `dtype`.

    Raises `InputError` if the folder has no adapters, or those of another model. dtype None: float32.
    """
    import transformers
    from peft import PeftModel
    from safetensors import safe_open

    if not (adapters / CONFIG).is_file() or not (adapters / WEIGHTS).is_file():
        raise InputError(f"{adapters} holds no adapters: a folder with {CONFIG} and {WEIGHTS}")
    config = transformers.AutoConfig.from_pretrained(str(source), local_files_only=True)
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
    model = kind.from_pretrained(str(source), dtype=torch.float32, local_files_only=True)
    with safe_open(str(adapters / WEIGHTS), framework="pt", device="cpu") as file:
        of_adapters = sum(".lora_" in name for name in file.keys())  # noqa: SIM118 - not a dict
    try:
        adapted = PeftModel.from_pretrained(model, str(adapters))
    except (ValueError, RuntimeError) as error:  # no such layers, other sizes
        raise InputError(f"{adapters} are adapters of another model than {source}: {str(error)[:300]}") from error
    there = sum(".lora_" in name for name, _ in adapted.named_parameters())
    if there != of_adapters:
        raise InputError(
            f"{adapters} are adapters of another model than {source}: it has {of_adapters} tensors for layers, "
            f"of which the model takes {there}"
        )
    return adapted.merge_and_unload().to(dtype or torch.float32)


def adapters_of_checkpoint(weights: Path, module: Any, folder: Path) -> Path:
    """Writes the adapters among the tensors of `weights`, a safetensors file, as peft's files; returns `folder`.

    module  the model with adapters, on the meta device
    """
    from safetensors import safe_open

    frozen = {name for name, param in module.named_parameters() if not param.requires_grad}
    frozen -= {*of_adapters(module, frozen)}
    with safe_open(str(weights), framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in set(file.keys()) - frozen}
    return write_adapters(module, tensors, folder)
