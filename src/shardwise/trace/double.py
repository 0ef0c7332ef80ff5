"""Keep float64 arithmetic float64 inside modules that ask for float32.

Many modules compute norms, rotary tables or softmax in float32 whatever their input. In a float64 proof that would
round differently wherever two runs differ in the last bit. While this mode is active, turning float64 into a narrower
floating-point dtype leaves it float64. Complex numbers likewise; those that are made in a forward without any tensor
(`torch.zeros(shape, dtype=torch.cfloat)`, into which a spectrum is written) are complex128 from the start.

Initial values are those of one process that was never asked: what a constructor rounds on purpose (a table computed in
float64) stays rounded, so `as_written` is around constructors and their replays.

What this does not do: change tensors that were float32 from the start, or kernels that have no float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WIDE = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip
_as_written: ContextVar[bool] = ContextVar("casts as they are written", default=False)


class KeepDouble(TorchDispatchMode):
    """Casts from float64 to narrower floats are left out; `met` tells whether there were any."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        wide = _WIDE.get(kwargs.get("dtype"))
        if wide is not None and not _as_written.get() and _is_double(args, wide):
            self.met = True
            kwargs["dtype"] = wide
        return func(*args, **kwargs)


def _is_double(args: tuple, wide: torch.dtype) -> bool:
    """Whether what is cast is double, or complex numbers are made of no tensor."""
    given = [a.dtype for a in args if isinstance(a, torch.Tensor)]
    return torch.float64 in given or torch.complex128 in given or (wide.is_complex and not given)


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, casts to narrower floats are done, also within `KeepDouble`."""
    token = _as_written.set(True)
    try:
        yield
    finally:
        _as_written.reset(token)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors whose dtype nobody gives (random weights in a loss, say) are of this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
