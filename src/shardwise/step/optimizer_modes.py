"""Support optimizers with a mode, such as schedule-free ones: `train()` before a step, `eval()` to evaluate weights.

    optimizer.train()   the weights are those at which gradients are taken
    optimizer.eval()    the weights are those to evaluate, and to keep (an average of all before)

A mode moves weights and state element by element, as a step does, so a rank moves its pieces; the trial of the
optimizer (engine/optimizer) runs both modes.

What this does not do: switch modes while state is offloaded from an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch.optim import Optimizer

from shardwise.step.state import RankState

T = TypeVar("T")


def has_mode(optimizer: Optimizer | None) -> bool:
    """Whether an optimizer has `train()` and `eval()`, as schedule-free ones have."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def enter_training(optimizer: Any) -> None:
    """Calls `optimizer.train()` if it has modes, since its `step` is invalid in evaluation mode."""
    if has_mode(optimizer):
        optimizer.train()


def switch(state: RankState, change: Callable[[], Any]) -> Any:
    """Calls `change`, the optimizer's `train` or `eval`, and publishes the changed weights; returns its result.

    Collective.
    """
    result = change()
    if state.owners is not None:
        state.owners.hand_out(set(range(len(state.names))))
    state.technique.publish()
    return result


def during(context: AbstractContextManager[None], items: Iterable[T]) -> Iterator[T]:
    """Yields the items, each computed inside `context`, which is left after the last one."""
    with context:
        yield from items


@contextmanager
def evaluation_weights(state: RankState) -> Iterator[None]:
    """Context: the module has the optimizer's `eval()` weights (averages), if it has that mode. Collective."""
    optimizer: Any = state.optimizer
    if not has_mode(optimizer):
        yield
        return
    switch(state, optimizer.eval)
    try:
        yield
    finally:
        switch(state, optimizer.train)
