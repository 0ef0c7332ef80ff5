"""Hooks of the user's on modules that are cut into stages: where one would be given what another stage has.

on the outermost module, by its result      runs on the last stage alone: others return what they send on
a backward hook on a module                 is given gradients of its arguments and of its result in one call, so
                                            that no stage begins inside; one that begins with it receives its
                                            arguments before torch puts the hook on those (`stage`)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

BACKWARD_HOOK = "whose backward hook is given the gradients of its arguments and of its result in one call"


def hooked_in_backward(module: nn.Module) -> list[str]:
    """Returns the paths of the submodules inside which no stage begins, outermost first."""
    return [path for path, child in module.named_modules() if path and child._backward_hooks]


class ResultHooks:
    """The hooks that a module has now for its result or the gradient of that.

    To be made before the module is sharded: hooks that do that are for what each stage returns.
    """

    def __init__(self, module: nn.Module) -> None:
        tables = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
        self._hooks = [(table, dict(table)) for table in tables]

    @contextmanager
    def of(self, *, last: bool) -> Iterator[None]:
        """Context: a stage runs, without these hooks unless it is the last."""
        out = [] if last else self._hooks
        for table, hooks in out:
            for key in hooks:
                table.pop(key, None)
        try:
            yield
        finally:
            for table, hooks in out:
                added = dict(table)
                table.clear()
                table.update(hooks | added)
