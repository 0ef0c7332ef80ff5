"""Views of a weight that the script reads while its rank holds a piece: `p.data`, `p.detach()`, `p[0]` under no_grad.

    p.data.norm(), p.detach().numpy(), logstd.expand_as(x)    read: of the whole weight, gathered for it
    p.data.mul_(0.9), row = p[0]; row.zero_()                 written: raises, because only the copy would change
    old = p.data; optimizer.step(); old.sum()                 raises: in one process `old` shows the new weights

So such a view is a `ReadView` of a gathered copy. What is computed of it is a plain tensor; a view of it is a
`ReadView` too.

What this does not do: see a write through `data_ptr` or DLPack; a NumPy array of it is read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shardwise.errors import RefusedPlan
from shardwise.scripts.guard import OUTSIDE, reads_values, writes_into
from shardwise.scripts.script_lines import names_line, refuse
from shardwise.trace.leaves import replaced, tensors_in

_LATE = (
    "a view of a weight (p.data, p.detach(), p[...]) that was taken before weights changed is read after that: this "
    "rank gathered the whole weight as it was, and one process would show it as it is: take the view anew, or "
    "keep a copy (.clone()) where the former values are meant"
)


class ReadView(torch.Tensor):
    """A gathered copy of a whole weight, or a view of one, that may be read until weights change.

    is_current  returns whether weights are unchanged since
    """

    is_current: Callable[[], bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return names_line(_of_views)(func, args, kwargs or {})


def _of_views(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns `func` of arguments with views among them; raises `RefusedPlan` if it writes into one."""
    name = getattr(func, "__name__", "")
    views = [one for one in tensors_in((args, kwargs)) if isinstance(one, ReadView)]
    first = (*args, *kwargs.values())[0]
    target = (kwargs.get("out"), first if writes_into(name) else None)
    # `v.data = other` too: the view would have other memory than the copy, and the weight would not change
    sets_data = name == "__set__" and isinstance(first, ReadView)
    if sets_data or any(isinstance(one, ReadView) for one in tensors_in(target)):
        refuse(RefusedPlan(OUTSIDE.format(name)))
    if reads_values(func) and not all(one.is_current() for one in views):
        refuse(RefusedPlan(_LATE))
    made = func(*replaced(ReadView, _plain, args), **replaced(ReadView, _plain, kwargs))
    if isinstance(made, np.ndarray):
        made.flags.writeable = False
    return views_of(made, views[0].is_current, {_memory(one) for one in views})


def views_of(made: Any, is_current: Callable[[], bool], copies: set[int]) -> Any:
    """Returns `made` with its tensors as `ReadView`s if their memory is one of `copies`.

    is_current  returns whether weights are unchanged since
    copies      of whole weights, by `memory_of`
    """

    def view(tensor: torch.Tensor) -> torch.Tensor:
        if memory_of(tensor) not in copies:
            return tensor
        shown = tensor.as_subclass(ReadView)
        shown.is_current = is_current
        return shown

    return replaced(torch.Tensor, view, made)


def memory_of(tensor: torch.Tensor) -> int:
    """Returns an id of the storage in which a tensor lies."""
    return tensor.untyped_storage()._cdata


def _memory(view: ReadView) -> int:
    return memory_of(_plain(view))


def _plain(view: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return view.as_subclass(torch.Tensor)
