"""Reads of tensors' values in Python (`read`): each makes the host wait until the device has come that far.

Everything in a step that needs a number in Python (the control row, counts of rows for experts, shapes of messages)
calls `read`. So reads can be counted, and a rehearsal on tensors without values can answer them in one place.

    on a device   read = copy to the host and wait        require = an assertion on the device, no wait
    on the CPU    read = look                             require = look

What this does not do: see what a model's or a task's own code reads (`tensor.item()`, a branch on a value); `HostReads`
counts that beside, but for `tolist` and `numpy` of tensors on the CPU, which torch shows to no mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.device import on_host

Answer = Callable[[torch.Tensor, str], Any]  # (tensor without values, what is read) -> what `read` returns
Knows = Callable[[torch.Tensor], bool]  # whether there is an answer for a tensor

# the last one answers; of the process, since backward runs in threads of its own
_answers: list[tuple[Answer, Knows]] = []
_counting: list[HostReads] = []


def read(tensor: torch.Tensor, what: str) -> Any:
    """Returns a tensor's values as Python numbers, nested as by `tolist`. Waits for the device.

    what   names the read, for counts and for a rehearsal that answers it
    """
    for counting in _counting:
        counting.named[what] += 1
    if _answers:
        return _answers[-1][0](tensor, what)
    with _named():
        return tensor.detach().cpu().tolist()


def has_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements can be read: it is not on meta, not fake, and no program is being written down."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor | FunctionalTensor))


def can_read(tensor: torch.Tensor) -> bool:
    """Whether `read` returns the tensor's elements: it has values, or somebody answers for them."""
    return has_values(tensor) or (bool(_answers) and _answers[-1][1](tensor))


def require(condition: torch.Tensor, error: Callable[[], Exception]) -> None:
    """Raises `error()` unless the single value of the tensor `condition` is true.

    On an accelerator the device asserts it later, and nothing waits; tensors without values pass.
    """
    if not has_values(condition):
        return
    if not on_host(condition.device):
        torch._assert_async(condition)
        return
    with _named():
        if not condition.item():
            raise error()


def to_device(values: Any, device: torch.device) -> torch.Tensor:
    """Returns a numpy array or CPU tensor on the device, copied without making the host wait.

    On the CPU it is the same memory. A plain `.to(device)` waits until the device has done all that it was given.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    return tensor.to(device, non_blocking=True)


def put(values: list[float], device: torch.device) -> torch.Tensor:
    """Returns n numbers as a float64 tensor (n,) on the device, without waiting for it."""
    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)


def row_of(values: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor:
    """Returns n numbers (Python's, or tensors of one element) as a float64 tensor (n,) on the device, reading none."""
    if on_host(device) and all(has_values(value) for value in values if isinstance(value, torch.Tensor)):
        with _named():  # a look, for which nothing waits
            return put([float(value) for value in values], device)
    row = put([0.0 if isinstance(value, torch.Tensor) else float(value) for value in values], device)
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            row[place] = value.detach().reshape(())
    return row


@contextmanager
def answered(answer: Answer, knows: Knows = lambda tensor: True) -> Iterator[None]:
    """Context: `read` returns what `answer` does instead of a tensor's values; `knows`: whether there is an answer."""
    _answers.append((answer, knows))
    try:
        yield
    finally:
        _answers.pop()


@contextmanager
def _named() -> Iterator[None]:
    """Context: reads of values inside are not counted again, since they were counted by name or do not wait."""
    for counting in _counting:
        counting.paused += 1
    try:
        yield
    finally:
        for counting in _counting:
            counting.paused -= 1


class HostReads(TorchDispatchMode):
    """Context that counts the host's reads: `named` by `read`, `others` by operations that look at values or copy.

    Others are whatever torch marks as depending on values (a scalar taken out, `nonzero`, a mask as an index), and
    copies between an accelerator and the CPU, either way, for which the host waits (indices on the CPU among them).
    """

    def __init__(self) -> None:
        super().__init__()
        self.named: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.paused = 0

    def __enter__(self) -> HostReads:
        _counting.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _counting.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(getattr(kind, "observes_inside", False) for kind in types):
            return NotImplemented  # the tensor's own rule runs next, with this mode still active
        kwargs = kwargs or {}
        if _composed(func):  # met whole below autograd, where a tensor's own rules run; it reads inside
            with self:
                return func.decompose(*args, **kwargs)
        if not self.paused and (hangs_on_values(func, args, kwargs) or _crosses(func, args, kwargs)):
            self.others[func.name().removeprefix("aten::")] += 1
        return func(*args, **kwargs)


@cache
def _composed(func: Any) -> bool:
    """Whether an operation is a composite of other operations on every device."""
    if func.namespace != "aten" or not func._can_decompose():
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")


_TELLING = {torch.ops.aten.is_nonzero}  # which torch has not marked; met where a tensor's own rules run
_MASKED = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_}


def hangs_on_values(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether the result's shape, or a Python value, depends on tensors' values, for which the host has to wait."""
    # indices of numbers need no wait; masks say how many by their values
    if func.overloadpacket in _MASKED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    # an output size that is given spares the wait
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    marked = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    return marked or func.overloadpacket in _TELLING


def _crosses(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation copies between the CPU and another device, and the host waits for it."""
    # an index from the host to a tensor on the device is copied for it
    if func.overloadpacket in _MASKED:
        return not on_host(args[0].device) and any(index is not None and on_host(index.device) for index in args[1])
    # a tensor that is made elsewhere; a copy into one that is there
    if func is torch.ops.aten._to_copy.default:
        source, goal, waits = args[0].device, kwargs.get("device"), not kwargs.get("non_blocking", False)
    elif func is torch.ops.aten.copy_.default:
        goal, source = args[0].device, args[1].device
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        return False
    # the host waits only where both sides differ, and it was not told to go on
    return waits and goal is not None and on_host(source) != on_host(torch.device(goal))
