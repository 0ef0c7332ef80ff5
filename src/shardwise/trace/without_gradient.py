"""Find the calls in a forward that run while it has switched gradients off itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.trace.functional import transforming
from shardwise.trace.own_calls import OwnCalls

Place = tuple[str, int, int | None]  # (path, the how-manieth call of it, which function its own code calls or None)


@contextmanager
def switched_off(module: nn.Module) -> Iterator[set[Place]]:
    """Context: yields a set of the calls that are entered while gradients are off (no_grad, say)."""
    off: set[Place] = set()
    counts: dict[int, int] = {}
    seen: set[int] = {id(module)}
    handles = []

    def enter(child: nn.Module, path: str) -> None:
        if transforming():
            return
        place = counts.get(id(child), 0)
        counts[id(child)] = place + 1
        own.enter((path, place))
        if not torch.is_grad_enabled():
            off.add((path, place, None))

    def leave() -> None:
        if not transforming():
            own.leave()

    def note(whose: tuple[str, int], number: int, name: str, output: Any) -> None:
        if not torch.is_grad_enabled():
            off.add((*whose, number))

    own = OwnCalls(note, ("", 0))
    for path, child in module.named_modules():
        if id(child) not in seen:
            seen.add(id(child))
            handles.append(child.register_forward_pre_hook(lambda m, a, path=path: enter(m, path)))
            handles.append(child.register_forward_hook(lambda m, a, o: leave()))
    try:
        with own:
            yield off
    finally:
        for handle in handles:
            handle.remove()
