"""`Written`: a whole tensor into which parts were written; it stays the same object and stands for a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.trace.leaves import replaced


class Written(torch.Tensor):
    """A plain tensor whose class was changed; `now` is what it became, which every function of torch is given."""

    answers_first = True  # also where a part stands in front of it
    now: torch.Tensor
    assign: Callable[..., None]  # what `written[index] = value` does

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__setitem__ and isinstance(args[0], Written):
            return cls.assign(*args)
        args, kwargs = replaced(Written, now_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def now_of(tensor: Any) -> Any:
    """Returns the tensor that a `Written` one stands for; any other as it is."""
    return tensor.__dict__["now"] if isinstance(tensor, Written) else tensor


def stand_for(tensor: torch.Tensor, now: torch.Tensor) -> None:
    """Makes a tensor, plain or `Written`, stand for `now` from here on. Its own memory is freed."""
    if not isinstance(tensor, Written):
        tensor.data = tensor.new_empty(0)  # whoever goes past `__torch_function__` finds nothing, not old values
        tensor.__class__ = Written
    tensor.__dict__["now"] = now


__all__ = ["Written", "now_of", "stand_for"]
