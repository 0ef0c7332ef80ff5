"""What the one process takes from a task, implemented again: slices of batches, losses, parameter groups.

The rooms of a step do the same for the ranks, with the checks and messages that a user meets. If both sides shared the
code, a mistake in it would be on both: a sample that no micro-batch has, or a weight read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.step.batching import samples_in
from shardwise.step.loss import loss_on, not_negative, read_loss
from shardwise.task import Task, call_arguments


@dataclass
class LiteralExtra:
    """An extra term of a loss: its sum, and its own weight (None: the loss's)."""

    total: torch.Tensor
    weight: float | None


@dataclass
class LiteralLoss:
    """One result of a task's loss: its sum, its weight, and its extra terms by name."""

    total: torch.Tensor  # (), with its graph
    weight: float  # what the sum is divided by, over all micro-batches
    extras: dict[str, LiteralExtra] = field(default_factory=dict)


def bounds(samples: int, pieces: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of `pieces` consecutive pieces of [0, samples), whose lengths differ by one at most."""
    stops = [samples * (piece + 1) // pieces for piece in range(pieces)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def samples_of(batch: Any, low: int, high: int) -> Any:
    """Returns the batch with samples [low, high) of every tensor or array with dims; other leaves as they are."""

    def of(leaf: Any) -> Any:
        return leaf[low:high] if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim else leaf

    return tree_map(of, batch)


def count_of(batch: Any) -> int:
    """Returns the number of samples of a batch; raises `InputError`, as a step does, if its fields disagree."""
    samples_in(batch)
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim)


def replaced(module: nn.Module, named: list[tuple[str, nn.Parameter]]) -> dict[str, torch.Tensor]:
    """Returns name -> the new tensor, for the parameters in `named` in whose place a forward put another tensor."""
    now = dict(module.named_parameters())
    return {name: now[name] for name, param in named if name in now and now[name] is not param}


def call_of(task: Task, batch: Any) -> tuple[tuple, dict]:
    """Returns the (args, kwargs) with which the task calls its model; raises `InputError` for anything else."""
    call = task.inputs(batch)
    if not (isinstance(call, tuple | list) and len(call) == 2 and isinstance(call[1], dict)):
        call_arguments(task, batch)  # says what is wrong
    args, kwargs = call
    return args, kwargs


def loss_of(task: Task, output: Any, batch: Any) -> LiteralLoss:
    """Returns the task's loss of an output; raises `InputError`, as a step does, for one of a wrong form."""
    try:
        returned = task.loss(output, batch)
    except (TypeError, AttributeError):
        loss_on(task, output, batch)  # fails too, with a message for the user
        raise
    read_loss(returned)
    total, weight, *rest = returned
    not_negative(float(weight), "weight")
    loss = LiteralLoss(total.reshape(()), float(weight))
    for name, extra in (rest[0] if rest else {}).items():
        own = isinstance(extra, tuple | list)
        value, of = (extra[0], float(extra[1])) if own else (extra, None)
        loss.extras[name] = LiteralExtra(value.reshape(()), of)
    return loss


def groups(params: Sequence[torch.Tensor]) -> list[dict]:
    """Returns the groups that `Task.optimizer` gets: "decay" of tensors with two or more dims, "no_decay" of others."""
    matrices = {"name": "decay", "params": [param for param in params if len(param.shape) > 1]}
    others = {"name": "no_decay", "params": [param for param in params if len(param.shape) < 2], "weight_decay": 0.0}
    return [group for group in (matrices, others) if group["params"]]


def optimizer_of(make: Callable[[list[dict]], Any], params: Sequence[torch.Tensor]) -> Any:
    """Returns the optimizer that `make` (`Task.optimizer`) makes of `params`, in training mode if it has modes."""
    made = make(groups(params))
    if has_mode(made):
        made.train()
    return made


def has_mode(optimizer: Any) -> bool:
    """Whether an optimizer has other weights in training than in evaluation, as schedule-free ones have."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def evaluating(optimizer: Any) -> Iterator[None]:
    """Context in which the optimizer is in its `eval()` mode, if it has one, so that averaged weights are in place."""
    if has_mode(optimizer):
        optimizer.eval()
    yield
    if has_mode(optimizer):
        optimizer.train()
