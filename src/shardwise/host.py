"""Reads tensors' values in Python (`read`), for which the host waits for the device, and copies without a wait.

Everything in a step that needs a number in Python (the control row, counts of tokens for experts, shapes of messages)
calls `read`. So reads can be counted, and a rehearsal on meta or fake tensors can supply values in one place.

    on a device   read = copy to the host and wait        require = an assertion on the device, no wait
    on the CPU    read = read the memory                  require = read the memory

What this does not do: see what a model's or a task's own code reads (`tensor.item()`, a branch on a value). `HostReads`
counts that too, except `tolist` and `numpy` of CPU tensors, which no dispatch mode sees.
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

Answer = Callable[[torch.Tensor, str], Any]  # (tensor without values, name of the read) -> what `read` returns
Knows = Callable[[torch.Tensor], bool]  # whether an `Answer` has values for a tensor

# the last entry is used; global for the process, since backward runs in threads of its own
_answers: list[tuple[Answer, Knows]] = []
_counting: list[HostReads] = []


def read(tensor: torch.Tensor, what: str) -> Any:
    """Returns a tensor's values as Python numbers, nested as by `tolist`. The host waits for the device.

    what   name of the read, for counts and for a rehearsal that supplies the values
    """
    for counting in _counting:
        counting.named[what] += 1
    if _answers:
        return _answers[-1][0](tensor, what)
    with _named():
        return tensor.detach().cpu().tolist()


def has_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor has elements that can be read: it is no meta, fake, or functionalised (traced) tensor."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor | FunctionalTensor))


def can_read(tensor: torch.Tensor) -> bool:
    """Whether `read` can be called on the tensor: it has values, or `answered` supplies them."""
    return has_values(tensor) or (bool(_answers) and _answers[-1][1](tensor))


def require(condition: torch.Tensor, error: Callable[[], Exception]) -> None:
    """Raises `error()` unless the one element of the tensor `condition` is true.

    On an accelerator the device asserts it later, without a wait of the host. Meta and fake tensors always pass.
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
    """Returns a numpy array or CPU tensor as a tensor on the device, copied without a wait of the host.

    On the CPU it shares memory. A plain `.to(device)` would wait until the device has done all queued work.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    return tensor.to(device, non_blocking=True)


def put(values: list[float], device: torch.device) -> torch.Tensor:
    """Returns n numbers as a float64 tensor (n,) on the device, copied without a wait of the host."""
    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)


def row_of(values: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor:
    """Returns n numbers (Python's, or one-element tensors) as a float64 tensor (n,) on the device, without a wait."""
    if on_host(device) and all(has_values(value) for value in values if isinstance(value, torch.Tensor)):
        with _named():  # reading CPU memory needs no wait, so it is not counted
            return put([float(value) for value in values], device)
    row = put([0.0 if isinstance(value, torch.Tensor) else float(value) for value in values], device)
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            row[place] = value.detach().reshape(())
    return row


@contextmanager
def answered(answer: Answer, knows: Knows = lambda tensor: True) -> Iterator[None]:
    """Context in which `read` returns `answer(tensor, what)` in place of a tensor's values.

    knows   tensor -> whether `answer` has values for it, for `can_read`
    """
    _answers.append((answer, knows))
    try:
        yield
    finally:
        _answers.pop()


@contextmanager
def _named() -> Iterator[None]:
    """Context in which `HostReads` does not count reads, because they were counted by name or need no wait."""
    for counting in _counting:
        counting.paused += 1
    try:
        yield
    finally:
        for counting in _counting:
            counting.paused -= 1


class HostReads(TorchDispatchMode):
    """A dispatch mode that counts reads of values for which the host waits.

    named    name of a `read` -> count
    others   name of an operation -> count: operations that torch marks as depending on values (`item`, `nonzero`, a
             mask as an index), and blocking copies between an accelerator and the CPU (CPU indices included)
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
        if _composed(func):  # seen undecomposed where a tensor subclass's rules run, but it may read inside
            with self:
                return func.decompose(*args, **kwargs)
        if not self.paused and (hangs_on_values(func, args, kwargs) or _crosses(func, args, kwargs)):
            self.others[func.name().removeprefix("aten::")] += 1
        return func(*args, **kwargs)


@cache
def _composed(func: Any) -> bool:
    """Whether an operation is a composite of other operations on every device, without a CPU kernel."""
    if func.namespace != "aten" or not func._can_decompose():
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")


_TELLING = {torch.ops.aten.is_nonzero}  # depend on values, but torch has not marked them
_MASKED = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_}


def hangs_on_values(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation's result shape or Python value depends on tensors' values, so that the host has to wait."""
    # integer indices need no wait; with masks, the result's shape depends on their values
    if func.overloadpacket in _MASKED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    # with a given output size no wait is needed
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    marked = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    return marked or func.overloadpacket in _TELLING


def _crosses(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation copies between the CPU and another device, and the host waits for it."""
    # a CPU index of a device tensor is copied to the device
    if func.overloadpacket in _MASKED:
        return not on_host(args[0].device) and any(index is not None and on_host(index.device) for index in args[1])
    if func is torch.ops.aten._to_copy.default:
        source, goal, waits = args[0].device, kwargs.get("device"), not kwargs.get("non_blocking", False)
    elif func is torch.ops.aten.copy_.default:
        goal, source = args[0].device, args[1].device
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        return False
    # the host waits for a blocking copy between host and device
    return waits and goal is not None and on_host(source) != on_host(torch.device(goal))
