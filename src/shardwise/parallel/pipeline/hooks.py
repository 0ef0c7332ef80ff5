"""The user's hooks on modules that are split into stages, where a hook would need tensors of several stages.

forward hooks of the outermost module     run on the last stage alone, since others return what they send on
a backward hook of a submodule            gets gradients of the module's arguments and result in one call, so no stage
                                          begins inside; a stage that begins at the module puts in what it received
                                          before torch attaches the hook to the arguments (`stage`)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

BACKWARD_HOOK = "whose backward hook is given the gradients of its arguments and of its result in one call"


def hooked_in_backward(module: nn.Module) -> list[str]:
    """Returns the paths of submodules with backward hooks, inside which no stage may begin, outermost first."""
    return [path for path, child in module.named_modules() if path and child._backward_hooks]


class ResultHooks:
    """The forward and backward hooks that a module has now.

    To be made before the module is sharded, since hooks added by sharding must run on every stage.
    """

    def __init__(self, module: nn.Module) -> None:
        tables = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
        self._hooks = [(table, dict(table)) for table in tables]

    @contextmanager
    def of(self, *, last: bool) -> Iterator[None]:
        """Context in which a stage runs. `last`: whether it is the last stage; otherwise these hooks are removed."""
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
