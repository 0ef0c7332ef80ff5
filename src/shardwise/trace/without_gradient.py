"""Find the calls for which a forward switches gradients off, and leave out hooks on tensors without gradients.

A forward that is only recorded runs without gradients, which its own code does not expect: `x.register_hook(...)`
would raise there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shardwise.trace.functional import transforming
from shardwise.trace.own_calls import OwnCalls, Spot

Place = tuple[str, int, Spot | None]  # (module path, index of its call, torch call in its code or None: itself)


class HooksLeftOut(TorchFunctionMode):
    """Function mode that ignores hooks on the gradients of tensors that require none.

    To be entered before modes that look at who calls a function.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if hooks_nothing(func, args):
            return RemovableHandle(OrderedDict())  # which the forward may remove
        return func(*args, **(kwargs or {}))


def hooks_nothing(func: Any, args: tuple) -> bool:
    """Whether a call registers a hook on, or retains, the gradient of a tensor that requires none."""
    return func in _HOOKS and not args[0].requires_grad


_HOOKS = (torch.Tensor.register_hook, torch.Tensor.retain_grad)


@dataclass
class WithGradients:
    """What a forward with gradients on shows.

    off    the calls, of submodules and torch functions, that run while the forward has switched gradients off
    calls  the number of all such calls
    """

    off: set[Place] = field(default_factory=set)
    calls: int = 0


@contextmanager
def switched_off(module: nn.Module) -> Iterator[WithGradients]:
    """Context that yields a `WithGradients`, filled while the module's forward runs inside."""
    seen_so_far = WithGradients()
    off = seen_so_far.off
    counts: dict[int, int] = {}
    seen: set[int] = {id(module)}
    handles = []

    def enter(child: nn.Module, path: str) -> None:
        if transforming():  # what a transform runs is one operation of its caller
            return
        place = counts.get(id(child), 0)
        counts[id(child)] = place + 1
        seen_so_far.calls += 1
        own.enter((path, place))
        if not torch.is_grad_enabled():
            off.add((path, place, None))

    def leave() -> None:
        if not transforming():
            own.leave()

    def note(whose: tuple[str, int], number: Spot, name: str, output: Any) -> None:
        seen_so_far.calls += 1
        if not torch.is_grad_enabled():
            off.add((*whose, number))

    own = OwnCalls(note, None)
    handles.append(module.register_forward_pre_hook(lambda m, a: own.enter(("", 0))))
    handles.append(module.register_forward_hook(lambda m, a, o: own.leave()))
    for path, child in module.named_modules():
        # the root has the hooks above
        if id(child) not in seen:
            seen.add(id(child))
            handles.append(child.register_forward_pre_hook(lambda m, a, path=path: enter(m, path)))
            handles.append(child.register_forward_hook(lambda m, a, o: leave()))
    try:
        with own:
            yield seen_so_far
    finally:
        for handle in handles:
            handle.remove()
