"""Make the function that a `Task` wants from an `[optimizer]` section (names and options: config/schema)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.config.schema import OPTIMIZER_OPTIONS, OptimizerSection
from shardwise.errors import InputError

if TYPE_CHECKING:
    from torch.optim import Optimizer

CLASSES = {
    "adamw": "AdamW",
    "adam": "Adam",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adamax": "Adamax",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "sgd": "SGD",
}


def make_optimizer(section: OptimizerSection, lr: float) -> Callable[[list[dict]], Optimizer]:
    """Returns a function for `Task.optimizer`: groups -> optimizer; an option that is not set has torch's default."""
    options: dict[str, Any] = {}
    for key in OPTIMIZER_OPTIONS[section.name]:
        value = getattr(section, key)
        if value is not None:
            # TOML has no tuples, such as torch's betas
            options[key] = tuple(value) if isinstance(value, list) else value
    return partial(_build, CLASSES[section.name], {"lr": lr, **options})


def _build(name: str, options: dict[str, Any], groups: list[dict]) -> Optimizer:
    import torch

    return getattr(torch.optim, name)(groups, **options)


def scaled(make: Callable[[list[dict]], Optimizer], factor: float) -> Callable[[list[dict]], Optimizer]:
    """Returns a function for `Task.optimizer`: what `make` gives, the learning rate of each group times `factor`."""
    return partial(_scale, make, factor)


def _scale(make: Callable[[list[dict]], Optimizer], factor: float, groups: list[dict]) -> Optimizer:
    """Returns the optimizer with each group's rate multiplied; `InputError` for one without a rate."""
    optimizer = make(groups)
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise InputError(
                f"optimizer.scale_lr: {type(optimizer).__name__} of the task has no learning rate `lr` to scale: leave "
                "scale_lr out"
            )
        group["lr"] *= factor
    return optimizer
