"""Optimizers with a mode, such as schedule-free ones: `train()` before a step, `eval()` for weights to be looked at.

    optimizer.train()   the weights are those at which gradients are taken
    optimizer.eval()    the weights are those to evaluate, and to keep (an average of all before)

A mode moves weights and state element by element, as a step does, so a rank moves its pieces; the trial of the
optimizer (engine/optimizer) runs both modes.

What this does not do: modes of state that lies in a tier.
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
    """Switch an optimizer with a mode to training; its steps raise or go wrong elsewhere."""
    if has_mode(optimizer):
        optimizer.train()


def switch(state: RankState, change: Callable[[], Any]) -> Any:
    """Run `change`, the optimizer's `train` or `eval`, on this rank's pieces; returns its result. Collective."""
    result = change()
    if state.owners is not None:
        state.owners.hand_out(set(range(len(state.names))))
    state.technique.publish()
    return result


def during(context: AbstractContextManager[None], items: Iterable[T]) -> Iterator[T]:
    """Yields the items, which are computed one by one inside the context."""
    with context:
        yield from items


@contextmanager
def evaluation_weights(state: RankState) -> Iterator[None]:
    """Context: the optimizer's `eval()` weights (its averages) are in place, where it has such a mode. Collective."""
    optimizer: Any = state.optimizer
    if not has_mode(optimizer):
        yield
        return
    switch(state, optimizer.eval)
    try:
        yield
    finally:
        switch(state, optimizer.train)
