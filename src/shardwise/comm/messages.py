"""Messages between two ranks of an axis: by themselves, or several begun together.

    exchange   rank 0  [send A to 1, receive B from 1]      one group call of NCCL: both ways at once
               rank 1  [receive A from 0, send B to 0]

Over NCCL the operations of a communicator run in the order of their calls, and a send ends when it was received: two
ranks that both send first wait for each other as soon as a message is larger than what is buffered (some MiB). So
whatever may cross is begun together, and every rank comes to its messages in one order that is the same for all.
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
    """Messages that were begun together, where torch gives a work for each."""

    def __init__(self, works: list[dist.Work]):
        super().__init__(None)
        self.works = works

    def wait(self) -> None:
        """Waits for all messages."""
        while self.works:
            self.works.pop().wait()

    @property
    def over(self) -> bool:
        """Returns whether all messages are complete."""
        return all(work.is_completed() for work in self.works)


class _Staged(Pending):
    """A message through host memory, for a backend that sends nothing else."""

    def __init__(self, work: dist.Work | None, host: torch.Tensor, goal: torch.Tensor | None):
        super().__init__(work)
        self.host, self.goal = host, goal

    def wait(self) -> None:
        """Blocks until the message is there, and copies it to its device."""
        if self.work is not None:
            super().wait()
            if self.goal is not None:
                self.goal.copy_(self.host)


def _needs_host(tensor: torch.Tensor, axis: Axis) -> bool:
    """Returns whether the backend cannot send tensors of this device."""
    return not on_host(tensor.device) and backend_of(axis.group, tensor.device) in (None, "gloo")


def _check_runs(tensor: torch.Tensor) -> None:
    """Raises `TypeError` inside a compiled program."""
    if is_traced(tensor):
        raise TypeError("two ranks send each other a message, of which a compiled program knows none")


def send(tensor: torch.Tensor, axis: Axis, to_index: int, tag: str, number: int) -> Pending:
    """Send a contiguous tensor to the axis's `to_index`-th rank; returns what to wait for before it may change.

    `number` tells apart messages that are under way between the same two ranks.
    """
    if axis.rehearsal is not None:
        axis.rehearsal.leaving(tag, axis.name)
        return Rehearsed(tensor) if axis.copies else Pending(None)  # noted by whoever receives
    _check_runs(tensor)
    # gloo sends the host's memory alone
    if _needs_host(tensor, axis):
        host = tensor.cpu()
        with tagged(tag):
            return _Staged(dist.isend(host, dst=axis.ranks[to_index], group=axis.group, tag=number), host, None)
    # NCCL would make a communicator for a message begun alone
    if in_order_of_calls(tensor.device, axis):
        return _begun([RankMessage(tensor, to_index, number, tag)], [], axis)
    with tagged(tag):
        return Pending(dist.isend(tensor, dst=axis.ranks[to_index], group=axis.group, tag=number))


def receive(tensor: torch.Tensor, axis: Axis, from_index: int, tag: str, number: int) -> Pending:
    """Receive into a contiguous tensor from the axis's `from_index`-th rank, by number; returns what to wait for."""
    if axis.rehearsal is not None:
        axis.note(tag, "point_to_point", tensor)
        axis.rehearsal.arrivals["point_to_point", axis.name, from_index] += tensor.numel() * tensor.element_size()
        stand_in(tensor)
        return Pending(None)
    _check_runs(tensor)
    # gloo receives into the host's memory alone
    if _needs_host(tensor, axis):
        host = torch.empty_like(tensor, device="cpu")
        with tagged(tag):
            return _Staged(dist.irecv(host, src=axis.ranks[from_index], group=axis.group, tag=number), host, tensor)
    # NCCL would make a communicator for a message begun alone
    if in_order_of_calls(tensor.device, axis):
        return _begun([], [RankMessage(tensor, from_index, number, tag)], axis)
    with tagged(tag):
        return Pending(dist.irecv(tensor, src=axis.ranks[from_index], group=axis.group, tag=number))


@dataclass(frozen=True)
class RankMessage:
    """A contiguous tensor that goes to, or comes from, the axis's `index`-th rank, under a number and a tag."""

    tensor: torch.Tensor
    index: int
    number: int
    tag: str


def exchange(
    sends: Sequence[RankMessage], receives: Sequence[RankMessage], axis: Axis
) -> tuple[list[Pending], list[Pending]]:
    """Begin messages to and from other ranks together: none waits for another. Returns a `Pending` for each.

    An accelerator's backend begins them in one group call. One after another, two ranks that each send first would
    wait for each other as soon as a message is larger than what the backend buffers.
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
    """Returns whether messages of this device over the axis run in the order of their calls, as NCCL's do."""
    return axis.group is not None and not on_host(device) and backend_of(axis.group, device) not in (None, "gloo")


def _begun(sends: Sequence[RankMessage], receives: Sequence[RankMessage], axis: Axis) -> Pending:
    """Begin messages together, a single one too (alone, NCCL makes a communicator for it); returns what to wait for."""
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
    # one call has one work; without it each message has its own
    return _Several(together.works if together is not None else works)


def beside(axis: Axis, device: torch.device) -> Axis:
    """Returns the axis with a group of its own where messages of one group wait in line (NCCL). Collective (world).

    Raises `RefusedPlan` there under CUDA_DEVICE_MAX_CONNECTIONS=1.
    """
    if not in_order_of_calls(device, axis):
        return axis
    # a second group gains nothing then, and the two ranks would wait for each other for ever
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise RefusedPlan(
            "a stage that takes a gradient within its forward asks the stage before it while hidden states wait for "
            "it, and with CUDA_DEVICE_MAX_CONNECTIONS=1 the device runs one communicator's kernels at a time: unset it"
        )
    row = put([float(rank) for rank in axis.ranks], device)
    table = gather_rows(row, replace(axis, name="world", size=dist.get_world_size(), group=dist.group.WORLD))
    # every rank makes all groups in one order, those that it is not in too, as torch asks
    everyone = sorted({tuple(int(rank) for rank in ranks) for ranks in read(table, "groups")})
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in everyone])
    own = replace(axis, group=group)
    meet(own, device)
    return own


def meet(axis: Axis, device: torch.device) -> None:
    """Have all ranks of an axis make its communicator, as NCCL asks before some of them send each other messages."""
    if in_order_of_calls(device, axis):
        all_reduce(torch.zeros(1, device=device), axis, "control")
