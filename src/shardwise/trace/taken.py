"""Find gradients that a forward itself takes (`autograd.grad` inside), and which tensors they are taken by.

    energy = self.net(x)
    (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)      one `Taken`: of energy.sum(), by x

The operations of its backward belong to nobody's code: they read what any part of the forward kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.trace.functional import transforming

SEVERAL_AT_ONCE = "is_grads_batched"


@dataclass(frozen=True)
class Taken:
    """One call of `torch.autograd.grad` by a forward: its times, and the numbers of its `inputs` (`by`)."""

    enter: int
    exit: int
    by: tuple[int, ...]
    plain: bool  # of tensors, one gradient each: what can be taken in parts


def listed(tensors: Any) -> list[Any]:
    """Returns the tensors that an argument of `torch.autograd.grad` names, of which one may stand alone."""
    return [tensors] if isinstance(tensors, torch.Tensor) or not isinstance(tensors, list | tuple) else list(tensors)


def takes_gradients(func: Any) -> bool:
    """Whether a function of torch is the one with which code takes gradients."""
    return func is torch.autograd.grad and not transforming()


class GradientWatch(TorchFunctionMode):
    """Function mode: `torch.autograd.grad` runs inside `around(args, kwargs)`, unless called inside another one."""

    def __init__(self, around: Callable[[tuple, dict], AbstractContextManager[None]]):
        super().__init__()
        self.around = around
        self.inside = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.inside or not takes_gradients(func):
            return func(*args, **kwargs)
        self.inside = True
        try:
            with self.around(args, kwargs):
                return func(*args, **kwargs)
        finally:
            self.inside = False


def influenced(ops: Iterable[Any], numbers: Iterable[int]) -> set[int]:
    """Returns the numbers of the tensors computed from these, themselves among them. `ops`: a flow's, in order."""
    influenced_numbers = set(numbers)
    for op in ops:
        if not influenced_numbers.isdisjoint(op.reads):
            influenced_numbers.update(op.makes)
    return influenced_numbers


__all__ = ["SEVERAL_AT_ONCE", "GradientWatch", "Taken", "influenced", "listed", "takes_gradients"]
