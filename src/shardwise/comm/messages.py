"""Point-to-point messages between ranks of an axis: single ones, or several begun together.

    exchange   rank 0  [send A to 1, receive B from 1]      one group call of NCCL: both ways at once
               rank 1  [receive A from 0, send B to 0]

Over NCCL the operations of a communicator run in the order of their calls, and a send ends when it was received. Two
ranks that both send first wait for each other as soon as a message exceeds NCCL's buffers (some MiB). So messages that
may cross are begun together, and all ranks issue their messages in a consistent order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from shardwise.comm.collectives import Axis, Pending, Rehearsed, all_reduce, gather_rows, is_traced, stand_in
from shardwise.comm.observe import tagged
from shardwise.comm.recording import batched
from shardwise.device import backend_of, on_host
from shardwise.errors import RefusedPlan
from shardwise.host import put, read


class _Several(Pending):
    """Messages that were begun together; torch gives a work for each, or one for all."""

    def __init__(self, works: list[dist.Work]):
        super().__init__(None)
        self.works = works

    def wait(self) -> None:
        """Waits for all messages."""
        while self.works:
            self.works.pop().wait()

    @property
    def over(self) -> bool:
        """Whether all messages are complete."""
        return all(work.is_completed() for work in self.works)


class _Staged(Pending):
    """A message of a device tensor through host memory, for gloo.

    host  the tensor on the host;  goal  the device tensor to copy it to after a receive; None: it is a send
    """

    def __init__(self, work: dist.Work | None, host: torch.Tensor, goal: torch.Tensor | None):
        super().__init__(work)
        self.host, self.goal = host, goal

    def wait(self) -> None:
        """Waits for the message, and copies a received one to `goal`."""
        if self.work is not None:
            super().wait()
            if self.goal is not None:
                self.goal.copy_(self.host)


def _needs_host(tensor: torch.Tensor, axis: Axis) -> bool:
    """Whether the axis's backend cannot send tensors of this device (gloo, or none)."""
    return not on_host(tensor.device) and backend_of(axis.group, tensor.device) in (None, "gloo")


def _check_runs(tensor: torch.Tensor) -> None:
    """Raises `TypeError` if a compiler records the operation, since it supports no messages."""
    if is_traced(tensor):
        raise TypeError("two ranks send each other a message, of which a compiled program knows none")


def send(tensor: torch.Tensor, axis: Axis, to_index: int, tag: str, number: int) -> Pending:
    """Starts to send a contiguous tensor to the axis's `to_index`-th rank; returns the `Pending`.

    tag     purpose, for the ledger
    number  id of the message, equal on both ends, among those under way between the two ranks
    The tensor must not change before `wait`.
    """
    if axis.rehearsal is not None:
        axis.rehearsal.leaving(tag, axis.name)
        return Rehearsed(tensor) if axis.copies else Pending(None)  # the receiver records it
    _check_runs(tensor)
    # gloo sends tensors in host memory only
    if _needs_host(tensor, axis):
        host = tensor.cpu()
        with tagged(tag):
            return _Staged(dist.isend(host, dst=axis.ranks[to_index], group=axis.group, tag=number), host, None)
    # NCCL would make a new communicator for a message outside of a group call
    if in_order_of_calls(tensor.device, axis):
        return _begun([RankMessage(tensor, to_index, number, tag)], [], axis)
    with tagged(tag):
        return Pending(dist.isend(tensor, dst=axis.ranks[to_index], group=axis.group, tag=number))


def receive(tensor: torch.Tensor, axis: Axis, from_index: int, tag: str, number: int) -> Pending:
    """Starts to receive into a contiguous tensor from the axis's `from_index`-th rank; returns the `Pending`.

    tag, number  as of `send`
    """
    if axis.rehearsal is not None:
        axis.note(tag, "point_to_point", tensor)
        axis.rehearsal.arrivals["point_to_point", axis.name, from_index] += tensor.numel() * tensor.element_size()
        stand_in(tensor)
        return Pending(None)
    _check_runs(tensor)
    # gloo receives into host memory only
    if _needs_host(tensor, axis):
        host = torch.empty_like(tensor, device="cpu")
        with tagged(tag):
            return _Staged(dist.irecv(host, src=axis.ranks[from_index], group=axis.group, tag=number), host, tensor)
    # NCCL would make a new communicator for a message outside of a group call
    if in_order_of_calls(tensor.device, axis):
        return _begun([], [RankMessage(tensor, from_index, number, tag)], axis)
    with tagged(tag):
        return Pending(dist.irecv(tensor, src=axis.ranks[from_index], group=axis.group, tag=number))


