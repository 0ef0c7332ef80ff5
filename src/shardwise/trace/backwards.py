"""The one place where torch's backwards are watched, whoever asks for them: `backward()`, `autograd.grad`, hooks.

They all call `torch.autograd._engine_run_backward`, in whose place a `_Watched` stands while anybody watches. What
transforms of `torch.func` differentiate is not told: it is part of whoever called the transform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from shardwise.trace.functional import transforming

# (roots, create_graph, inputs: () for backward()) -> what a backward runs inside
Around = Callable[[Any, bool, Any], AbstractContextManager[None]]


class _Watched:
    """Runs torch's backward inside the contexts of those that watch, the last one to begin outermost."""

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
    """Run every backward from now on inside `around(...)`; returns what ends that."""
    if not isinstance(torch.autograd._engine_run_backward, _Watched):
        torch.autograd._engine_run_backward = _Watched(torch.autograd._engine_run_backward)
    watched = torch.autograd._engine_run_backward
    watched.watchers.append(around)

    def end() -> None:
        watched.watchers.remove(around)
        if not watched.watchers and torch.autograd._engine_run_backward is watched:
            torch.autograd._engine_run_backward = watched.run

    return end


@contextmanager
def watching_backwards(around: Around) -> Iterator[None]:
    """Context: every backward runs inside `around(...)`."""
    end = watch_backwards(around)
    try:
        yield
    finally:
        end()
