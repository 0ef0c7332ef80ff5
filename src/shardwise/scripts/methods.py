"""Calls of a model's other methods (decode, encode, generate) by a script where ranks hold pieces.

    z = model.encode(x)     with gradients: as the script's own code; the modules that it calls are gathered for
                            (`entries`)
                            under torch.no_grad(): on every rank
    model.move_target()     writes into weights: in `with prepared.whole():`

What a method gives is whole.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from shardwise.errors import RefusedPlan
from shardwise.parallel.fsdp import groups_of
from shardwise.part import plain
from shardwise.part.dispatch import Gathers
from shardwise.scripts.calls import Calls
from shardwise.scripts.guard import OUTSIDE
from shardwise.scripts.script_lines import names_line


class Piecewise(Protocol):
    """What is asked of a prepared script."""

    model: nn.Module
    calls: Calls

    @property
    def whole_is_open(self) -> bool:
        """Whether the script's own code has whole weights."""

    def meet(self, what: str) -> None:
        """All ranks are needed for this call."""


def guard_methods(prepared: Piecewise) -> None:
    """Wrap the methods that the model's own class defines; a copy of the model keeps its own."""
    model = prepared.model
    for kind in type(model).__mro__:
        if kind is nn.Module or kind.__module__.startswith("torch."):
            continue
        for name, found in vars(kind).items():
            own = inspect.isfunction(found) and not name.startswith("_") and not hasattr(nn.Module, name)
            if own and name != "forward" and name not in vars(model):
                model.__dict__[name] = types.MethodType(_wrapped(prepared, name, found), model)


def read_whole(prepared: Piecewise) -> None:
    """Let a number that a script reads from FSDP's tensors (a norm's `.item()`) be that of the whole tensor.

    torch gives this rank's summand of it. Collective; for the process, since torch has one table of such operations.
    """
    known = weakref.ref(prepared)

    def read(operation: Any, args: tuple, kwargs: dict) -> Any:
        (tensor,) = args
        script = known()
        if any(not placement.is_replicate() for placement in tensor.placements):
            if script is not None:
                script.meet("a number read from sharded weights or gradients")
            tensor = tensor.full_tensor()
            return operation(tensor)
        return operation(tensor.to_local())

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = read


def _wrapped(prepared: Piecewise, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @names_line
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is not prepared.model or prepared.calls.inside or prepared.whole_is_open:  # or within another one
            return method(module, *args, **kwargs)
        if torch.is_grad_enabled() and not _switches_gradients_off(method):
            found = method(module, *args, **kwargs)
            return tree_map_only(DTensor, lambda one: one.full_tensor(), found)
        prepared.meet(f"model.{name}()")
        root = module if isinstance(module, FSDPModule) else None
        if root is not None:
            root._get_fsdp_state()._lazy_init()  # else the first unit that is called takes itself for the root
            root.unshard()  # weights outside of units inside, which the method's calls of modules read
        prepared.calls.inside += 1
        prepared.calls.methods += 1
        Gathers.all = True  # what a method draws from a cut row of scores, or sorts, it does to the whole
        try:
            returned = tree_map_only(torch.Tensor, plain, method(module, *args, **kwargs))
            if root is not None and _is_written(root):
                raise RefusedPlan(OUTSIDE.format(f"model.{name}() writes"))
            return returned
        finally:
            Gathers.all = False
            prepared.calls.inside -= 1
            prepared.calls.methods -= 1
            if root is not None:
                root.reshard()

    return call


@torch.no_grad()
def _is_written(root: FSDPModule) -> bool:
    """Whether a unit's gathered weights are others than its pieces, from which they were gathered."""
    for of_unit in (one for group in groups_of(root) for one in group.fsdp_params):
        gathered, piece = of_unit._unsharded_param.detach(), of_unit.sharded_param
        if gathered.untyped_storage().size():  # else a forward of the whole model has given it back
            cut = distribute_tensor(gathered, piece.device_mesh, piece.placements, src_data_rank=None).to_local()
            if not torch.equal(cut, piece._local_tensor.to(cut.dtype)):
                return True
    return False


def _switches_gradients_off(method: Callable[..., Any]) -> bool:
    """Whether a method was decorated by `torch.no_grad()` or `torch.inference_mode()`."""
    found = inspect.getclosurevars(method).nonlocals.get("ctx_factory") if inspect.isfunction(method) else None
    return callable(found) and isinstance(found(), torch.no_grad | torch.inference_mode)
