"""Check a script's first steps: weights move, are the model's own, and are equal on ranks that share them.

    gradient and learning rate are not zero, and nothing moves     the optimizer holds other tensors than the plan
    the model's parameter is not the one that the plan trains      converted, replaced or unfrozen after `prepare`
    ranks that hold the same weights come to others                something moved on one rank alone
    a buffer is another on ranks with other samples                the model's forward writes it from a rank's samples;
                                                                   asked after steps 4, 8, 16 and so on too, where
                                                                   an epoch ends, and before weights are saved

Looked at are a few elements of each weight.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.comm import gather_rows
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RunError
from shardwise.host import put
from shardwise.look.ranks_alike import HeldAlike, elements
from shardwise.parallel.fsdp import groups_of
from shardwise.parallel.slots import Slot
from shardwise.scripts.optimizer import THAWS
from shardwise.scripts.script_lines import names_line

_STEPS = 3
_AGAIN = 50  # steps from one look at whose parameters the model has to the next
_FEW = 16  # elements of a tensor
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
    """Beside an optimizer's steps: `before` and `after` each; both are free after the first few."""

    def __init__(self, engine: Engine, groups: list[list[str]]) -> None:
        self.engine, self.groups = engine, groups
        self._steps = 0  # done
        self._seen: list[tuple[Slot, slice, torch.Tensor, float, float]] = []  # slot, few elements, values, |g|, rate
        self._moved = self._should = False
        self._frozen = [param for param in engine.module.parameters() if not param.requires_grad]
        self.alike = HeldAlike(engine.module, engine.mesh, _REMEDY)

    @torch.no_grad()
    def before(self) -> None:
        """The gradients are whole, the step is next. Raises `InputError` for parameters that are not the plan's."""
        if self._steps < _STEPS or self._steps % _AGAIN == 0 or any(param.requires_grad for param in self._frozen):
            self._check_parameters()
        if self._steps >= _STEPS:
            return
        rates = {
            name: float(group.get("lr", 0.0))
            for group, names in zip(self.engine.state.optimizer.param_groups, self.groups, strict=True)
            for name in names
        }
        self._seen.clear()
        for slot in self.engine.technique.slots:
            if slot.master.grad is None or not elements(slot.master).numel() or slot.name not in rates:
                continue
            gradient, values = elements(slot.master.grad), elements(slot.master)
            few = slice(None, None, max(1, gradient.numel() // _FEW))
            largest = float(gradient[few].abs().max())
            self._seen.append((slot, few, values[few].clone(), largest, rates[slot.name]))

    @torch.no_grad()
    def after(self) -> None:
        """The weights are published. Collective in the first steps and some later ones; raises `RunError`."""
        self._steps += 1
        if self._steps > _STEPS:
            if self.alike.is_due(self._steps):
                self.alike(self._steps)
            return
        for slot, few, values, gradient, rate in self._seen:
            self._moved |= not torch.equal(elements(slot.master)[few], values)
            least = 4 * torch.finfo(values.dtype).eps * float(values.abs().max())
            self._should |= rate * gradient > least
        device, world = self.engine.device, self.engine.mesh.world
        row = [float(self._moved), float(self._should), *self.alike.row()]
        table = gather_rows(put(row, device), world).cpu()
        if self._steps == _STEPS and not bool(table[:, 0].any()) and bool(table[:, 1].any()):
            raise RunError(
                f"the weights did not move in {_STEPS} steps, although gradients and the learning rate are not "
                "zero: the optimizer's step() does nothing to the tensors that the plan gave it"
            )
        self.alike.check(table[:, 2:], self._steps)

    @torch.no_grad()
    def again(self) -> None:
        """Raise where what ranks hold alike has come apart. Collective."""
        if self._steps:
            self.alike(self._steps)

    def _check_parameters(self) -> None:
        """What the model has under a trained name is what the plan trains, and nothing else wants a gradient."""
        params = dict(self.engine.module.named_parameters())
        more = sorted({name for name, param in params.items() if param.requires_grad} - set(self.engine.state.names))
        if more:
            raise InputError(
                f"parameter '{more[0]}' was frozen, or not there, when the model was prepared, and would not be "
                f"trained: {THAWS}"
            )
        if self.engine.state.precision.mixed:
            return
        for slot in self.engine.technique.slots:
            param = params.get(slot.name)
            if param is None or not _is_same(param, slot.master):
                raise InputError(_REPLACED.format(slot.name))


@names_line
def refuse_replaced(name: str) -> None:
    """Raise `InputError`: another parameter or tensor stands in the place of one that the plan trains."""
    raise InputError(_REPLACED.format(name))


class InPlace:
    """Parameters that are cut, in whose place another would take no part in the plan, or be taken away again."""

    def __init__(self, module: nn.Module, cuts: Collection[str]) -> None:
        """`cuts`: names of those that tp or ep cut; FSDP's are known by themselves."""
        of_units = _of_units(module)
        self._places = [
            (child, leaf, f"{path}.{leaf}" if path else leaf, param, of_units.get(id(param)))
            for path, child in module.named_modules()
            for leaf, param in child._parameters.items()
            if id(param) in of_units or (f"{path}.{leaf}" if path else leaf) in cuts
        ]

    def check(self) -> None:
        """Raise `InputError` where a parameter of the plan was replaced by another object in its module."""
        for child, leaf, name, param, of_unit in self._places:
            found = child._parameters.get(leaf)
            if found is not param and (of_unit is None or found is not getattr(of_unit, "_unsharded_param", None)):
                refuse_replaced(name)


def parameters_of_units(module: nn.Module) -> list[Any]:
    """Returns what FSDP itself puts in the places of the parameters that it shards: pieces, and whole ones."""
    units = [child for child in module.modules() if isinstance(child, FSDPModule)]
    groups = [group for unit in units for group in groups_of(unit)]
    held = [one for group in groups for one in group.fsdp_params]
    return [one.sharded_param for one in held] + [getattr(one, "_unsharded_param", None) for one in held]


def _of_units(module: nn.Module) -> dict[int, Any]:
    """FSDP's record of each parameter that it shards."""
    units = [child for child in module.modules() if isinstance(child, FSDPModule)]
    groups = [group for unit in units for group in groups_of(unit)]
    return {id(one.sharded_param): one for group in groups for one in group.fsdp_params}


def _is_same(param: nn.Parameter, master: nn.Parameter) -> bool:
    if param is master:
        return True
    one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (param.detach(), master.detach()))
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
