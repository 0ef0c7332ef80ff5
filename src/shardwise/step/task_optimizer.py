"""Call `Task.optimizer` on two groups of parameters, "decay" and "no_decay"."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from shardwise.errors import InputError, ShardwiseError, did_you_mean
from shardwise.step.optimizer_modes import enter_training
from shardwise.task_names import where

OptimizerFn = Callable[[list[dict]], Optimizer]


def named_groups(params: Sequence[torch.Tensor]) -> list[dict]:
    """Returns the groups that `Task.optimizer` receives, as dicts {"name", "params"}; an empty group is left out.

    The group "no_decay" has the parameters with fewer than two dims (biases, weights of norms) and a weight decay of 0.
    """
    decay = [param for param in params if param.dim() >= 2]
    no_decay = [param for param in params if param.dim() < 2]
    groups: list[dict] = []
    if decay:
        groups.append({"name": "decay", "params": decay})
    if no_decay:
        groups.append({"name": "no_decay", "params": no_decay, "weight_decay": 0.0})
    return groups


def construct(make: OptimizerFn, params: Sequence[torch.Tensor]) -> Optimizer:
    """Returns the optimizer that `make`, the task's function, makes over `params`, in training mode.

    Raises `InputError` if it fails, returns no optimizer, or returns one over other tensors.
    """
    try:
        optimizer = make(named_groups(params))
    # our own errors, such as a refusal of other groups, already say what is wrong
    except ShardwiseError:
        raise
    except Exception as error:
        raise InputError(f"Task.optimizer failed: {where(error)}{_like(error) or _given(error)}") from error
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"Task.optimizer must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
    # an optimizer of another model's parameters would step, and leave the trained ones as they are
    own = {id(param) for param in params}
    foreign = [param.shape for group in optimizer.param_groups for param in group["params"] if id(param) not in own]
    if foreign:
        raise InputError(
            f"Task.optimizer made an optimizer over {len(foreign)} tensors that are not among the parameters it was "
            f"given (the first has shape {tuple(foreign[0])}): another model's; build it over its argument, the groups "
            "(lambda groups: AdamW(groups))"
        )
    enter_training(optimizer)
    return optimizer


def _like(error: Exception) -> str:
    """Returns a suggestion to append for a misspelt attribute (torch.optim.Adamm), "" for any other error."""
    if not isinstance(error, AttributeError) or error.name is None:
        return ""
    return did_you_mean(error.name, [name for name in dir(error.obj) if not name.startswith("_")])


def _given(error: Exception) -> str:
    """Returns advice to append for a failed `Task.optimizer`: an argument that is a str, or how it is called."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = frame.f_locals if frame.f_code.co_name == "__init__" else {}
        if isinstance(names.get("self"), Optimizer):
            texts = [name for name, value in names.items() if isinstance(value, str)]
            return "".join(f"; {name} is the text {names[name]!r}: give a number" for name in texts[:1])
    return (
        "; it is called with named groups of parameters, not with the model, as lambda groups: AdamW(groups, lr=1e-3)"
    )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` requires a closure (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
