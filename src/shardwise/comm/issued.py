"""`IssueLog`: what one rank issued, in order, as plain data. Filled by recording; played by testing/nccl_order.

    all_reduce   group A                      -> Issued(0)
    send, recv   group A, in one batch        -> Issued(1), Issued(2)
    work.wait()                               -> Waited(0)

An entry keeps no tensor: what it says is its kind, dtype, shape, group, peer, tag and line in the code.
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
    """A collective, or one end of a message.

    group    the same text on all its ranks; `ranks` are the global ones, in the group's order
    peer     global rank of a message's other end; -1 of a collective
    batch    operations of one batch begin together; None: alone
    device   the type of the tensor's: a group has a backend for each, and ranks meet in the same one
    """

    op: str  # all_reduce, all_gather, send, ...
    group: str
    ranks: tuple[int, ...]
    peer: int
    dtype: str
    shape: tuple[int, ...]
    tag: str  # what it is for: "gradients", "control"
    place: str  # line of code that issued it
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
    """A wait: all that this rank computes or issues afterwards comes after its operation number `issued`."""

    issued: int


class IssueLog:
    """What one rank issued and waited for, in order (`entries`); operations are numbered from 0."""

    def __init__(self) -> None:
        self.entries: list[Issued | Waited] = []
        self._count = 0
        self._batches = 0
        self._batch: int | None = None
        self._works: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # torch's work -> number of its operation
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # process group -> `_name`
        self._made: dict[str, int] = {}  # torch's name of a group -> groups made so far under it

    def add(self, op: str, group: Any, ranks: Sequence[int], axis: str, tensor: Any, tag: str, place: str,
            peer: int = -1) -> int:  # fmt: skip
        """Note an operation about to be issued; returns its number."""
        has = isinstance(tensor, torch.Tensor)
        dtype = str(tensor.dtype).removeprefix("torch.") if has else ""
        shape = tuple(tensor.shape) if has else ()
        device = tensor.device.type if has else ""
        name = self._name(group, axis, ranks)
        self.entries.append(Issued(op, name, tuple(ranks), peer, dtype, shape, tag, place, self._batch, device))
        self._count += 1
        return self._count - 1

    def work(self, work: Any, number: int) -> None:
        """Note that `work` (torch's handle to wait for) is of operation `number`."""
        self._works[work] = number

    def waited(self, work: Any) -> None:
        """Note that a work was waited for; nothing for one that is not in the log."""
        number = self._works.get(work)
        if number is not None:
            self.entries.append(Waited(number))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context: operations inside begin together."""
        before, self._batch, self._batches = self._batch, self._batches, self._batches + 1
        try:
            yield
        finally:
            self._batch = before

    def _name(self, group: Any, axis: str, ranks: Sequence[int]) -> str:
        """Returns a group's text: its axis, its name within torch, its ranks."""
        name = self._names.get(group)
        if name is None:
            # torch gives a name again after its group has gone: the count keeps the two apart
            own = str(group.group_name)
            times = self._made[own] = self._made.get(own, 0) + 1
            name = self._names[group] = f"{axis}|{own}#{times}|{','.join(map(str, ranks))}"
        return name
