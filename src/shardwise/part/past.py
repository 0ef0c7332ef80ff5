"""Parameters that a module's own code takes past their attributes, where positions are cut: read as these would be.

    sum(p.square().sum() for p in self.parameters())    each p is given to torch as `self.weight` would be

What a gradient is of is settled where an attribute is read. A parameter itself has nothing settled: each rank would
count the whole of it. So a function of torch that the module calls on one is given what its attribute gives.

What this does not do: read for code that runs again in backward, or inside `torch.autograd.grad`, which takes a
parameter for a name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.part.position_tables import run_under
from shardwise.trace.leaves import replaced, tensors_in
from shardwise.trace.own_calls import by_a_module

NAMES = frozenset(("grad", "backward", "register_hook", "data_ptr"))  # who take a tensor for what it is
_PLAIN = frozenset(("__get__", "__set__", "requires_grad_", "size", "numel", "dim", "stride", "is_floating_point"))


class PastAttributes(TorchFunctionMode):
    """While entered, gives a function that a module's code calls on a trained parameter what its attribute gives.

    met  called where that happens
    """

    def __init__(self, module: nn.Module, met: Callable[[], None] = lambda: None):
        super().__init__()
        self.met = met
        self.places = {
            id(param): (child, leaf)
            for child in module.modules()
            for leaf, param in child._parameters.items()
            if param is not None and param.requires_grad
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in NAMES or name in _PLAIN or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        found = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) in self.places]
        if not found or not by_a_module(sys._getframe(1)):
            return func(*args, **kwargs)
        self.met()
        args, kwargs = replaced(nn.Parameter, self._read, (args, kwargs))
        return func(*args, **kwargs)

    def _read(self, param: nn.Parameter) -> Any:
        child, leaf = self.places.get(id(param), (None, ""))
        return param if child is None else getattr(child, leaf)


def read_past(module: nn.Module) -> None:
    """Makes every forward of the module run under `PastAttributes`."""
    run_under(module, lambda args, kwargs: PastAttributes(module))


def refuse_past(plan: Plan) -> None:
    """Raises `RefusedPlan` where no forward of one rank has all parameters as its code takes them."""
    others = {f"zero={plan.zero}": plan.sharded.weights, f"pp={plan.pp}": plan.pp > 1}
    others |= {
        f"remat={plan.remat}": plan.remat != "none",
        "compile": plan.compile,
        "position_chunks": plan.position_chunks > 1,
    }
    for key in (key for key, wanted in others.items() if wanted):
        raise RefusedPlan(
            "the forward computes with parameters past their attributes, as by parameters(), where positions are cut, "
            f"and {key} runs parts of the forward elsewhere or has not all of them there: read them as attributes "
            f"(self.weight), leave a penalty on weights to the optimizer (weight_decay), or leave {key} out"
        )
