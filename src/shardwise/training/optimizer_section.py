"""Makes `Task.optimizer`, a function from param groups to an optimizer, from an `[optimizer]` section."""

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
    """Returns a function (param groups -> optimizer) for `Task.optimizer`; unset options have torch's defaults.

    lr   the learning rate, in place of the section's
    """
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
    """Returns a function (param groups -> optimizer) that multiplies the learning rates of `make`'s by `factor`."""
    return partial(_scale, make, factor)


def _scale(make: Callable[[list[dict]], Optimizer], factor: float, groups: list[dict]) -> Optimizer:
    """Returns `make(groups)` with each group's "lr" times `factor`; `InputError` for a group without "lr"."""
    optimizer = make(groups)
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise InputError(
                f"optimizer.scale_lr: {type(optimizer).__name__} of the task has no learning rate `lr` to scale: leave "
                "scale_lr out"
            )
        group["lr"] *= factor
    return optimizer
