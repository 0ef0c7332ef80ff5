"""Stacked weights (E, ...) of which a rank holds some, as the forward of a mixture reads them; what is made of them.

    self.w1            -> ExpertTensor (E, H, I), without values
    x[mine] @ w1[e]    -> ExpertTensor (n, I): the product is noted, not computed

Its operations are noted by `expert_notes`. Nothing of it is in autograd's graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.parallel.expert.ways import OneExpert
from shardwise.trace.leaves import tensors_in


class ReadOtherwise(Exception):
    """Stacked weights are read in another way than by experts that compute rows: the reason, for a refusal's text."""


@dataclass(eq=False)
class NotedResult:
    """A result of an operation that was noted, or a stacked weight. In `args` it stands for itself.

    func        None for a weight
    way         how the forward picks the weights behind it
    forms       its form on the meta device; of all experts, also with one expert more
    of_weights  whether weights alone are behind it, and no rows
    weight      the name of the stacked weight that it is; None for an operation's result
    value       once it is known
    """

    number: int
    func: Callable | None
    args: tuple
    kwargs: dict
    way: OneExpert
    forms: list[torch.Tensor]
    of_weights: bool
    weight: str | None = None
    value: torch.Tensor | None = None

    @property
    def operands(self) -> list[NotedResult]:
        """Returns the noted operands of the operation."""
        return tensors_in((self.args, self.kwargs), NotedResult)

    def behind(self) -> list[NotedResult]:
        """Returns this and all noted results that it hangs on, up to those whose values are known, in order."""
        met, todo = dict[int, NotedResult](), [self]
        while todo:
            result = todo.pop()
            if result.number not in met and result.value is None:
                met[result.number] = result
                todo += result.operands
        return [met[number] for number in sorted(met)]


class Notes(Protocol):
    """What `ExpertTensor`s ask of the notes that they belong to."""

    device: torch.device

    def called(self, func: Callable, name: str, args: tuple, kwargs: dict) -> Any: ...


class ExpertTensor(torch.Tensor):
    """Stands for stacked weights, or for what operations make of them; see the module's docstring."""

    noted: NotedResult
    notes: Notes

    @staticmethod
    def __new__(cls, noted: NotedResult, notes: Notes) -> ExpertTensor:
        form = noted.forms[0]
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), dtype=form.dtype, device=notes.device
        )
        tensor.noted, tensor.notes = noted, notes
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ExpertTensor(shape={tuple(self.noted.forms[0].shape)})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if all(isinstance(arg, int) for arg in (*args[1:], *kwargs.values())) and _tells_of_form(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next(t for t in tensors_in((args, kwargs)) if isinstance(t, ExpertTensor))
        return first.notes.called(func, getattr(func, "__name__", ""), args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise ReadOtherwise(f"{func} reads what stacked weights make past torch's functions")


@functools.lru_cache(1024)
def _tells_of_form(func: Callable) -> bool:
    """Returns whether a function tells of a tensor's form alone: without values it gives something, and no tensor."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        try:
            return not tensors_in([func(torch.empty((1, 1), device="meta"))])
        except Exception:  # it wants values, or more arguments
            return False


def empty_form(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a meta tensor of this shape and dtype, made past all modes that watch the forward."""
    # selective recompute counts operations, and a second forward makes fewer: forms are known by then
    with _disable_current_modes():
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


def noted_of(tensor: Any) -> Any:
    """Returns what is noted of an `ExpertTensor`; anything else as it is."""
    return tensor.noted if isinstance(tensor, ExpertTensor) else tensor