@dataclass(frozen=True)
class RankMessage:
    """A contiguous tensor to send to, or receive from, the axis's `index`-th rank; `number` and `tag` as of `send`."""

    tensor: torch.Tensor
    index: int
    number: int
    tag: str


def exchange(
    sends: Sequence[RankMessage], receives: Sequence[RankMessage], axis: Axis
) -> tuple[list[Pending], list[Pending]]:
    """Begins messages to and from other ranks together; returns (a `Pending` for each send, for each receive).

    NCCL begins them in one group call, so that two ranks that send each other large messages do not deadlock.
    """
    messages = [*sends, *receives]
    if axis.silent or not messages or not in_order_of_calls(messages[0].tensor.device, axis):
        return (
            [send(message.tensor, axis, message.index, message.tag, message.number) for message in sends],
            [receive(message.tensor, axis, message.index, message.tag, message.number) for message in receives],
        )
    for message in messages:
        _check_runs(message.tensor)
    pending = _begun(sends, receives, axis)
    return [pending] * len(sends), [pending] * len(receives)


def in_order_of_calls(device: torch.device, axis: Axis) -> bool:
    """Whether messages of this device over the axis run in the order of their calls, as NCCL's do and gloo's do not."""
    return axis.group is not None and not on_host(device) and backend_of(axis.group, device) not in (None, "gloo")


def _begun(sends: Sequence[RankMessage], receives: Sequence[RankMessage], axis: Axis) -> Pending:
    """Begins messages, also a single one, in one group call; returns one `Pending` for all."""
    group, device = axis.group, [*sends, *receives][0].tensor.device
    assert group is not None
    # NCCL takes all messages of a round as one call; gloo takes them one by one
    coalesces = group._get_backend(device).supports_coalescing
    works = []
    with batched(), _coalescing_manager(group, device, async_ops=True) if coalesces else nullcontext() as together:
        for message in sends:
            with tagged(message.tag):
                works.append(dist.isend(message.tensor, axis.ranks[message.index], group, message.number))
        for message in receives:
            with tagged(message.tag):
                works.append(dist.irecv(message.tensor, axis.ranks[message.index], group, message.number))
    # a group call has one work for all its messages
    return _Several(together.works if together is not None else works)


def beside(axis: Axis, device: torch.device) -> Axis:
    """Returns the axis with a second process group if messages of one group run in order (NCCL); else `axis`.

    Messages over the second group need not wait for those over the first. Collective over all ranks. Raises
    `RefusedPlan` if CUDA_DEVICE_MAX_CONNECTIONS=1, under which they would deadlock.
    """
    if not in_order_of_calls(device, axis):
        return axis
    # the device then runs one communicator's kernels at a time
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise RefusedPlan(
            "a stage that takes a gradient within its forward asks the stage before it while hidden states wait for "
            "it, and with CUDA_DEVICE_MAX_CONNECTIONS=1 the device runs one communicator's kernels at a time: unset it"
        )
    row = put([float(rank) for rank in axis.ranks], device)
    table = gather_rows(row, replace(axis, name="world", size=dist.get_world_size(), group=dist.group.WORLD))
    # torch requires that every rank makes all groups in the same order, also those that it is not in
    everyone = sorted({tuple(int(rank) for rank in ranks) for ranks in read(table, "groups")})
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in everyone])
    own = replace(axis, group=group)
    meet(own, device)
    return own


def meet(axis: Axis, device: torch.device) -> None:
    """Creates the axis's NCCL communicator by an all-reduce, as NCCL needs before some ranks exchange messages."""
    if in_order_of_calls(device, axis):
        all_reduce(torch.zeros(1, device=device), axis, "control")
