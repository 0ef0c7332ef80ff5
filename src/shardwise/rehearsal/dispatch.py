"""Values, live bytes and counts of a trace in one dispatch mode.

To hand an operation from one mode to the next costs as much as what the modes do with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.memory.live import LiveBytes
from shardwise.random import DRAWS, BatchDims, GlobalRandom, draws
from shardwise.rehearsal.known_values import Values
from shardwise.rehearsal.op_counts import DEVICE, Count

_RAND = torch.ops.aten.rand.default


class RehearsalMode(TorchDispatchMode):
    """Enter above the fake mode: as if `values`, `live` and `count` had been entered one after the other.

    draws  answers random ops as a run does that follows them (randomness=global), and notes that it `met` some
    """

    def __init__(self, values: Values, live: LiveBytes, count: Count, draws: GlobalRandom | None = None) -> None:
        super().__init__()
        self.values, self.live, self.count, self.draws = values, live, count, draws

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a trace, and being asked for each op is slow

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked twice for each op in backward
        if self.draws is not None and func in DRAWS and _many(func, args) and draws(func, args, kwargs or {}):
            with self:
                return self.draws.answer(func, args, dict(kwargs or {}))
        for kind in types:
            if kind is not FakeTensor and getattr(kind, "observes_inside", False):
                return NotImplemented  # a share of a tensor: what its rule does is counted
        out = self.values.run(func, args, kwargs or {})
        self.live.note(out)
        self.count.note(func, args, out)
        return out


def followed(yes: bool) -> GlobalRandom | None:
    """What answers a trace's random ops by index, as of all samples; None where torch's generators draw."""
    return GlobalRandom(BatchDims()) if yes else None


def _many(func: Any, args: tuple) -> bool:
    """Whether more than one number is drawn; on a single one a choice may hang, which `Values` makes."""
    return func is not _RAND or math.prod(args[0]) != 1
