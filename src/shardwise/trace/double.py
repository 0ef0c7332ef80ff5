"""Keep float64 arithmetic float64 inside modules that ask for float32.

Many modules compute norms, rotary tables or softmax in float32 whatever their input. In a float64 proof that would
round differently wherever two runs differ in the last bit. While this mode is active, turning float64 into a narrower
floating-point dtype leaves it float64. Complex numbers likewise; those that are made in a forward without any tensor
(`torch.zeros(shape, dtype=torch.cfloat)`, into which a spectrum is written) are complex128 from the start.

What a forward makes as float32 whatever its input (a spectrum to be filled in, one-hot classes) is made float64
likewise, and so is what an operation computes from float32 alone (class weights that a loss keeps beside the module).
Casts by autograd itself are done, since a gradient has the dtype of its tensor.

Initial values are as without this mode: what a constructor rounds on purpose (a table computed in float64) stays
rounded, because constructors and their replays run inside `as_written`.

What this does not do: change tensors that were float32 from the start, writes into them, or kernels without float64.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.trace.elementwise import is_random
from shardwise.trace.functional import with_values

_WIDE = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip
_BETWEEN = ("torch._dynamo.eval_frame", "torch._compile", "torch._ops")  # frames between an op's caller and the mode
_FILLED = frozenset(f"aten::{new}{name}" for name in ("zeros", "ones", "full", "empty") for new in ("", "new_"))
_as_written: ContextVar[bool] = ContextVar("casts as they are written", default=False)
_own_default: ContextVar[torch.dtype | None] = ContextVar("the default dtype outside of `default_dtype`", default=None)


class KeepDouble(TorchDispatchMode):
    """Dispatch mode that leaves out casts from float64 to narrower floats; `met`: whether it has left out any."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        wide = _WIDE.get(kwargs.get("dtype"))
        # but for constructors (`as_written`), and what autograd itself casts
        if wide is not None and not _as_written.get() and not _of_autograd():
            # a cast of a float64 tensor, which it would round
            if _is_double(args, wide):
                self.met = True
                kwargs["dtype"] = wide
            # only where the run's own dtype is float64: its constants and one-hot rows lose nothing by it
            elif torch.get_default_dtype() == torch.float64 and _exact(func, args):
                kwargs["dtype"] = wide
        # a float32 result depends on the order of its terms, which differs between ranks and one process
        elif torch.get_default_dtype() == torch.float64 and _computes_narrow(func, args) and not _of_autograd():
            args = tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
        return with_values(func)(*args, **kwargs)


def _is_double(args: tuple, wide: torch.dtype) -> bool:
    """Whether a cast is of a float64 or complex128 tensor, or a factory makes complex numbers (`wide`) of no tensor."""
    dtypes = [a.dtype for a in args if isinstance(a, torch.Tensor)]
    return torch.float64 in dtypes or torch.complex128 in dtypes or (wide.is_complex and not dtypes)


def _computes_narrow(func: Any, args: tuple) -> bool:
    """Whether an op computes a new tensor from float32 alone, so that its result depends on the order of its terms."""
    dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()}
    new = func.namespace == "aten" and all(made.alias_info is None for made in func._schema.returns)
    return dtypes == {torch.float32} and new and not is_random(func)


def _exact(func: Any, args: tuple) -> bool:
    """Whether an operation's results are exact in any dtype: a constant, or integers and masks cast to another."""
    source = args[0] if args else None
    if func._schema.name == "aten::_to_copy" and isinstance(source, torch.Tensor):
        return not source.is_floating_point() and not source.is_complex()
    return func._schema.name in _FILLED


def _of_autograd() -> bool:
    """Whether the op is called by autograd's engine itself, not by module code that runs again in backward (recompute).

    The engine's own thread has no Python frame below the modes.
    """
    frame: Any = sys._getframe(2)
    while frame and (frame.f_code.co_name == "__torch_dispatch__" or frame.f_globals["__name__"] in _BETWEEN):
        frame = frame.f_back
    return frame is None or frame.f_code is torch.autograd.graph._engine_run_backward.__code__


@contextmanager
def as_written() -> Iterator[None]:
    """Context without `KeepDouble`'s changes, and with the default dtype that holds outside of `default_dtype`."""
    token, before = _as_written.set(True), torch.get_default_dtype()
    torch.set_default_dtype(_own_default.get() or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        _as_written.reset(token)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context: tensors made without a dtype (random weights in a loss, say) have this one."""
    before = torch.get_default_dtype()
    # of nested contexts the outermost keeps what `as_written` restores: the dtype before any of them
    token = _own_default.set(_own_default.get() or before)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        _own_default.reset(token)
