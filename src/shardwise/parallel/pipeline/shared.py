"""What runs before a pipeline stage's part in a forward that takes gradients itself.

    distances = (x[:, None] - x).norm(dim=-1)     of the batch alone: every stage has it, with the way back to x
    h = self.block(h, distances)                  left out, or made up of what was: no way back
    grad(h.sum(), x)                              of what was made up: made up

A gradient by x that the stage takes later goes back through what it computes of x alone, so that has gradients although
nothing else before the stage's part has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.trace.backwards import listed, takes_gradients
from shardwise.trace.functional import transforming
from shardwise.trace.leaves import tensors_in

Take = Callable[[Callable[..., Any], tuple, dict], Any]


class SharedGradients(TorchFunctionMode):
    """Mode of a forward that takes gradients itself; entered where gradients are on or off as the forward has them.

    Until `begun()` only what is computed of the batch alone has gradients.
    take    from then on, called with each gradient that the forward takes, in its place
    count   called at each gradient that the forward takes before
    """

    def __init__(self, begun: Callable[[], bool], take: Take, count: Callable[[], None]):
        super().__init__()
        self.begun, self.take, self.count = begun, take, count
        self.made_up = WeakIdKeyDictionary()  # tensors that stand for what was left out, or are computed of such

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if transforming():  # inside `torch.func`, whose own gradients are no gradients of stages
            return func(*args, **kwargs)
        own = takes_gradients(func)
        if self.begun():
            return self.take(func, args, kwargs) if own else func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        # a parameter may be another stage's, which is NaN here; those of this stage are used from its beginning on
        of_batch = not any(isinstance(tensor, nn.Parameter) or tensor in self.made_up for tensor in tensors)
        if own:
            self.count()
            if not (of_batch and any(tensor.requires_grad for tensor in tensors)):
                return tuple(self._noted(torch.full_like(x, torch.nan)) for x in listed(_inputs(args, kwargs)))
        if of_batch:
            return func(*args, **kwargs)
        with torch.no_grad():  # no way back through made-up values, whose gradients would be NaN
            output = func(*args, **kwargs)
        self.note(output)
        return output

    def note(self, result: Any) -> None:
        """Note what stands for the result of a call that was left out."""
        for tensor in tensors_in(result):
            self._noted(tensor)

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.made_up[tensor] = True
        return tensor


def _inputs(args: tuple, kwargs: dict) -> Any:
    return kwargs["inputs"] if "inputs" in kwargs else args[1]


__all__ = ["SharedGradients"]
