"""Keep the gradients of a step's earlier backwards; a later one is added, as to `.grad` in one process.

    prepared.backward(loss)      summed over ranks and divided: whole, to be read and changed
    prepared.backward(again)     the same for itself; then added to what was there
    optimizer.step()
    prepared.backward(loss)      without zero_grad() in between: likewise

So a script may go back twice in a step (a judge's real and fake samples, an attack on weights, micro-batches that the
plan does not tell). Each backward is reduced by itself: with accumulate=2 in the plan both are reduced once.

What this does not do: divide sums by the weights of several backwards; those belong to one `accumulate`.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine.engine import Engine
from shardwise.parallel.full import FullShard
from shardwise.scripts.gradient_arrivals import techniques_of
from shardwise.step.normalise import norm_of_gradients


class Earlier:
    """The gradients of one step up to now, set aside while the next backward runs."""

    @torch.no_grad()
    def __init__(self, engine: Engine, usable: bool, *, stepped: bool) -> None:
        """`stepped`: the optimizer has used them, and nothing has taken them away since."""
        self._engine, self.usable, self.stepped = engine, usable, stepped
        self.used = set(engine.state.used)
        self._kept = [_set_aside(technique) for technique in techniques_of(engine)]

    @torch.no_grad()
    def add(self) -> float:
        """Add the earlier gradients to those of the last backward; returns the norm of all. Collective."""
        for technique, (gradients, uncut) in zip(techniques_of(self._engine), self._kept, strict=True):
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    _add(technique, index, gradient, uncut.get(index))
        return norm_of_gradients(self._engine.state)


def _set_aside(technique: Any) -> tuple[list[torch.Tensor | None], dict[int, torch.Tensor]]:
    """(what each slot, or unit's parameter, has; of those that FSDP2 does not cut the whole)."""
    sharded = isinstance(technique, FullShard)
    held = technique.params if sharded else [slot.master for slot in technique.slots]
    uncut = {index: whole.clone() for index, whole in technique._whole_gradients.items()} if sharded else {}
    return [None if one.grad is None else one.grad.detach().clone() for one in held], uncut


def _add(technique: Any, index: int, gradient: torch.Tensor, whole: torch.Tensor | None) -> None:
    slot = technique.slots[index]
    if not isinstance(technique, FullShard):
        slot.master.grad = gradient if slot.master.grad is None else slot.master.grad.add_(gradient)
        return
    param = technique.params[index]
    if whole is not None:
        param.grad = technique._whole_gradients[index].add_(whole)
        slot.master.grad = technique._uncut_piece(param.grad)
        return
    param.grad = gradient if param.grad is None else param.grad.add_(gradient)
    slot.master.grad = param.grad.to_local()
