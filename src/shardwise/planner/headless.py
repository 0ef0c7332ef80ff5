"""A transformers model without a head of heads.py, for a forecast: what AutoModel builds, with a made-up loss.

    loss     the sum of squares of what the model gives in floating point: it reaches what a loss of one's own would
    samples  of the main input; beside it what else the forward takes and sizes of the configuration tell

*What this does not do*: train. A model without a head has no loss of its own: a task of one's own has.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.heads import inputs, parts_of

if TYPE_CHECKING:
    from torch import Tensor, nn

BASE = "base"  # in place of a head
MADE_UP = "with a made-up loss, the sum of squares of its outputs: a task of your own has the head and the loss"


def base_class(config: Any) -> Any:
    """Returns transformers' class of the model without a head; None where it has none for such a configuration."""
    import transformers

    mapping = transformers.AutoModel._model_mapping
    mapped = mapping.get(type(config), None)
    several = mapped if isinstance(mapped, tuple | list) else [mapped]
    named = getattr(config, "architectures", None) or ()
    return next((kind for kind in several if getattr(kind, "__name__", "") in named), several[0])


def build_base(config: Any) -> nn.Module:
    """Builds the model without a head in float32, without a cache of keys and values."""
    import transformers

    for part in parts_of(config):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    return transformers.AutoModel.from_config(config, dtype=torch.float32)


def made_up_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Returns (sum of squares of the differentiable outputs, samples of the batch)."""
    leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    squares = [leaf.float().square().sum() for leaf in floats if leaf.requires_grad] or [floats[0].float().sum()]
    return torch.stack(squares).sum(), len(next(iter(batch.values())))


def settings_of_base(config: Any) -> dict[str, Any]:
    """Returns the fields of a `Task` beside its model and data."""
    return {"inputs": inputs, "loss": made_up_loss, "name": config.model_type}


def main_input(kind: Any) -> str:
    """Returns the name of the model's main input: what its class says, where the forward has such an argument."""
    takes = tuple(inspect.signature(kind.forward).parameters)[1:]
    said = getattr(kind, "main_input_name", "input_ids")
    usual = ("pixel_values", "input_ids", "input_features", "input_values")
    return said if said in takes else next((name for name in takes if name in usual), said)
