"""Conversions inside a forward (`self.norm.to(x.dtype)`, `.float()`), refused if they change a parameter.

In one process a forward may convert a weight, which keeps the new dtype from there on. Shares, flat pieces and master
weights of a plan have one dtype, and torch cannot exchange their tensors while they are in use.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from shardwise.errors import RefusedPlan

Convert = Callable[[torch.Tensor], torch.Tensor]
_ours: ContextVar[bool] = ContextVar("conversions are the plan's own", default=False)


@contextmanager
def converting() -> Iterator[None]:
    """Context in which `module._apply` converts parameters as torch does, for the plan's own conversions."""
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def refuse_conversions(module: nn.Module) -> None:
    """Makes `.to`, `.half` and the like of a module and its submodules raise `RefusedPlan` if a parameter would change.

    Buffers are converted as asked.
    """
    paths = {child: f"{path}." if path else "" for path, child in module.named_modules()}
    for child in paths:
        vars(child)["_apply"] = types.MethodType(_conversion_of(child, paths), child)


def _conversion_of(original: nn.Module, paths: dict[nn.Module, str]) -> Callable[..., nn.Module]:
    """Returns an `_apply` for `original` that raises `RefusedPlan` if it would change a parameter.

    `paths`: module -> its path and a dot, or "" for the root; for the message.
    """

    def apply(module: nn.Module, function: Convert, recurse: bool = True) -> nn.Module:
        if _ours.get() or module is not original:  # the plan's own conversion, or a copy, which no plan holds
            return type(module)._apply(module, function, recurse)
        # as `nn.Module._apply` goes: through all children, unless told not to
        for child in module.modules() if recurse else [module]:
            for name, param in child._parameters.items():
                if param is not None:
                    _refuse_change(f"{paths.get(child, '')}{name}", param, function)
            for name, buffer in child._buffers.items():
                child._buffers[name] = None if buffer is None else function(buffer)
        return module

    return apply


def _refuse_change(name: str, param: torch.Tensor, function: Convert) -> None:
    """Raises `RefusedPlan` if `function` would change the dtype or device of the parameter `name`."""
    new = function(torch.empty(0, dtype=param.dtype, device=param.device))
    if new.dtype != param.dtype or (new.device != param.device and not param.is_meta):
        raise RefusedPlan(
            f"the forward converts parameter '{name}' from {param.dtype} on {param.device} to {new.dtype} on "
            f"{new.device} (.to, .half, .double, .cpu of a module), and a plan holds weights as precision= says: cast "
            "what is computed with (F.linear(x.double(), self.weight.double())), or convert in the constructor"
        )
