"""`task(source, head, ...)`: a `Task` around a transformers model (heads: heads.py; weights: hf/checkpoint).

The model is built by the configuration without its weights; each weight is then read from the checkpoint when its
place is made, or drawn from the seed where there is no checkpoint. Losses are sums with the number of labels that
count as their weight, whatever the model itself would return.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import InputError, did_you_mean
from shardwise.heads import HEADS, build_model, read_config, settings
from shardwise.hf.checkpoint import Checkpoint
from shardwise.hf.names import Recipe, recipes_of
from shardwise.task import Task

if TYPE_CHECKING:
    from torch import Tensor, nn


def task(source: Any, head: str = "causal-lm", *, new: bool = False, **fields: Any) -> Task:
    """Returns a task from a checkpoint folder (its weights are read) or a transformers configuration (they are drawn).

    source   a local folder with config.json and safetensors files, or a configuration object
    head     "causal-lm", "masked-lm", "seq2seq", "speech-seq2seq", "image-text", "token-", "sequence-", "image-" or
             "audio-classification"
    new      parameters that the checkpoint lacks (a new head) are drawn from the seed; else they are refused
    fields   of `Task`: data or batch, optimizer, eval_data, ... A batch is a dict with "labels"; the rest of it goes
             to the model. -100 is no label

    Raises `InputError` for a folder that cannot be read, a model without that head, and names that do not match.
    """
    if head not in HEADS:
        raise InputError(f"head {head!r}: expected one of {', '.join(HEADS)}{did_you_mean(head, list(HEADS))}")
    config = copy.deepcopy(_config_of(source))  # the model is built without a cache
    build = partial(build_model, config, head)
    weights = None
    if isinstance(source, str | Path):
        weights = Weights(source, config, head, new)
    return Task(model=build, weights=weights, **{**settings(config, head), **fields})


def _config_of(source: Any) -> Any:
    if isinstance(source, str | Path) and Path(source).is_file():
        raise InputError(f"{source} is a file: give the checkpoint folder that holds it, or the configuration object")
    return read_config(source)


class Weights:
    """Callable: parameter -> its value in a checkpoint, None for one that is drawn; the `Task.weights` of a folder."""

    def __init__(self, folder: str | Path, config: Any, head: str, new: bool) -> None:
        self.folder, self.config, self.head, self.new = folder, config, head, new
        self.checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            self.model = build_model(config, head)
        made = recipes_of(self.model, self.checkpoint)
        self.recipes: dict[str, tuple[str, Recipe]] = {}  # parameter -> the name that it is made under, and how
        missing = []
        aliases = _aliases(self.model)
        for name, names in aliases.items():
            taken = next((other for other in names if other in made), None)
            if taken is None:
                missing.append(name)
            else:
                self.recipes[name] = taken, made[taken]
        self._refuse(
            missing, sorted(made.keys() - {other for names in aliases.values() for other in names}), len(aliases)
        )

    def __call__(self, name: str) -> Tensor | None:
        if name not in self.recipes:
            return None
        taken, recipe = self.recipes[name]
        return recipe.make(self.checkpoint, taken, self.model)

    def __reduce__(self) -> tuple:
        return Weights, (self.folder, self.config, self.head, self.new)

    def _refuse(self, missing: list[str], left: list[str], count: int) -> None:
        if not self.recipes:
            raise InputError(f"{self.folder} holds none of the model's tensors: it is another model's")
        if missing and not self.new:
            told = f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}"
            over = f"; it holds {', '.join(left[:4])} besides, which the model does not know" if left else ""
            raise InputError(
                f"{self.folder} lacks {len(missing)} of the model's {count} tensors: {told}{over}. Give new=True if "
                "they are a new head, to be drawn from the seed"
            )


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Returns parameter or kept buffer -> every name it goes by; tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *_kept_buffers(model)):
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in names.values()}


def _kept_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    kept = set(model.state_dict())
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
