"""`Observer`: a dispatch mode that records every collective of this rank in a ledger, by op names.

It sees `c10d.*` (process groups, FSDP2) and `_c10d_functional.*` (DTensor) as ops. Our collectives carry the tag of
their call site; those without a tag were issued by PyTorch and get the tag "torch".

What this does not do: count `reduce`, `gather` and `scatter` to or from one rank, which no engine here issues; see
collectives inside a compiled graph, or under a mode that was entered after this one ended.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.ledger import Ledger

_local = threading.local()


@contextmanager
def tagged(tag: str):
    """Context: collectives that this thread issues inside carry this tag in a ledger."""
    before = getattr(_local, "tag", None)
    _local.tag = tag
    try:
        yield
    finally:
        _local.tag = before


# op name -> (kind, index of the argument that is the full tensor)
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("point_to_point", None),
    "recv_": ("point_to_point", 0),
    "barrier": ("barrier", None),
}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


def _bytes(value) -> int:
    """Returns the bytes of a tensor, or of all tensors in a (nested) list; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0


def _dtypes(value) -> set[str]:
    """Returns the names of the floating-point dtypes of a tensor, or of all tensors in a (nested) list."""
    if isinstance(value, torch.Tensor):
        dtype = value.dtype.to_real() if value.is_complex() else value.dtype
        return {str(dtype).removeprefix("torch.")} if dtype.is_floating_point else set()
    return set().union(*map(_dtypes, value)) if isinstance(value, list | tuple) else set()


class Observer(TorchDispatchMode):
    """Dispatch mode that adds every collective to `ledger`; `axes` maps a process group's name to its mesh axis."""

    def __init__(self, ledger: Ledger, axes: dict[str, str]):
        super().__init__()
        self.ledger = ledger
        self.axes = axes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(getattr(kind, "observes_inside", False) for kind in types):
            return NotImplemented  # the tensor's own rule runs next, with this mode still active
        space, _, name = func.name().partition("::")
        if space == "c10d" and name.split(".")[0] in _C10D:
            self._record_c10d(name.split(".")[0], args)
        elif space == "_c10d_functional" and name.split(".")[0] in _FUNCTIONAL:
            self._record_functional(name.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _record(
        self, kind: str, carried: Any, full_bytes: int, group: dist.ProcessGroup, received_bytes: float | None = None
    ) -> None:
        """Records one collective.

        kind            op of the ledger;  carried  tensors, for their dtypes;  full_bytes  of the full tensor
        received_bytes  from other ranks, if they do not follow from `full_bytes`; else None
        """
        tag = getattr(_local, "tag", None) or "torch"
        axis = self.axes.get(group.group_name, "other")
        self.ledger.dtypes[tag, kind] |= _dtypes(carried)
        self.ledger.record(tag, kind, axis, full_bytes, group.size(), received_bytes)

    def _record_c10d(self, name: str, args: tuple) -> None:
        """Records an operation of `c10d`, by its name and arguments."""
        kind, full = _C10D[name]
        # the group is among the arguments, as a class of TorchScript
        group = next(
            dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg)
        )
        # an all-to-all of unequal sizes is counted by what arrives: args[0] is the output, args[3] the sizes received
        uneven = _from_others(args[0], args[3], group) if name == "alltoall_base_" and args[3] else None
        self._record(kind, args[full or 0], 0 if full is None else _bytes(args[full]), group, uneven)

    def _record_functional(self, name: str, args: tuple) -> None:
        """Records an operation of `_c10d_functional`, whose last str argument is the group's name."""
        from torch.distributed.distributed_c10d import _resolve_process_group

        group = _resolve_process_group(next(arg for arg in reversed(args) if isinstance(arg, str)))
        kind = _FUNCTIONAL[name]
        # a functional op is given the shard, not the full tensor
        size = _bytes(args[0]) * (group.size() if kind == "all_gather" else 1)
        self._record(kind, args[0], size, group)


def _from_others(received: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> float:
    """Returns the bytes of an all-to-all's result that other ranks sent. `sizes`: rows from each rank."""
    rows = sum(sizes)
    return _bytes(received) * (rows - sizes[group.rank()]) / rows if rows else 0.0


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())
