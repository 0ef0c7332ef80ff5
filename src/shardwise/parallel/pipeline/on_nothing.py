"""Answer functions before a pipeline stage that fail on made-up values: again without values, by shape alone.

    chosen = x.gather(1, (x > 0).sum(1, keepdim=True) - 1)     x is NaN: index -1
    half = torch.linalg.cholesky(a)                            a is NaN: not positive definite
    x.register_hook(...)                                       x has no gradient, and the hook is left out

Where a function raises before the stage's part begins, it is called again on tensors without values, and its result
is made up too. A forward runs so once it has failed otherwise, since a mode costs time at every function.

What this does not do: help where Python decides by such a value, or a kernel on an accelerator that checks no index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ShardwiseError
from shardwise.part import Part
from shardwise.part.levels import Distributed
from shardwise.trace.leaves import replaced, tensors_in
from shardwise.trace.without_gradient import hooks_nothing

RAISED = (IndexError, RuntimeError)  # by kernels, `LinAlgError` among them


class OnNothing(TorchFunctionMode):
    """Mode in which functions that raise give results of the right shape, until `begun()` is true."""

    def __init__(self, begun: Callable[[], bool]):
        super().__init__()
        self.begun = begun

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if hooks_nothing(func, args) and not self.begun():  # a made-up tensor has no gradient that a hook could see
            return RemovableHandle(OrderedDict())
        try:
            return func(*args, **kwargs)
        except ShardwiseError:
            raise
        except RAISED:
            if self.begun():
                raise
            if _writes_into_absent(func, args):
                return args[0]
            if any(isinstance(tensor, Distributed) for tensor in tensors_in((args, kwargs))):
                raise  # how a result would be cut does not follow from shapes
            try:
                return _made_up(func, args, kwargs)
            except RAISED:
                pass  # it is wrong for these shapes too: the first error tells more
            raise


def _writes_into_absent(func: Callable[..., Any], args: tuple) -> bool:
    """Returns whether a function writes into an absent weight, whole or a share of it: nothing in it counts."""
    name = getattr(func, "__name__", "")
    plain = name.endswith("_") and not name.endswith("__")
    written = args[0] if args and (plain or name == "__setitem__" or name.startswith("__i")) else None
    while isinstance(written, Part):
        written = written.local
    # absent weights are one number, expanded: torch refuses to write into memory that several elements share
    return isinstance(written, torch.Tensor) and written.numel() > 1 and 0 in written.stride()


def _made_up(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Returns a result of the right shapes and dtypes, NaN in every value (0 in integers)."""
    originals: dict[int, torch.Tensor] = {}  # by id of the tensor without values that stands for each

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        originals[id(shape)] = tensor
        return shape

    shapes = replaced(torch.Tensor, without_values, (args, kwargs))
    device = next((tensor.device for tensor in originals.values()), None)

    def filled(shape: torch.Tensor) -> torch.Tensor:
        if id(shape) in originals:  # written in place, and nothing in it counts
            return originals[id(shape)]
        value = float("nan") if shape.is_floating_point() or shape.is_complex() else 0
        return torch.full(shape.shape, value, dtype=shape.dtype, device=device)

    return replaced(torch.Tensor, filled, func(*shapes[0], **shapes[1]))


__all__ = ["RAISED", "OnNothing"]
