"""`IssueLog`: the collectives and messages that one rank issued, in order, as plain data.

Filled by comm/recording; testing/nccl_order simulates them in NCCL's order.

    all_reduce   group A                      -> Issued(0)
    send, recv   group A, in one batch        -> Issued(1), Issued(2)
    work.wait()                               -> Waited(0)

An entry keeps no tensor, only its op, dtype, shape, group, peer, tag and line in the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Issued:
    """A collective, or one end of a point-to-point message, that was issued.

    op       "all_reduce", "all_gather", "send", "recv", ...
    group    name of the process group, the same on all its ranks;  ranks  the global ones, in the group's order
    peer     global rank of a message's other end; -1 for a collective
    dtype    such as "float32", "" without a tensor;  shape  of the tensor, () without one
    tag      purpose, such as "gradients" or "control"
    place    line of code that issued it
    batch    id of the batch of messages that begin together; None: it begins alone
    device   type of the tensor's device, since a group has one backend for each
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    peer: int
    dtype: str
    shape: tuple[int, ...]
    tag: str
    place: str
    batch: int | None = None
    device: str = ""

    def __str__(self) -> str:
        what = f"{self.op}{' (' + self.tag + ')' if self.tag else ''}"
        other = {"send": f" to rank {self.peer}", "recv": f" from rank {self.peer}"}.get(self.op, "")
        shape = f" of {self.dtype} {list(self.shape)}" if self.dtype else ""
        shape += f" on the {self.device}" if self.device else ""
        return f"{what}{shape}{other} over {self.group.split('|')[0]}, from {self.place or 'an unknown line'}"


@dataclass(frozen=True)
class Waited:
    """A wait for the rank's own operation with id `issued`, before which nothing later starts."""

    issued: int


class IssueLog:
    """What one rank issued and waited for, in order (`entries`); operations (`Issued`) have ids from 0."""

    def __init__(self) -> None:
        self.entries: list[Issued | Waited] = []
        self._count = 0
        self._batches = 0
        self._batch: int | None = None
        self._works: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # torch's work -> id of its operation
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # process group -> `_name`
        self._made: dict[str, int] = {}  # torch's name of a group -> groups made so far under it

    def add(self, op: str, group: Any, ranks: Sequence[int], axis: str, tensor: Any, tag: str, place: str,
            peer: int = -1) -> int:  # fmt: skip
        """Appends an operation that is about to be issued; returns its id.

        group, ranks  process group and its global ranks;  axis  name of its mesh axis
        tensor        whose dtype, shape and device type are kept; None: there is none
        tag, place, peer  as of `Issued`
        """
        has = isinstance(tensor, torch.Tensor)
        dtype = str(tensor.dtype).removeprefix("torch.") if has else ""
        shape = tuple(tensor.shape) if has else ()
        device = tensor.device.type if has else ""
        name = self._name(group, axis, ranks)
        self.entries.append(Issued(op, name, tuple(ranks), peer, dtype, shape, tag, place, self._batch, device))
        self._count += 1
        return self._count - 1

    def work(self, work: Any, number: int) -> None:
        """Notes that torch's handle `work` belongs to the operation with id `number`."""
        self._works[work] = number

    def waited(self, work: Any) -> None:
        """Appends a wait for the operation of `work`; does nothing if that is not in the log."""
        number = self._works.get(work)
        if number is not None:
            self.entries.append(Waited(number))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context: operations added inside get one batch id."""
        before, self._batch, self._batches = self._batch, self._batches, self._batches + 1
        try:
            yield
        finally:
            self._batch = before

    def _name(self, group: Any, axis: str, ranks: Sequence[int]) -> str:
        """Returns a group's name, as "axis|torch's name#count|global ranks"."""
        name = self._names.get(group)
        if name is None:
            # torch reuses the name of a destroyed group; the count tells the two apart
            own = str(group.group_name)
            times = self._made[own] = self._made.get(own, 0) + 1
            name = self._names[group] = f"{axis}|{own}#{times}|{','.join(map(str, ranks))}"
        return name
