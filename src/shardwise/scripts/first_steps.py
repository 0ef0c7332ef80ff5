"""Between a script's steps: the model's parameters are the plan's, and ranks that share weights hold the same.

    the model's parameter is not the one that the plan trains      replaced or unfrozen after `prepare`
    ranks that hold the same weights come to others                something moved on one rank alone
    a buffer is another on ranks with other samples                the model's forward writes it from a rank's samples
    no weight moves in the first steps                             the optimizer steps on other tensors

Weights and buffers are compared after steps 1, 2, 4, 8 and so on, where an epoch ends, and before weights are saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RunError
from shardwise.look.ranks_alike import HeldAlike, elements
from shardwise.parallel.fsdp import groups_of
from shardwise.scripts.script_lines import names_line
from shardwise.scripts.script_optimizer import THAWS

_MOVED_BY = 3  # steps
_FEW = 16  # elements of a weight
_REMEDY = (
    "write it in the script instead, from outputs of all samples "
    '(prepare(..., loss_scope="global")) or from prepared.sum(tensor); or add up what it is made of '
    "by torch.distributed.all_reduce in the forward"
)
_REPLACED = (
    "parameter '{}' was replaced after prepare (a conversion such as model.to or .double(), another parameter or "
    "module in its place, pruning), so what the plan trains is not what the model uses: do that before prepare, or "
    "write into the parameter that is there (param.data = ...)"
)


class FirstSteps:
    """Beside an optimizer's steps: `before` and `after` each."""

    def __init__(self, engine: Engine) -> None:
        self._steps = 0  # done
        self._movement: Movement | None = Movement(engine)
        self._places = ParametersInPlace(engine.module)
        trained = set(engine.state.names)
        self._frozen = [(name, param) for name, param in engine.module.named_parameters() if name not in trained]
        self._alike = HeldAlike(engine.module, engine.mesh, _REMEDY)

    def before(self) -> None:
        """The gradients are whole, the step is next. Raises `InputError` for parameters that are not the plan's."""
        if self._movement is not None:
            self._movement.before()
        self._places.check()
        for name, param in self._frozen:
            if param.requires_grad:
                raise InputError(
                    f"parameter '{name}' was frozen when the model was prepared, and would not be trained: {THAWS}"
                )

    @torch.no_grad()
    def after(self) -> None:
        """The weights are published. Collective after some steps; raises `RunError` or `RefusedPlan`."""
        self._steps += 1
        if self._movement is not None and self._steps == _MOVED_BY:
            self._movement.check()
            self._movement = None
        if self._alike.is_due(self._steps):
            self._alike(self._steps)

    @torch.no_grad()
    def again(self) -> None:
        """Raise where what ranks hold alike has come apart. Collective."""
        if self._steps:
            self._alike(self._steps)


class Movement:
    """Whether a rank's weights move in a run's first steps: an optimizer may hold others than the plan gave it."""

    def __init__(self, engine: Engine) -> None:
        self._state = engine.state
        self._begun: list[torch.Tensor] = []  # some elements of each weight, before the first step
        self._should = False

    @torch.no_grad()
    def before(self) -> None:
        """Note whether a step of the learning rate along the gradients would be seen in a weight."""
        masters = [slot.master for slot in self._state.technique.slots]
        self._begun = self._begun or [_some(master).clone() for master in masters]
        rate = max(float(group.get("lr", 0.0)) for group in self._state.optimizer.param_groups)
        for master, few in zip(masters, self._begun, strict=True):
            if master.grad is not None and len(few):
                seen = 4 * torch.finfo(few.dtype).eps * float(few.abs().max())
                self._should |= rate * float(_some(master.grad).abs().max()) > seen

    @torch.no_grad()
    def check(self) -> None:
        """Raise `RunError` where nothing moved that should have."""
        now = [_some(slot.master) for slot in self._state.technique.slots]
        if self._should and all(map(torch.equal, now, self._begun)):
            raise RunError(
                f"the weights did not move in {_MOVED_BY} steps, although gradients and the learning rate are not "
                "zero: the optimizer's step() does nothing to the tensors that the plan gave it"
            )


def _some(tensor: torch.Tensor) -> torch.Tensor:
    flat = elements(tensor)
    return flat[:: max(1, len(flat) // _FEW)]


@names_line
def refuse_replaced(name: str) -> None:
    """Raise `InputError`: another parameter or tensor stands in the place of one that the plan trains."""
    raise InputError(_REPLACED.format(name))


class ParametersInPlace:
    """The parameters of a model where its modules have them: another would take no part in the plan."""

    def __init__(self, module: nn.Module) -> None:
        of_units = _of_units(module)
        self._places, self._modules = [], []
        for path, child in module.named_modules():
            under = f"{path}." if path else ""
            self._modules += [(child, leaf, part, under + leaf) for leaf, part in child._modules.items()]
            self._places += [
                (child, leaf, under + leaf, param, of_units.get(id(param)))
                for leaf, param in child._parameters.items()
                if param is not None
            ]

    def check(self) -> None:
        """Raise `InputError` where a parameter, or its module, was replaced by another object."""
        for child, leaf, name, param, of_unit in self._places:
            now = child._parameters.get(leaf)
            if now is not param and (of_unit is None or now is not getattr(of_unit, "_unsharded_param", None)):
                refuse_replaced(name)
        for child, leaf, part, name in self._modules:
            if part is not None and child._modules.get(leaf) is not part:
                refuse_replaced(next((f"{name}.{of_part}" for of_part, _ in part.named_parameters()), name))


def _of_units(module: nn.Module) -> dict[int, Any]:
    """FSDP's record of each parameter that it shards."""
    units = [child for child in module.modules() if isinstance(child, FSDPModule)]
    groups = [group for unit in units for group in groups_of(unit)]
    return {id(one.sharded_param): one for group in groups for one in group.fsdp_params}
