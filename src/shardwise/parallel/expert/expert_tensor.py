"""Tensors without values that stand for stacked weights (E, ...), and for results computed from them, in a forward.

    self.w1            -> ExpertTensor (E, H, I), without values
    x[mine] @ w1[e]    -> ExpertTensor (n, I): the product is noted, not computed

This rank holds only some experts of the weights. `expert_notes` records the operations. `ExpertTensor`s are not in
autograd's graph.
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
    """Raised if stacked weights are read other than by experts that compute rows; its text is the reason."""


@dataclass(eq=False)
class NotedResult:
    """A node of the recorded graph, which is a stacked weight or the result of a recorded operation.

    number        its id; operands have smaller ones
    func          the operation; None for a weight
    args, kwargs  its arguments, in which operands that were recorded are `NotedResult`s
    way           how the forward picks the expert weights that it is computed from
    forms         meta tensors [form]; for all experts at once [form, form with one expert more]
    of_weights    whether it is computed from weights alone, without rows
    weight        the name of the stacked weight that it is; None for an operation's result
    value         its values, once they are known
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
        """Returns the operands of the operation that are recorded themselves."""
        return tensors_in((self.args, self.kwargs), NotedResult)

    def behind(self) -> list[NotedResult]:
        """Returns this node and all that it depends on whose values are not known, in order of their numbers."""
        met, todo = dict[int, NotedResult](), [self]
        while todo:
            result = todo.pop()
            if result.number not in met and result.value is None:
                met[result.number] = result
                todo += result.operands
        return [met[number] for number in sorted(met)]


class Notes(Protocol):
    """What `ExpertTensor`s need of the recorder that they belong to (`ExpertNotes`)."""

    device: torch.device

    def called(self, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        """Returns the result of `func`, of this `__name__`, which is called with `ExpertTensor`s."""
        ...


class ExpertTensor(torch.Tensor):
    """A tensor without values that stands for a stacked weight, or for a result computed from it.

    noted  its node in the recorded graph;  notes  the recorder, which answers operations on it
    """

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
        """Returns the answer of `notes`, or of torch itself if the function reads the shape or dtype alone."""
        kwargs = kwargs or {}
        if all(isinstance(arg, int) for arg in (*args[1:], *kwargs.values())) and _tells_of_form(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next(t for t in tensors_in((args, kwargs)) if isinstance(t, ExpertTensor))
        return first.notes.called(func, getattr(func, "__name__", ""), args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Raises `ReadOtherwise`, since only code below torch's functions gets here."""
        raise ReadOtherwise(f"{func} reads what stacked weights make past torch's functions")


@functools.lru_cache(1024)
def _tells_of_form(func: Callable) -> bool:
    """Whether a function reads a tensor's form alone, since on a meta tensor it returns something without tensors."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        try:
            return not tensors_in([func(torch.empty((1, 1), device="meta"))])
        except Exception:  # it needs values, or more arguments
            return False


def empty_form(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a meta tensor of this shape and dtype, made outside of all active dispatch modes."""
    # selective recompute counts operations, and would see fewer in the second forward, in which forms are cached
    with _disable_current_modes():
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


def noted_of(tensor: Any) -> Any:
    """Returns the `NotedResult` of an `ExpertTensor`; any other value unchanged."""
    return tensor.noted if isinstance(tensor, ExpertTensor) else tensor
