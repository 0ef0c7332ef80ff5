"""One dispatch mode for a trace: values that are known, live bytes, counts and random draws.

To hand an operation from one mode to the next costs as much as what the modes do with it.
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
_CHOSEN = torch.ops.aten.multinomial.default  # by scores: `Values` says which
_DROPOUT = torch.ops.aten.native_dropout.default
_ENTER = torch.ops.profiler._record_function_enter_new.default
_EXIT = torch.ops.profiler._record_function_exit._RecordFunction


class RehearsalMode(TorchDispatchMode):
    """One mode for three: as if `values`, `live` and `count` had been entered in turn. Enter it above the fake mode.

    draws    answers random ops as a run does that follows them (randomness=global), and notes that it `met` some
    outside  answers reads of weights that lie in pieces, if there are any
    writes   is told of operations that write
    fused    as on a GPU: the bits of a draw take one kernel (random/hashing.py)

    What FSDP2 does around a unit, by the labels that it has for profiles, takes memory and is not counted.
    """

    def __init__(
        self, values: Values, live: LiveBytes, count: Count, draws: GlobalRandom | None = None,
        outside: OutsideReads | None = None, writes: ArgumentWrites | None = None, fused: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.fused = fused
        self.values, self.live, self.count, self.draws, self.outside = values, live, count, draws, outside
        self.writes = writes
        self._labels: list[bool] = []  # entered and not left: whether it is FSDP2's
        self._hidden = False  # inside a draw whose bits nobody reads

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a trace, and being asked for each op is slow

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked twice for each op in backward
        # randomness=global: a run answers a draw by global index, by operations that are counted here too
        if self.draws is not None and func in DRAWS and _many(func, args) and draws(func, args, kwargs or {}):
            self._hidden = _unread(func, args)
            self.draws.one_kernel = self.fused and self._hidden
            try:
                # a mode is left while it answers: what the draw does is counted as well
                with self:
                    return self.draws.answer(func, args, dict(kwargs or {}))
            finally:
                self._hidden = False
        for kind in types:
            if kind is not FakeTensor and getattr(kind, "observes_inside", False):
                self.count.trace.cut_calls += 1
                return NotImplemented  # a share of a tensor: what its rule does is counted
        # FSDP2's labels for profiles tell what it does around a unit
        if func is _ENTER or func is _EXIT:
            self._label(func, args)
            return func(*args, **(kwargs or {}))
        # FSDP2's own copies around a unit: memory, but no work of the module's
        if True in self._labels:
            out = func(*args, **(kwargs or {}))
            self.live.note(out)
            return out
        if self.writes is not None and func._schema.is_mutable:
            self.writes.note(func, args, kwargs or {})
        # a weight in pieces is read while its unit does not run: a run would gather it
        if self.outside is not None and DTensor in types:
            args, kwargs = self.outside.answered(args, kwargs or {})
        # the bits of a draw whose values nobody knows are not worth hashing
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
    """Returns what answers random ops by global index (`yes`), or None where torch's generators draw."""
    return GlobalRandom(BatchDims()) if yes else None


def _many(func: Any, args: tuple) -> bool:
    """Whether more than one number is drawn; on a single one a choice may hang, which `Values` makes."""
    return func is not _RAND or math.prod(args[0]) != 1


def _unread(func: Any, args: tuple) -> bool:
    """Whether a draw fills a tensor without known values, so that nobody reads its numbers.

    Its bits are hashed from indices that are known, which would take longer than all else in a trace.
    """
    if func is _DROPOUT or func is _CHOSEN or not args:
        return func is _DROPOUT
    first = args[0]
    while isinstance(first, Distributed):
        first = first.local
    return not (isinstance(first, FakeTensor) and known(first))
