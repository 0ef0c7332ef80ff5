"""Refuses what a script may not do to a prepared model, and checks between its steps that ranks stay alike.

    hooks that are given summands, a conversion after `prepare`    refused
    the model's parameter is not the one that the plan trains      replaced or unfrozen after `prepare`
    ranks that hold the same weights come to different ones        something changed them on one rank alone
    a buffer differs between ranks with different samples          the model's forward writes it from a rank's samples

Weights and buffers are compared after steps 1, 2, 4, 8 and so on, where an epoch ends, and before weights are saved.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.look.ranks_alike import HeldAlike
from shardwise.look.unowned import not_trained
from shardwise.parallel.fsdp import groups_of
from shardwise.scripts.script_lines import names_line, refuse
from shardwise.scripts.script_optimizer import THAWS

# functions of a tensor that read no elements, so that a piece answers them without a gather
_PROPERTIES = {
    "size", "dim", "stride", "is_contiguous", "is_floating_point", "is_complex", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "element_size", "storage_offset", "untyped_storage", "data_ptr", "__hash__",
    "get_device", "__delete__", "backward", "has_names", "is_shared", "new_zeros", "new_ones", "new_empty", "new_full",
}  # fmt: skip
OUTSIDE = (
    "{} into a weight, or a gradient, of which this rank holds a piece: write in `with prepared.whole():` (grads=True: "
    "gradients too), where model.parameters() are whole. An optimizer is made before prepare, or given to "
    "prepared.replace_optimizer"
)
TAKEN = (
    "torch.autograd.grad(..., parameters): what it gives is the gradient of this rank's samples alone, or of its part "
    "of the batch, and no rank has one process's: weigh losses by their values (prepared.sum), or read param.grad "
    "after prepared.backward(loss, retain_graph=True) of each; or, for an inner step (MAML), under replicas, "
    'zero=1 or zero=2, prepare(..., loss_scope="model"), by which every rank has whole batches'
)


class Gate:
    """Open while the engine itself reads parameters, so that it gets this rank's pieces; a reentrant context."""

    def __init__(self) -> None:
        self._opened = 0

    @property
    def is_open(self) -> bool:
        """Returns whether the engine, and not the script, reads parameters now."""
        return self._opened > 0

    def open(self) -> Gate:  # a generator's context would take as long as all that it is opened for
        """Returns the gate as a context, in which it is open."""
        return self

    def __enter__(self) -> None:
        self._opened += 1

    def __exit__(self, *error: object) -> None:
        self._opened -= 1

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Context in which the gate is closed, for the model's forward inside an engine's own call."""
        before, self._opened = self._opened, 0
        try:
            yield
        finally:
            self._opened = before


def mark_like(other: torch.Tensor, param: nn.Parameter) -> None:
    """Copies the attributes that the script put on a parameter (`p.lr_scale`) to `other`, which stands for it."""
    for name, value in vars(param).items():
        vars(other).setdefault(name, value)


def reads_values(func: Any) -> bool:
    """Returns whether a function of torch reads or writes a tensor's elements, and not only its properties."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in ("data", "T", "mT", "H", "real", "imag")
    return name not in _PROPERTIES


def writes_into(name: str) -> bool:
    """Returns whether a function of this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in _IN_PLACE


# in-place operators, such as __iadd__: those that have a binary form too
_IN_PLACE = frozenset(name for name in dir(torch.Tensor) if name.startswith("__i") and f"__{name[3:]}" in dir(int))


def refuse_hooks(model: nn.Module, plan: Plan) -> None:
    """Raises `RefusedPlan` if a script's hook on a gradient would not run, or would get one rank's summand.

    A rank's gradient is one summand until ranks have added theirs. A hook before accumulation that is right for
    summands too (a mask) is let through under replicas, and `shardwise verify` compares it. Shares of weights and
    FSDP's pieces run no such hooks, and hooks after accumulation always run before ranks have added.
    """
    spread = plan.tp > 1 or plan.ep > 1 or plan.sharded.weights
    for name, param in model.named_parameters():
        late = _of_script(param._post_accumulate_grad_hooks)
        # after accumulation a rank has its summand alone, under any plan; before it, replicas' whole shape lets a
        # mask be right
        if plan.world_size > 1 and (late or (spread and _of_script(param._backward_hooks))):
            raise RefusedPlan(
                f"parameter '{name}' has a hook on its gradient, which is given this rank's part of a sum over ranks "
                f"where one process gives it the whole gradient (plan {plan}): change gradients after "
                "prepared.backward, by param.grad, or clip with prepared.clip_grad_norm_"
            )


def _of_script(hooks: Any) -> bool:
    """Returns whether any of these hooks is the script's own; `hooks`: a dict of torch's, or None."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith(("shardwise.", "torch.")) for hook in (hooks or {}).values()
    )


