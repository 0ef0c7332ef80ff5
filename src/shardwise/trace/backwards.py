"""The one place where torch's backwards are watched, whoever asks for them: `backward()`, `autograd.grad`, hooks.

They all call `torch.autograd._engine_run_backward`, in whose place a `_Watched` stands while anybody watches. What
transforms of `torch.func` differentiate is not told: it is part of whoever called the transform.

A gradient that a forward itself takes (`autograd.grad` inside) is a `Taken`: its operations belong to nobody's code,
since they read what any part of the forward kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.trace.functional import transforming

# (roots, create_graph, inputs: () for backward()) -> what a backward runs inside
Around = Callable[[Any, bool, Any], AbstractContextManager[None]]


class _Watched:
    """Stands for torch's backward: runs it inside the watchers' contexts, the last watcher's outermost."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.watchers = run, list[Around]()

    def __call__(
        self, outputs: Any, gradients: Any, keep_graph: bool, create_graph: bool, inputs: Any, *rest: Any,
        **more: Any
    ) -> Any:  # fmt: skip
        with ExitStack() as inside:
            for around in [] if transforming() else self.watchers[::-1]:
                inside.enter_context(around(outputs, create_graph, inputs))
            return self.run(outputs, gradients, keep_graph, create_graph, inputs, *rest, **more)


def watch_backwards(around: Around) -> Callable[[], None]:
    """Runs every backward from now on inside the context `around(roots, create_graph, inputs)`; returns the undo."""
    if not isinstance(torch.autograd._engine_run_backward, _Watched):
        torch.autograd._engine_run_backward = _Watched(torch.autograd._engine_run_backward)
    watched = torch.autograd._engine_run_backward
    watched.watchers.append(around)

    def end() -> None:
        watched.watchers.remove(around)
        # somebody may have put a function of their own around it since, which stays
        if not watched.watchers and torch.autograd._engine_run_backward is watched:
            torch.autograd._engine_run_backward = watched.run

    return end


@contextmanager
def watching_backwards(around: Around) -> Iterator[None]:
    """Context: every backward runs inside the context `around(roots, create_graph, inputs)`."""
    end = watch_backwards(around)
    try:
        yield
    finally:
        end()


SEVERAL_AT_ONCE = "is_grads_batched"


@dataclass(frozen=True)
class Taken:
    """One call of `torch.autograd.grad` by a forward: its times, and the numbers of its `inputs` (`by`)."""

    enter: int  # time of the flow
    exit: int
    by: tuple[int, ...]
    plain: bool  # of tensors, one gradient each: what can be taken in parts


def listed(tensors: Any) -> list[Any]:
    """Returns the tensors of an argument of `torch.autograd.grad`, a tensor or a sequence, as a list."""
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
