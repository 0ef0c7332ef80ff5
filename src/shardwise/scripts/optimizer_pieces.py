"""`optimizer.param_groups` and `optimizer.state`, which hold this rank's pieces, in the hands of the script.

    group["lr"] = 1e-4                       the script's own, as ever
    group["params"][0].norm()                raises: it would be that of a piece
    optimizer.state[p]["exp_avg"]            raises
    torch.amp.GradScaler().unscale_(...)     divides the pieces; what is not finite is so on every rank (`stepping`)

While the optimizer itself runs, and in `prepared.whole()`, none of this is in the way.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.amp import grad_scaler
from torch.optim import Optimizer

from shardwise.errors import RefusedPlan
from shardwise.scripts.guard import Gate, reads_values
from shardwise.scripts.script_lines import names_line

_PIECE = (
    "{} of a tensor in optimizer.param_groups, which holds this rank's pieces of the weights: read and write whole "
    "ones in `with prepared.whole(grads=True):`, where groups list them; clip by prepared.clip_grad_norm_(max_norm)"
)
_STATE = (
    "optimizer.state holds this rank's pieces of the state: read and write it in `with prepared.whole(state=True):`; "
    "optimizer.state_dict() gives all of it"
)


class OptimizerGuard:
    """Guards the pieces that a prepared optimizer holds, while the script's own code runs."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._kind = _kind_of(weakref.ref(self))
        self._masters: list[nn.Parameter] = []
        self._hidden: HiddenState | None = None

    def watch(self, optimizer: Optimizer, model: nn.Module, *, state: bool) -> None:
        """Guard from here on what an optimizer holds beside the model's own parameters; `state`: its state too."""
        own = {id(param) for param in model.parameters()}
        held = [param for group in optimizer.param_groups for param in group["params"]]
        self._masters = [param for param in held if id(param) not in own and type(param) is nn.Parameter]
        for master in self._masters:
            master.__class__ = self._kind
        if state:
            self.hide_state(optimizer)

    def hide_state(self, optimizer: Optimizer) -> None:
        """Let the script's own questions for the optimizer's state raise."""
        self._hidden = HiddenState(optimizer, self._gate)

    def leave(self) -> None:
        """Stop guarding: the optimizer or the engine goes to work, or whole tensors take the pieces' place."""
        for master in self._masters:
            master.__class__ = nn.Parameter
        self._masters = []
        hidden, self._hidden = self._hidden, None
        if hidden is not None:
            hidden.leave()

    def answers_itself(self) -> bool:
        """Whether it is not the script's own code that asks."""
        return self._gate.is_open


def _kind_of(guard_ref: weakref.ref[OptimizerGuard]) -> type[nn.Parameter]:
    own = torch.Tensor.grad

    class OptimizerPiece(nn.Parameter):
        @property
        def grad(self) -> torch.Tensor | None:
            guard = guard_ref()
            scales = sys._getframe(1).f_code.co_filename == grad_scaler.__file__
            if guard is not None and not guard.answers_itself() and not scales:
                _refuse(".grad")
            return own.__get__(self)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            guard = guard_ref()
            if guard is not None and not guard.answers_itself() and value is not None:
                _refuse(".grad")
            own.__set__(self, value)

        @grad.deleter
        def grad(self) -> None:
            own.__delete__(self)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            guard = guard_ref()
            if guard is not None and not guard.answers_itself() and reads_values(func):
                _refuse(getattr(func, "__name__", str(func)))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return OptimizerPiece


@names_line
def _refuse(name: str) -> None:
    raise RefusedPlan(_PIECE.format(name))


@names_line
def _refuse_state() -> None:
    raise RefusedPlan(_STATE)


class HiddenState(MutableMapping[Any, Any]):
    """Takes the place of an optimizer's `state`; the engine finds what is there, the script's own code raises."""

    def __init__(self, optimizer: Optimizer, gate: Gate) -> None:
        self._optimizer, self._gate, self._own = optimizer, gate, optimizer.state
        optimizer.state = self

    def leave(self) -> None:
        """Give the optimizer its state back, unless the script has put another in its place."""
        if self._optimizer.state is self:
            self._optimizer.state = self._own

    def _if_engine(self) -> MutableMapping[Any, Any]:
        if not self._gate.is_open:
            _refuse_state()
        return self._own

    def __getitem__(self, key: Any) -> Any:
        return self._if_engine()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._if_engine()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._if_engine()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._if_engine()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._if_engine())

    def __len__(self) -> int:
        return len(self._if_engine())
