"""Finds configured models with equal layers, which are forecast from the same model with few layers.

Layers are equal if their modules have the same classes, shapes of weights and plain attributes, except for attributes
that grow with the layer's index (`layer_idx`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import device, nn

from shardwise.config.schema import LoraSection
from shardwise.heads import read_config
from shardwise.task import Task
from shardwise.trace.blocks import find_blocks

DEPTHS = 5, 6  # numbers of layers that are traced: with fewer, a layer would be split into blocks of its own
WORTH = 2 * sum(DEPTHS)  # fewest layers for which tracing few of them saves time
_PLAIN = (int, float, str, bool, tuple, list, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class AlikeLayers:
    """A task's number of equal layers, and a function that returns the task with another number of layers."""

    count: int
    shorter: Callable[[int], Task]  # number of layers -> the task with as many


def with_layers(config: Any, count: int) -> Any:
    """Returns a copy of a transformers configuration with `count` layers."""
    config = copy.deepcopy(read_config(config))
    config.num_hidden_layers = count
    return config


def alike_layers(config: Any, build: Callable[[], nn.Module], lora: LoraSection | None) -> int:
    """Returns the number of equal layers of a configured model; 0 if they differ, or are too few to save time.

    config  transformers' configuration, or its path; `build`: returns its model; `lora`: adapters, None without
    """
    count = getattr(read_config(config), "num_hidden_layers", 0)
    # names with digits may select some layers for adapters and not others
    named = [] if lora is None else [*lora.targets, *lora.whole]
    if not isinstance(count, int) or count < WORTH or any(letter.isdigit() for name in named for letter in name):
        return 0
    with device("meta"):
        model = build()
    blocks = [model.get_submodule(path) for path in find_blocks(model).paths]
    same = len(blocks) == count and all(_alike(blocks[0], block, place) for place, block in enumerate(blocks))
    return count if same else 0


def _alike(first: nn.Module, other: nn.Module, place: int) -> bool:
    """Whether a block that comes `place` blocks after the first has the same structure and attributes."""
    pairs = [*zip(first.named_modules(), other.named_modules(), strict=False)]
    weights = [[(name, param.shape, param.dtype, param.requires_grad) for name, param in block.named_parameters()]
               for block in (first, other)]  # fmt: skip
    sizes = len([*first.modules()]) == len([*other.modules()]) and weights[0] == weights[1]
    return sizes and all(path == at and type(a) is type(b) and _same_attributes(vars(a), vars(b), place)
                         for (path, a), (at, b) in pairs)  # fmt: skip


def _same_attributes(first: dict[str, Any], other: dict[str, Any], place: int) -> bool:
    """Whether two modules' plain attributes are equal, or are integers that differ by `place`."""
    return first.keys() == other.keys() and all(
        value == other[name] or (type(value) is int and type(other[name]) is int and other[name] - value == place)
        for name, value in first.items()
        if name not in _OF_TORCH and isinstance(value, _PLAIN)
    )
