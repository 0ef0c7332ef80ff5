"""Runs the script's hooks around `optimizer.step()` on whole weights and gradients, while ranks hold pieces.

    one process   pre hooks . step . post hooks                     torch calls them within optimizer.step()
    ranks         whole(grads=True): pre hooks . step of pieces, weights published . whole(grads=True): post hooks

So a hook reads and writes what it has in one process (an average, a norm of each tensor, a projection). What it writes
is compared over ranks, as in `prepared.whole()`. Bytes: what a `whole` gathers, before the step and after it.

What this does not do: run the model within a hook, or let a hook change the arguments of `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from shardwise.errors import RefusedPlan

Table = MutableMapping[int, Callable]  # torch's key of a hook -> the hook


def _tables(optimizer: Optimizer) -> tuple[list[Table], list[Table]]:
    """Returns (tables of hooks before a step, tables of those after it), in the order in which torch runs them."""
    before = [torch_optimizer._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks]
    return before, [optimizer._optimizer_step_post_hooks, torch_optimizer._global_optimizer_post_hooks]


def _is_of_script(hook: Callable) -> bool:
    """Whether a hook is the script's and not ours."""
    return not str(getattr(hook, "__module__", "")).startswith("shardwise.")


def hooks_around(optimizer: Optimizer) -> tuple[list[Callable], list[Callable]]:
    """Returns (the script's hooks before the step, those after it), torch's global hooks included."""
    before, after = (
        [h for table in tables for h in table.values() if _is_of_script(h)] for tables in _tables(optimizer)
    )
    return before, after


@contextmanager
def hooks_aside(optimizer: Optimizer) -> Iterator[None]:
    """Context in which a step runs without the script's hooks."""
    # copies, since the tables themselves are emptied: torch reads them within `step`
    kept = [(table, dict(table)) for tables in _tables(optimizer) for table in tables]
    for table, hooks in kept:
        for key, hook in hooks.items():
            if _is_of_script(hook):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in kept:
            # rebuilt whole, as putting single hooks back would change their order
            table.clear()
            table.update(hooks)


def run_hooks(optimizer: Optimizer, hooks: list[Callable], whole: Callable[[], AbstractContextManager[None]]) -> None:
    """Runs hooks inside the context `whole()`; `RefusedPlan` if one returns a value.

    Collective unless `hooks` is [].
    """
    if not hooks:
        return
    with whole():
        for hook in hooks:
            if hook(optimizer, (optimizer,), {}) is not None:
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise RefusedPlan(
                    f"the optimizer's step hook {name} returns other arguments for optimizer.step(), where ranks step "
                    "over pieces: change p.grad or the weights in it, and return None"
                )
