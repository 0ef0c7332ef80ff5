"""Whole gradients for a script's code that reads, changes and sets them, while ranks hold pieces.

    p.grad               gathered, once in a step, on every rank; None before the first backward
    p.grad.mul_(0.5)     changes the whole gradient, of which each rank takes its piece before the optimizer steps
    p.grad = other       likewise; None leaves the parameter out of this step

    prepared.backward(loss); prepared.backward(again)       each is reduced by itself, then added to the gradient that
                                                            is there, as in one process, also if steps lack zero_grad()

What this does not do: divide sums by the weights of several backwards, which belong to one `accumulate`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.comm import gathered_alone
from shardwise.engine.engine import Engine
from shardwise.engine.whole import together
from shardwise.errors import RefusedPlan
from shardwise.parallel.full import FullShard
from shardwise.parallel.slots import Slot
from shardwise.scripts.gradient_arrivals import techniques_of
from shardwise.scripts.script_lines import names_line
from shardwise.scripts.whole_optimizer_state import share_of
from shardwise.step.normalise import norm_of_gradients
from shardwise.step.state import RankState

_STRAY = (
    "param.grad of a backward of the script's own (loss.backward()), which the plan does not add up over ranks: give "
    "the loss to prepared.backward(loss), or take gradients of its own in a plain copy of the model (copy.deepcopy)"
)


class Gradients:
    """The whole gradients of one model's parameters, as the script reads and sets them.

    by_hand  Whether the script has set some in this step
    """

    def __init__(self, prepared: Any, state: RankState) -> None:
        """Holds `prepared`, which `prepare` returned, weakly; `state` is its rank's."""
        self._prepared, self._state = weakref.ref(prepared), state
        held = dict(state.module.named_parameters())
        self._params = [held[name] for name in state.names]
        self.by_hand = False
        self._names = {id(held[name]): name for name in state.names}
        self._seen: dict[str, torch.Tensor | None] = {}  # name -> whole gradient read or set in this step

    @property
    def _script(self) -> Any:
        script = self._prepared()
        assert script is not None
        return script

    @names_line
    def get(self, param: nn.Parameter) -> torch.Tensor | None:
        """Returns the whole gradient of a parameter; None if it has none. Collective, the first time in a step.

        Raises as `make_whole` does.
        """
        self.make_whole()
        name = self._names.get(id(param))
        if name is None or (self._script.are_whole() is None and name not in self._seen):
            return None
        if name not in self._seen:
            (self._script._passes if self._seen else self._script.meet)(f"the gradient of '{name}'")
            self._seen[name] = self._gathered(name)
        return self._seen[name]

    def of_all(self, params: Iterable[str]) -> dict[str, torch.Tensor | None]:
        """Returns {name: whole gradient, None without one} of the parameters named `params`. Collective."""
        self.make_whole()
        for name in params:
            if self._script.are_whole() and name in self._names.values() and name not in self._seen:
                self._seen[name] = self._gathered(name)
        return {name: self._seen.get(name) for name in params}

    def seen(self, name: str) -> torch.Tensor | None:
        """Returns the whole gradient that the script has read or set in this step; None if it has done neither."""
        return self._seen.get(name)

    @names_line
    def make_whole(self) -> None:
        """Sums over ranks the gradients so far, if fewer micro-batches than the plan's `accumulate` have come.

        Collective.
        Later backwards add to the sum. Raises `RefusedPlan` if some gradients came from a backward of the script's own.
        """
        if self._script.calls.stray and self._script.mesh.world.size > 1:
            raise RefusedPlan(_STRAY)
        if self._script.are_whole() is False:
            self._script.meet("param.grad before the plan's last micro-batch", always=True)
            self._script._flush()

    @names_line
    def set(self, param: nn.Parameter, value: torch.Tensor | None) -> None:
        """Sets `param.grad = value`, the same value on every rank."""
        name = self._names.get(id(param))
        # None over nothing changes nothing, and needs no rank; a parameter outside the plan is torch's own affair
        if name is None or (value is None and (self._script.are_whole() is None or self._seen.get(name, name) is None)):
            return
        if self.get(param) is None and name not in self._seen:  # without a backward before
            self._script.meet(f"the gradient of '{name}'")
        self._seen[name], self.by_hand = value, True

    def take_away(self, names: Iterable[str]) -> None:
        """Removes the gradients of these parameters for this step, as `p.grad = None` does on every rank."""
        self._seen.update(dict.fromkeys(names))
        self.by_hand = True

    def begin_with(self, gradients: dict[str, torch.Tensor | None]) -> None:
        """Begins the first step with the gradients that a script had set before: {name: gradient or None}."""
        self._seen.update({name: gradients[name] for name in self._state.names if gradients[name] is not None})
        self.by_hand = bool(self._seen)

    @torch.no_grad()
    def _gathered(self, name: str) -> torch.Tensor | None:
        """Returns a copy of the whole gradient of the parameter `name`, or None. Collective."""
        state = self._state
        with self._script._gate.open():
            found = gathered_alone(together(state, name, state.technique.full_gradient(state.names.index(name))))
            return None if found is None else found.detach().clone()

    @torch.no_grad()
    def put_back(self) -> None:
        """Writes the whole gradients, as the script has changed them, into this rank's pieces. Nothing is sent."""
        state = self._state
        if isinstance(state.technique, FullShard):
            state.technique.take_uncut()  # whole on every rank: there the script has changed FSDP2's own gradient
        for name, value in self._seen.items():
            index = state.names.index(name)
            # a gradient of None keeps the parameter out of the step, as in one process
            (state.used.discard if value is None else state.used.add)(index)
            share = None if value is None else share_of(state, name, value.detach().as_subclass(torch.Tensor))
            for slot in state.technique.slots:
                if slot.name != name:
                    continue
                if isinstance(state.technique, FullShard) and (share is None or slot.master.grad is None):
                    # there is no shard's gradient to copy into (there was none), or none may stay: FSDP2's parameter
                    # has one of its own, to which a later backward adds
                    state.technique.place_gradient(index, share)
                else:
                    slot.master.grad = None if share is None else self._piece(slot, index, share)

    def _piece(self, slot: Slot, index: int, share: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece of a gradient, copied into the slot's present gradient if it has one.

        index  of the parameter among the plan's trained names
        share  its gradient, after tp and ep have taken their share
        """
        technique: Any = self._state.technique
        if not slot.whole:
            share = technique.select(index, share.contiguous(), self._state.mesh.shard.index)
        held, share = slot.master.grad, share.reshape(slot.master.shape)
        return share.to(slot.master.dtype, copy=True) if held is None else held.copy_(share)

    def are_set(self) -> bool:
        """Returns whether the script has set gradients by hand in a step in which no backward has come."""
        technique = self._state.technique
        if self.by_hand or isinstance(technique, FullShard):
            return self.by_hand
        with self._script._gate.open():
            return any(param.grad is not None for param in self._params)

    @torch.no_grad()
    def scaled(self, factor: float) -> None:
        """Multiplies the whole gradients that the script has seen by `factor`, as clipping did this rank's pieces."""
        for value in self._seen.values():
            if value is not None:
                value.mul_(factor)

    def forget(self) -> None:
        """Drops the whole gradients of the last step."""
        self.by_hand = False
        self._seen.clear()


class Earlier:
    """The gradients of a step so far, set aside while its next backward runs.

    usable   Whether they are finite
    stepped  Whether the optimizer has used them, and none was cleared since
    used     indices of the parameters that their backwards reached
    """

    @torch.no_grad()
    def __init__(self, engine: Engine, usable: bool, *, stepped: bool) -> None:
        """Copies the present gradients; see the class for `usable` and `stepped`."""
        self._engine, self.usable, self.stepped = engine, usable, stepped
        self.used = set(engine.state.used)
        self._kept = [_set_aside(technique) for technique in techniques_of(engine)]

    @torch.no_grad()
    def add(self) -> float:
        """Adds the earlier gradients to those of the last backward; returns the norm of the sum over all ranks.

        Collective.
        """
        for technique, (gradients, uncut) in zip(techniques_of(self._engine), self._kept, strict=True):
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    _add(technique, index, gradient, uncut.get(index))
        return norm_of_gradients(self._engine.state)


def _set_aside(technique: Any) -> tuple[list[torch.Tensor | None], dict[int, torch.Tensor]]:
    """Returns (copies of the gradients, by parameter; {index: whole gradient} of parameters that FSDP2 replicates)."""
    # FSDP2 accumulates at its own parameters; the other techniques at the slots' masters
    sharded = isinstance(technique, FullShard)
    held = technique.params if sharded else [slot.master for slot in technique.slots]
    uncut = {index: whole.clone() for index, whole in technique._whole_gradients.items()} if sharded else {}
    return [None if one.grad is None else one.grad.detach().clone() for one in held], uncut


def _add(technique: Any, index: int, gradient: torch.Tensor, whole: torch.Tensor | None) -> None:
    """Adds an earlier gradient to that of the parameter `index`.

    whole  the whole gradient, if FSDP2 replicates the parameter; else None
    """
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
