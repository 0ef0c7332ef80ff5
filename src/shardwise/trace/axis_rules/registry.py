"""The registry of axis rules (`RULES`, `rule`), and helpers that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shardwise.trace.axes import Axes, param_of

Rule = Callable[[Axes, Any, tuple, dict, Any], bool]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the function as the rule of these operations."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def is_free(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or made of parameters alone: it can be whole beside anything."""
    return param_of(tensor) is not None or getattr(tensor, "_axes_free", False)


def slim(labels: np.ndarray) -> np.ndarray:
    """Returns the labels with size one along dims where they are all the same."""
    for dim in range(labels.ndim):
        if labels.shape[dim] > 1:
            first = np.take(labels, [0], axis=dim)
            if (labels == first).all():
                labels = first
    return labels
