"""New tensors like a distributed one (`new_zeros`, `zeros_like`), and reading a tensor's values in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.part.gathering import gather
from shardwise.part.rules.pointwise import pointwise
from shardwise.part.sums import plain
from shardwise.part.tensor import FUNCTIONS, Part, rule, strides_in_the_order_of
from shardwise.trace.leaves import replaced


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def new(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.new_zeros(shape)` or the like: a whole plain tensor of the part's dtype, on its device."""
    plain = torch.empty((), dtype=args[0].dtype, device=args[0].device)
    return func(plain, *args[1:], **kwargs)


@rule("new_empty_strided")
def new_empty_strided(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.new_empty_strided(sizes, strides)`: a part where the sizes are x's own, else a plain tensor.

    Autograd calls it to give a gradient the strides of its tensor, if the two differ.
    """
    part, sizes, strides = args[0], tuple(args[1]), tuple(args[2])
    if part.may_gather or sizes != tuple(part.shape):
        return new(func, args, kwargs)
    share = tuple(part.local.shape)
    return part.with_local(func(part.local, share, strides_in_the_order_of(strides, sizes, share), **kwargs))


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def like(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `zeros_like(x)`, cut as x; plain if `x` may be gathered, since anything may be written into it."""
    part = args[0]
    if not part.may_gather:
        return pointwise(func, args, kwargs)
    as_it_lies = torch.empty_strided(part.shape, part.whole_strides, dtype=part.dtype, device=part.device)
    return func(as_it_lies, *args[1:], **kwargs)  # random numbers fill it in the order of memory: that of one process


def _read(function: Callable) -> Callable:
    """Returns `function`, a method of tensors, made to run on the gathered tensor. Collective."""
    return lambda part, *args, **kwargs: function(plain(part.detach()), *args, **kwargs)


for _function in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__reduce_ex__):
    FUNCTIONS[_function] = _read(_function)  # what Python reads, or writes to a file, is of the whole tensor


@rule("_local_scalar_dense", "equal", "is_nonzero")
def value(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns the Python value (`item()`, a truth value) of the gathered tensor. Collective."""
    return func(*replaced(Part, gather, args), **kwargs)
