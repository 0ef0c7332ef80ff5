"""Turn tensors of a checkpoint on disk into a model's parameters, by transformers' own renamings and conversions.

For each kind of model transformers has tables of how names on disk become names of parameters, and which tensors are
merged or split (experts into one, a fused projection into three). These tables and functions are used unchanged; a
conversion runs once for each parameter, on only the tensors that it needs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import InputError
from shardwise.hf.folder_tensors import Checkpoint


@dataclass(frozen=True)
class Recipe:
    """How parameters are made from tensors on disk.

    target     transformers' name of the result, by which sources are grouped
    sources    (name on disk, pattern of the converter that it matches or None) of each tensor needed
    converter  transformers' converter; None: the only source is renamed
    shapes     name of each parameter made -> its shape
    """

    target: str
    sources: tuple[tuple[str, str | None], ...]
    converter: Any
    shapes: dict[str, torch.Size]

    def make(self, checkpoint: Checkpoint, name: str, model: Any, dtype: torch.dtype) -> torch.Tensor:
        """Returns the parameter `name`, read from the checkpoint; in `dtype` if it is only renamed."""
        if self.converter is None:
            return checkpoint.read(self.sources[0][0], dtype)
        return self.convert({key: checkpoint.read(key) for key, _ in self.sources}, model)[name]

    def convert(self, tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Returns {parameter: tensor} that the converter makes from `tensors`, {name on disk: source}."""
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.target, key, pattern, tensors[key])
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def recipes_of(model: Any, checkpoint: Checkpoint) -> dict[str, Recipe]:
    """Returns {name in the model: `Recipe` that makes it} for the checkpoint's tensors; reads only their shapes.

    Raises `InputError` for transformers before version 5, and for damaged files.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    # transformers before 5 keeps these tables elsewhere, or not at all
    except ImportError as error:
        raise InputError(f"this transformers does not tell how it names tensors ({error}): version 5 does") from error
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    # each pattern of a converter matches one kind of source
    by_pattern = {pattern: transform for transform in converters for pattern in transform.source_patterns}
    shapes, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, list[tuple[str, str | None]]] = {}
    # in natural order (expert 2 before 10), in which a converter must be given its sources
    for key in sorted(checkpoint.files, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, shapes)
        groups.setdefault(target, []).append((key, pattern))
    recipes: dict[str, Recipe] = {}
    for target, sources in groups.items():
        # all sources of a target have the same converter
        pattern = sources[0][1]
        recipe = Recipe(target, tuple(sources), by_pattern[pattern] if pattern is not None else None, {})
        outlines = {key: checkpoint.outline(key) for key, _ in sources}
        # without a converter the tensor is only renamed, and keeps its shape
        made = {target: outlines[sources[0][0]]} if recipe.converter is None else recipe.convert(outlines, model)
        recipe.shapes.update({name: outline.shape for name, outline in made.items()})
        recipes |= dict.fromkeys(made, recipe)
    return recipes


def as_on_disk(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns {name: tensor} as `save_pretrained` would write it. `tensors`: {name in the model: tensor}."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def is_renamed(model: Any) -> bool:
    """Whether transformers stores this model's tensors under other names, or merged or split differently."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))
