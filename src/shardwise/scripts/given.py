"""Check what a script gives `prepared.backward`: the loss, its weight, or what it is a mean over."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.errors import InputError


def check_loss(loss: Any) -> None:
    """Raise `InputError` unless a loss is one number that depends on the model's parameters."""
    what = "prepared.backward: the loss must be one number that depends on the model's parameters"
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"{what}, got {type(loss).__name__}: give the tensor, before .item()")
    if loss.numel() != 1:
        raise InputError(f"{what}, got shape {tuple(loss.shape)}: give its .mean(), or its .sum() and how many count")
    if not loss.requires_grad:
        raise InputError(f"{what}, and this one does not: compute it outside no_grad, without .detach()")


def check_number(given: Any, name: str) -> None:
    """Raise `InputError` unless a weight is one number, and not below 0."""
    shape = tuple(given.shape) if isinstance(given, torch.Tensor) else ()
    if math.prod(shape) != 1:
        raise InputError(f"prepared.backward: {name} must be one number, got shape {shape}: give its .sum()")
    if isinstance(given, int | float) and given < 0:
        raise InputError(f"prepared.backward: {name} is {given:g}, which turns the loss around: give how many count")
