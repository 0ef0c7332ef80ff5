"""Observe every backward pass of torch, whether `backward()`, `autograd.grad` or a hook starts it.

All of them call `torch.autograd._engine_run_backward`, which a `_Watched` replaces while there are watchers. What
transforms of `torch.func` differentiate is not reported, because it belongs to whoever called the transform.

A gradient that a forward itself takes (`autograd.grad` inside) is recorded as a `Taken`. Its operations belong to no
module's code, since they read what any part of the forward saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.trace.functional import transforming

# (roots, create_graph, inputs; () for `backward()`) -> the context in which that backward runs
Around = Callable[[Any, bool, Any], AbstractContextManager[None]]


class _Watched:
    """Replacement for torch's backward that runs it inside the watchers' contexts, the last watcher's outermost."""

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


SEVERAL_AT_ONCE = "is_grads_batched"  # keyword of `torch.autograd.grad`


@dataclass(frozen=True)
class Taken:
    """One call of `torch.autograd.grad` by a forward.

    enter, exit  when it starts and ends, in the time of the flow (`FlowOp.time`)
    by           tensor numbers of its `inputs`; () unless `plain`
    plain        whether all `inputs` are tensors with one gradient each, so that stages can each take a part
    """

    enter: int
    exit: int
    by: tuple[int, ...]
    plain: bool


def listed(tensors: Any) -> list[Any]:
    """Returns an argument of `torch.autograd.grad` (one tensor, or a sequence of them) as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) or not isinstance(tensors, list | tuple) else list(tensors)


def takes_gradients(func: Any) -> bool:
    """Whether `func` is `torch.autograd.grad`, called outside transforms of `torch.func`."""
    return func is torch.autograd.grad and not transforming()


class GradientWatch(TorchFunctionMode):
    """Function mode that runs each `torch.autograd.grad` inside `around(args, kwargs)`, unless inside another one."""

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
    """Returns `numbers` (of tensors) and the numbers of all tensors computed from those. `ops`: `FlowOp`s in order."""
    influenced_numbers = set(numbers)
    for op in ops:
        if not influenced_numbers.isdisjoint(op.reads):
            influenced_numbers.update(op.makes)
    return influenced_numbers
