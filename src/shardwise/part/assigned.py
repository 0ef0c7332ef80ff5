"""`tensor.data = value` if either is distributed; afterwards the tensor reads as the value.

    part.data = whole * 0.5       the part becomes what the value is: a part dealt in another way, a sum, or whole
    self.weight.data = value      the values are copied into the weight, of which the module reads a view
    buffer.data = field           a plain tensor gets the value gathered (over positions alone; the user is told)

The assignment dispatches no operation of torch. It replaces the tensor's memory by the value's, and a part has no
memory of its own. So distributed tensors have an attribute `data` of this file. That of plain tensors is replaced while
a module reads its weights as parts or pairs (`follow_data`); assignments between plain tensors go to torch's setter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gathered_told
from shardwise.part.levels import Distributed
from shardwise.part.sums import Sum
from shardwise.part.tensor import Part, forget
from shardwise.trace.leaves import replaced


class Written(torch.Tensor):
    """A tensor that was plain until `tensor.data = part`; torch's functions get the part, `now`, in its place."""

    answers_first = True  # also if a part stands in front of it among the arguments
    now: torch.Tensor
    assign: Callable[..., None]  # (written, index, value): does `written[index] = value`

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__setitem__ and isinstance(args[0], Written):
            return cls.assign(*args)
        args, kwargs = replaced(Written, now_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def now_of(tensor: Any) -> Any:
    """Returns the tensor for which a `Written` stands (`now`); any other value unchanged."""
    return tensor.__dict__["now"] if isinstance(tensor, Written) else tensor


def stand_for(tensor: torch.Tensor, now: torch.Tensor) -> None:
    """Turns `tensor`, plain or `Written`, into a `Written` that stands for `now`, and frees its own memory."""
    if not isinstance(tensor, Written):
        tensor.data = tensor.new_empty(0)  # whoever goes past `__torch_function__` finds nothing, not old values
        tensor.__class__ = Written
    tensor.__dict__["now"] = now


_DATA = torch.Tensor.data


class _Data(property):
    """The attribute `.data` that replaces torch's on plain tensors; its setter is `_assign`.

    before  torch's own attribute
    """

    __name__ = "data"  # as torch's own, by which function modes know what is assigned

    def __init__(self, before: Any):
        super().__init__(before.__get__, partial(_assign, before))
        self.before = before


def _assign(before: Any, tensor: torch.Tensor, value: Any) -> None:
    """Sets `tensor.data = value`, either of them distributed or not; `before` is torch's own attribute.

    Raises `Uncut` if a weight would get another shape, or a plain tensor a value that is cut over an axis of weights.
    """
    # marked by the attribute that gave it to the module's code: a view of the weight (`part/parameters`, `part/pairs`)
    if getattr(tensor, "reads_weight", False):
        value = now_of(value)
        if value.shape != tensor.shape:  # which `copy_` would repeat
            raise Uncut(f"the `.data` of a weight of {tuple(tensor.shape)} is set to a tensor of {tuple(value.shape)}")
        tensor.data.copy_(value)  # what the module reads is a view of its weight
    # assigned a distributed tensor before: it has no memory of its own into which values could be copied
    elif isinstance(tensor, Written):
        stand_for(tensor, now_of(value).detach())
    # the object stays distributed, since views and autograd refer to it: a plain value becomes a sum already reduced
    elif isinstance(tensor, Distributed):
        value = now_of(value).detach()
        _become(tensor, value if isinstance(value, Distributed) else _whole(value, tensor))
    # a plain tensor of torch, whose other readers expect all of it
    else:
        value = now_of(value)
        before.__set__(tensor, _of_every_rank(value) if isinstance(value, Distributed) else value)


def _become(tensor: Distributed, value: Distributed) -> None:
    """Turns the object `tensor`, to which views and autograd refer, into the same distributed tensor as `value`."""
    with torch._C.DisableTorchFunctionSubclass():
        _DATA.__set__(tensor, value)  # shape, strides and dtype
    tensor.__class__ = type(value)
    for name in ("source", "recipe", "deals", "whole_values", "margin"):
        tensor.__dict__.pop(name, None)
    tensor.__dict__.update(value.__dict__)
    forget()


def _whole(value: torch.Tensor, beside: Distributed) -> Sum:
    """Returns the plain `value` as an already reduced `Sum` over the axis of `beside`."""
    made = Sum(value, beside.axis)
    made.total = value
    return made


def _of_every_rank(value: torch.Tensor) -> torch.Tensor:
    """Returns `value` reduced and gathered, whole on every rank; `Uncut` if it is cut over weights. Collective."""
    value = value.detach()
    while isinstance(value, Distributed):
        value = value.settled()
        if isinstance(value, Part):
            if not value.axis.positions and not value.may_gather:
                error = Uncut("a cut tensor is assigned to the `.data` of a whole one")
                # names the weight whose cut led here: it is left whole in the next attempt
                error.origins |= {value.origin} if value.origin else set()
                raise error
            value = gathered_told(value, "what is assigned to the `.data` of a whole tensor")
    return value


Distributed.data = Written.data = _Data(_DATA)
_FOLLOWED: WeakSet[nn.Module] = WeakSet()


def follow_data(module: nn.Module) -> Callable[[], None]:
    """Replaces `torch.Tensor.data` by `_Data` until the returned function was called for every such module."""
    _FOLLOWED.add(module)
    if not isinstance(torch.Tensor.data, _Data):
        torch.Tensor.data = _Data(torch.Tensor.data)

    def undo() -> None:
        _FOLLOWED.discard(module)
        if not _FOLLOWED and isinstance(torch.Tensor.data, _Data):
            torch.Tensor.data = torch.Tensor.data.before

    return undo
