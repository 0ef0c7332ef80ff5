"""`optimizer.param_groups` and `optimizer.state`, which hold this rank's pieces, in the hands of the script.

    group["lr"] = 1e-4                       the script's own, as ever
    group["params"][0].norm()                raises: it would be that of a piece
    optimizer.state[p]["exp_avg"]            raises
    torch.amp.GradScaler().unscale_(...)     divides the pieces; what is not finite is so on every rank (`stepping`)

While the optimizer itself runs, and in `prepared.whole()`, none of this is in the way.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.errors import RefusedPlan
from shardwise.scripts.guard import Gate
from shardwise.scripts.script_lines import names_line
from shardwise.scripts.script_weights import ScriptWeights, WeightUse


class OptimizerGuard:
    """Guards the pieces that a prepared optimizer holds, while the script's own code runs."""

    def __init__(self, weights: ScriptWeights) -> None:
        self._gate, self._kind = weights.gate, weights.kind(nn.Parameter, WeightUse("never", "never"))
        self._masters: list[nn.Parameter] = []
        self._hidden: HiddenState | None = None

    def watch(self, optimizer: Optimizer, model: nn.Module, *, state: bool) -> None:
        """Guard from here on what an optimizer holds beside the model's own parameters; `state`: its state too."""
        own = {id(param) for param in model.parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._masters = [param for param in params if id(param) not in own and type(param) is nn.Parameter]
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


class HiddenState(MutableMapping[Any, Any]):
    """Takes the place of an optimizer's `state`; the engine finds what is there, the script's own code raises."""

    def __init__(self, optimizer: Optimizer, gate: Gate) -> None:
        self._optimizer, self._gate, self._own = optimizer, gate, optimizer.state
        optimizer.state = self

    def leave(self) -> None:
        """Give the optimizer its state back, unless the script has put another in its place."""
        if self._optimizer.state is self:
            self._optimizer.state = self._own

    @names_line
    def _if_engine(self) -> MutableMapping[Any, Any]:
        if not self._gate.is_open:
            raise RefusedPlan(
                "optimizer.state holds this rank's pieces of the state: read and write it in "
                "`with prepared.whole(state=True):`; optimizer.state_dict() gives all of it"
            )
        return self._own

    def __getitem__(self, key: Any) -> Any:
        return self._if_engine()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._if_engine()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._if_engine()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._if_engine())

    def __len__(self) -> int:
        return len(self._if_engine())
