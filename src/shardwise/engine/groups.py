"""Named parameter groups for the optimizer: "decay" for matrices, "no_decay" for norms and biases."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def named_groups(params: Sequence[torch.Tensor]) -> list[dict]:
    """Returns groups as `Task.optimizer` receives them: dicts of `name`, `params` and, in "no_decay", weight_decay 0.

    Norms' weights and biases are the parameters with fewer than two dims.
    """
    decay = [param for param in params if param.dim() >= 2]
    no_decay = [param for param in params if param.dim() < 2]
    groups: list[dict] = []
    if decay:
        groups.append({"name": "decay", "params": decay})
    if no_decay:
        groups.append({"name": "no_decay", "params": no_decay, "weight_decay": 0.0})
    return groups
