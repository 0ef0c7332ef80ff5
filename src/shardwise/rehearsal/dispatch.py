"""Values, live bytes and counts of a trace in one dispatch mode.

To hand an operation from one mode to the next costs as much as what the modes do with it.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.memory.live import LiveBytes
from shardwise.rehearsal.known_values import Values
from shardwise.rehearsal.op_counts import DEVICE, Count


class RehearsalMode(TorchDispatchMode):
    """Enter above the fake mode: as if `values`, `live` and `count` had been entered one after the other."""

    def __init__(self, values: Values, live: LiveBytes, count: Count) -> None:
        super().__init__()
        self.values, self.live, self.count = values, live, count

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a trace, and being asked for each op is slow

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked twice for each op in backward
        for kind in types:
            if kind is not FakeTensor and getattr(kind, "observes_inside", False):
                return NotImplemented  # a share of a tensor: what its rule does is counted
        out = self.values.run(func, args, kwargs or {})
        self.live.note(out)
        self.count.note(func, args, out)
        return out
