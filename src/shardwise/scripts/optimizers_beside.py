"""Refuse a step of an optimizer beside the prepared one by gradients that only one rank has.

    optimizer of matrices (prepared), optimizer of the rest     one prepared.backward(loss), and a step of each: right,
                                                                as both read gradients of all ranks
    weights by prepared.backward(loss), those of an             a rank's own gradients, or none where ranks hold
    architecture by loss.backward()                             pieces: refused at that optimizer's step

Every optimizer asks torch's hooks before a step; ours looks for parameters of a prepared model in its groups.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import RefusedPlan
from shardwise.scripts.script_lines import names_line


class Stepped(Protocol):
    """What `prepare` returned, as far as it is asked here."""

    model: nn.Module
    optimizer: Optimizer

    @property
    def has_stray(self) -> bool:
        """Whether gradients have come to the model by another backward than the plan's."""


_PREPARED: WeakSet[Any] = WeakSet()


def watch_others(prepared: Stepped) -> None:
    """Look at the steps of optimizers beside the prepared one from here on."""
    _listening()
    _PREPARED.add(prepared)


@cache
def _listening() -> None:
    """Have torch ask before every step, once for the process: a hook that ran cannot take itself off."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise `RefusedPlan` for a step that uses gradients which belong to no step of a plan."""
    for prepared in list(_PREPARED):
        if optimizer is not prepared.optimizer and prepared.has_stray:
            _refuse_stray(optimizer, prepared.model)


@names_line
def _refuse_stray(optimizer: Optimizer, model: nn.Module) -> None:
    names = {id(param): name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = names.get(id(vars(param).get("successor", param)))
            if name is not None:
                raise RefusedPlan(
                    f"optimizer.step() of an optimizer beside the prepared one: it trains '{name}' of the prepared "
                    "model, and loss.backward() has left gradients there, which ranks have not added up. Call "
                    "prepared.backward(loss) for this optimizer's loss too (of a batch of a loader of its own: "
                    "loader = prepared.split(loader, trains=True)): gradients are those of all ranks then"
                )
