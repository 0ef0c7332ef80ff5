"""`RehearsalMode`: one dispatch mode that follows known values, live bytes, operation counts and random operations.

One mode replaces several, because handing an operation from one mode to the next costs as much as a mode's own work.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.memory.live import LiveBytes
from shardwise.part.levels import Distributed
from shardwise.random import DRAWS, BatchDims, GlobalRandom, draws
from shardwise.rehearsal.op_counts import DEVICE, Count
from shardwise.trace.known_values import Values, known
from shardwise.trace.outside_reads import ArgumentWrites, OutsideReads

_RAND = torch.ops.aten.rand.default
_CHOSEN = torch.ops.aten.multinomial.default  # chooses by scores, whose result `Values` assumes
_DROPOUT = torch.ops.aten.native_dropout.default
_ENTER = torch.ops.profiler._record_function_enter_new.default
_EXIT = torch.ops.profiler._record_function_exit._RecordFunction


class RehearsalMode(TorchDispatchMode):
    """Does in one mode what `values`, `live` and `count` do if entered in turn. Enter it above the fake mode.

    draws    answers random operations by global index, as a run with randomness=global does; None if torch draws
    outside  answers reads of FSDP2's sharded weights while their unit does not run; None if nothing is sharded so
    writes   is called with every operation that writes into a tensor; None if nobody asks
    fused    whether random bits that nobody reads are one kernel, as on a GPU (random/hashing.py)

    Operations of FSDP2 around a unit, known by FSDP2's profiler labels, count as memory but not as operations.
    """

    def __init__(
        self, values: Values, live: LiveBytes, count: Count, draws: GlobalRandom | None = None,
        outside: OutsideReads | None = None, writes: ArgumentWrites | None = None, fused: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.fused = fused
        self.values, self.live, self.count, self.draws, self.outside = values, live, count, draws, outside
        self.writes = writes
        self._labels: list[bool] = []  # open profiler labels, innermost last: whether FSDP2's
        self._hidden = False  # inside a random operation whose numbers nobody reads

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a trace, and being asked for each op is slow

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # backward asks this twice for each op: answered here, which is quicker
        # with randomness=global a run computes random numbers from global indices, by ops that count as well
        if self.draws is not None and func in DRAWS and _many(func, args) and draws(func, args, kwargs or {}):
            self._hidden = _unread(func, args)
            self.draws.one_kernel = self.fused and self._hidden
            try:
                # torch leaves a mode while it answers, so it is entered again to count the ops of the answer
                with self:
                    return self.draws.answer(func, args, dict(kwargs or {}))
            finally:
                self._hidden = False
        for kind in types:
            if kind is not FakeTensor and getattr(kind, "observes_inside", False):
                self.count.trace.cut_calls += 1
                return NotImplemented  # a sharded tensor: the ops that its rule runs on the local one are counted
        # FSDP2's profiler labels tell which operations are its own
        if func is _ENTER or func is _EXIT:
            self._label(func, args)
            return func(*args, **(kwargs or {}))
        # FSDP2's own copies around a unit take memory, but are not work of the module
        if True in self._labels:
            out = func(*args, **(kwargs or {}))
            self.live.note(out)
            return out
        if self.writes is not None and func._schema.is_mutable:
            self.writes.note(func, args, kwargs or {})
        # a sharded weight that is read while its unit does not run: a run would gather it
        if self.outside is not None and DTensor in types:
            args, kwargs = self.outside.answered(args, kwargs or {})
        # if nobody reads the random numbers, hashing their bits would be wasted time
        out = func(*args, **(kwargs or {})) if self._hidden else self.values.run(func, args, kwargs or {})
        self.live.note(out)
        self.count.note(func, args, out)
        return out

    def _label(self, func: Any, args: tuple) -> None:
        if func is _ENTER:
            self._labels.append(args[0].startswith("FSDP::"))
        else:
            self._labels.pop()


def followed(yes: bool) -> GlobalRandom | None:
    """Returns the mode that answers random operations by global index if `yes`, else None (torch's generators)."""
    return GlobalRandom(BatchDims()) if yes else None


def _many(func: Any, args: tuple) -> bool:
    """Whether an op is no `rand` of a single number, which `Values` answers since a branch may depend on it."""
    return func is not _RAND or math.prod(args[0]) != 1


def _unread(func: Any, args: tuple) -> bool:
    """Whether a random operation fills a tensor without known values, so that nobody reads its numbers.

    Hashing their bits from the indices, which are known, would take longer than everything else in a trace.
    """
    if func is _DROPOUT or func is _CHOSEN or not args:
        return func is _DROPOUT
    first = args[0]
    while isinstance(first, Distributed):
        first = first.local
    return not (isinstance(first, FakeTensor) and known(first))