def guard_conversion(model: nn.Module) -> None:
    """Makes `model.to`, `.double()` and the like raise `InputError` if they would change a tensor.

    A deep copy of the model still converts.
    """

    def apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        # a deep copy of the model gets this method too, but no plan holds its weights
        if module is not model:
            return type(module)._apply(module, function, recurse)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            found = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (found.dtype, found.device) != (tensor.dtype, tensor.device):
                raise InputError(
                    f"the model is converted or moved after prepare ('{name}': {tensor.dtype} on {tensor.device} to "
                    f"{found.dtype} on {found.device}), and the plan holds its weights as they were: do that before "
                    "prepare"
                )
        return module

    vars(model)["_apply"] = types.MethodType(apply, model)


_REMEDY = (
    "write it in the script instead, from outputs of all samples "
    '(prepare(..., loss_scope="global")) or from prepared.sum(tensor); or add up what it is made of '
    "by torch.distributed.all_reduce in the forward"
)
# a message with one place: the parameters' names
WRITTEN = (
    "the model's forward writes into {}, which zero=3 has gathered for it and frees again: use zero=2, make it a "
    "buffer, or, where it is initialised by data, run that forward before prepare"
)
_REPLACED = (
    "parameter '{}' was replaced after prepare (a conversion such as model.to or .double(), another parameter or "
    "module in its place, pruning), so what the plan trains is not what the model uses: do that before prepare, or "
    "write into the parameter that is there (param.data = ...)"
)


class FirstSteps:
    """Checks around an optimizer's steps that ranks stay alike; `before` and `after` are called at each step."""

    def __init__(self, engine: Engine) -> None:
        self._state, self._plan, self._steps = engine.state, engine.plan, 0  # the steps that are done
        self.places = ParametersInPlace(engine.module)
        trained = set(engine.state.names)
        self._frozen = [(name, param) for name, param in engine.module.named_parameters() if name not in trained]
        self._alike = HeldAlike(engine.module, engine.mesh, _REMEDY)

    def before(self) -> None:
        """Raises if a parameter or a hook on it is not the plan's; in the steps after which ranks are compared.

        Called before a step, with gradients complete. `InputError` for a replaced or unfrozen parameter, `RefusedPlan`
        for a hook that was added since `prepare`, and for a forward that wrote into a gathered weight.
        """
        if self._alike.is_due(self._steps + 1):
            self._check_places()

    def _check_places(self) -> None:
        """Raises if a parameter was replaced or unfrozen, or a hook was added, since the model was prepared."""
        self.places.check()
        refuse_hooks(self._state.module, self._plan)  # put on since prepare
        for name, param in self._frozen:
            if param.requires_grad:
                raise InputError(
                    f"parameter '{name}' was frozen when the model was prepared, and would not be trained: {THAWS}"
                )

    @torch.no_grad()
    def after(self) -> None:
        """Compares ranks after steps 1, 2, 4 and so on; called after each step, with weights published.

        Raises `RunError` if weights differ, `RefusedPlan` if buffers do. Collective in the steps that compare.
        """
        self._steps += 1
        self._state.notices += not_trained(self._state.module) if self._steps == 1 else []
        if self._alike.is_due(self._steps):
            self._alike(self._steps)

    @torch.no_grad()
    def again(self) -> None:
        """Compares ranks, whatever the step's number; raises as `after` does. Nothing before step 1. Collective."""
        if self._steps:
            self._check_places()
            self._alike(self._steps)


@names_line
def refuse_replaced(name: str) -> None:
    """Raises `InputError` that parameter `name` of the plan was replaced by another one in the model."""
    raise InputError(_REPLACED.format(name))


class ParametersInPlace:
    """Checks that a model's modules still hold the parameters that the plan trains.

    Another parameter in the place of one of these would be used and not trained.
    """

    def __init__(self, module: nn.Module) -> None:
        """Notes which parameters and submodules `module` has now."""
        of_units = units_parameters(module)
        # _places: (module, attribute, path, parameter, FSDP's record); _modules: (parent, attribute, child, path)
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
        """Raises `InputError` if a parameter or a submodule was replaced since this was made.

        Raises `RefusedPlan` for a write into a parameter that its FSDP unit gathered, which would be freed with the
        unit.
        """
        for child, leaf, name, param, of_unit in self._places:
            # within its unit's forward FSDP2 puts the gathered parameter in the place of the piece: that is no
            # replacement
            now, gathered = child._parameters.get(leaf), getattr(of_unit, "_unsharded_param", None)
            if now is not param and (gathered is None or now is not gathered):
                refuse_replaced(name)
            # gathering leaves the version at 0: a forward wrote, and what it wrote would be freed with the unit
            if gathered is not None and gathered._version:
                refuse(RefusedPlan(WRITTEN.format(name)))
        for child, leaf, part, name in self._modules:
            # an empty place (a module set to None) may be filled later
            if part is not None and child._modules.get(leaf) is not part:
                refuse_replaced(next((f"{name}.{of_part}" for of_part, _ in part.named_parameters()), name))


def units_parameters(module: nn.Module) -> dict[int, Any]:
    """Returns {id of a sharded parameter: FSDP's record of it (`FSDPParam`)} of all FSDP units in `module`."""
    units = [child for child in module.modules() if isinstance(child, FSDPModule)]
    groups = [group for unit in units for group in groups_of(unit)]
    return {id(one.sharded_param): one for group in groups for one in group.fsdp_params}
