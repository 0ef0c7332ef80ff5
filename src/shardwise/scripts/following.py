"""Put function modes of a prepared script on torch's stack, and take them off in any order. For kept, tape, draws.

A mode costs each call of torch a microsecond or two, so none is left on while torch's and our own code runs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import get_gradient_edge
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from shardwise.trace.drawn import is_random

_BACKWARDS = {"backward", "run_backward", "_engine_run_backward"}  # in which something is computed again
_OPERATIONS = (BuiltinFunctionType, MethodDescriptorType)


def put_on(mode: TorchFunctionMode) -> None:
    """Put a mode on top of the stack, unless it is on it."""
    if mode not in _get_current_function_mode_stack():
        _push_mode(mode)


def take_off(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack, whatever was put on since; nothing where it is not there."""
    if mode in _get_current_function_mode_stack():
        _restack(one for one in _popped() if one is not mode)


def differentiate(loss: torch.Tensor, *, retain_graph: bool) -> None:
    """Call `loss.backward()` with the stack as it is: of a tensor, torch hands it to a mode, which is off meanwhile."""
    if loss.requires_grad:
        torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss), retain_graph)
    else:
        loss.backward()


def _popped() -> list[TorchFunctionMode]:
    """The stack, which is empty then."""
    stack = _get_current_function_mode_stack()
    for _ in stack:
        _pop_mode()
    return stack


def _restack(modes: Any) -> None:
    for mode in modes:
        _push_mode(mode)


@lru_cache(4096)
def may_draw(function: Callable[..., Any]) -> bool:
    """Returns whether a function of torch may draw random numbers.

    An operation's tags tell, and of a function of torch's Python those of what it calls; what else is not known may.
    """
    name = getattr(function, "__name__", "")
    if name.startswith("__"):  # operators and attributes of tensors
        return False
    if isinstance(function, OpOverload):
        return is_random(function)
    if isinstance(function, OpOverloadPacket):
        return _draws(function)
    if isinstance(function, FunctionType):
        return _calls_what_draws(function, set())
    packet = getattr(torch.ops.aten, name, None)
    if packet is None and isinstance(function, MethodDescriptorType):
        return name.endswith("_")  # a method that is no operation converts or tells; one may call what it is given
    return not isinstance(packet, OpOverloadPacket) or not isinstance(function, _OPERATIONS) or _draws(packet)


def _draws(packet: OpOverloadPacket) -> bool:
    return any(is_random(getattr(packet, one)) for one in packet.overloads())


def _calls_what_draws(function: FunctionType, seen: set[FunctionType]) -> bool:
    """By the names in its code, those of operations and of functions of torch, and by the functions that it closes
    over."""
    if function.__module__.partition(".")[0] != "torch":
        return True
    seen.add(function)
    names = _names_in(function.__code__)
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    if names & _BACKWARDS or any(isinstance(packet, OpOverloadPacket) and _draws(packet) for packet in packets):
        return True
    inner = [*map(function.__globals__.get, names), *(cell.cell_contents for cell in function.__closure__ or ())]
    return any(isinstance(one, FunctionType) and one not in seen and _calls_what_draws(one, seen) for one in inner)


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner) - {"handle_torch_function"}
