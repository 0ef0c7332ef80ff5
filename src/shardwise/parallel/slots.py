"""The interface of data-parallel techniques, which step/ calls. replicate, flat, full and expert/reduce implement it.

A `Slot` is one trainable parameter as the optimizer sees it on this rank, whole or as a piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.comm import Axis, Gathering
from shardwise.errors import InputError


@dataclass
class Slot:
    """One trainable parameter on this rank.

    name     its path in the module
    shape    its unsharded shape; without the dim of 2 if it is complex outside of the module
    master   what the optimizer updates: the whole tensor, or this rank's piece of it (1-d under ZeRO-1 and 2, a shard
             along one dim under ZeRO-3)
    whole    whether `master` is the whole parameter
    counted  whether this rank adds the elements to the gradient norm (one rank of those that hold them does)
    """

    name: str
    shape: torch.Size
    master: nn.Parameter
    whole: bool
    counted: bool = True


class ShardMemory(Protocol):
    """Memory outside the device (a file on a disk) that holds the shards of some units and is read for each all-gather.

    memory  for each of the first units, in order, 1-d tensors in which its shards lie
    """

    memory: list[list[torch.Tensor]]

    def before_gather(self, unit: int) -> None:
        """Called before an all-gather reads the shards of a unit, given by its index in `memory`."""

    def after_gather(self, unit: int) -> None:
        """Called when an all-gather has read the shards of a unit, given by its index in `memory`."""

    def let_go(self) -> None:
        """Frees the pages that reads and writes outside of all-gathers have brought into the host's memory."""


@dataclass
class Phase:
    """What kind of samples the engine runs now, for code inside the module (batch norms, random numbers).

    samples    number of this rank's samples that count; 0: it runs a stand-in
    same       whether every rank runs the same samples, which count once
    looked_at  whether this is the look at a few samples before the first step
    """

    samples: int = 1
    same: bool = False
    looked_at: bool = False

    @property
    def stand_in(self) -> bool:
        """Whether this rank runs a stand-in, a sample that counts nothing."""
        return self.samples == 0


# called within backward as arrived(slots whose gradients are summed and set, index of their bucket, that bucket's
# gradients as one 1-d tensor; None: gradients lie apart)
Arrived = Callable[[list[Slot], int, torch.Tensor | None], None]
ValueOf = Callable[[str], torch.Tensor]  # name -> full initial tensor on the CPU


class DataParallel(Protocol):
    """A technique, which owns the parameters' storage, reduces gradients and publishes updated weights.

    slots      the trainable parameters as the optimizer sees them; under ZeRO-1 and 2 only those with elements here
    in_pieces  whether each rank of dp_shard holds a part of every gradient, so that square norms are summed over ranks
    An `index` below counts the trainable parameters in the module's order.
    """

    slots: list[Slot]
    in_pieces: bool

    def start_step(self) -> None:
        """Drops the last step's gradients."""

    def start_micro_batch(self, *, last: bool) -> None:
        """Called before each forward. `last`: whether this is the step's last micro-batch."""

    def expect_pieces(self) -> None:
        """Called before a backward that may bring a gradient in several pieces (reentrant checkpoints).

        That backward finds out which do; they are then reduced after the last piece.
        """

    def finish_micro_batch(self) -> set[int]:
        """Called after each backward; returns the indices of the parameters that this rank's backward reached."""
        ...

    def finish_step(self, used: set[int]) -> None:
        """Waits for reductions and sets `slot.master.grad` to the sum over ranks; None for indices not in `used`."""

    def flat_gradients(self) -> list[torch.Tensor] | None:
        """Returns 1-d tensors that hold all gradients of this step, with zeros in gaps; None if there are none such."""
        ...

    def use_as_made(self, arrived: Arrived) -> None:
        """Has `arrived` called within backward once gradients are summed; the technique then drops its references.

        Not called for gradients that this rank's backward did not reach; `finish_step` sets these.
        """

    def wide_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (weight, wider master) for each tensor that holds masters; [] if masters are the weights."""
        ...

    def publish(self, *, rounded: bool = False) -> None:
        """Copies the masters into the module's weights after the optimizer, on all ranks. Collective.

        rounded   whether this rank's weights have the masters' values already
        """

    def take_weights(self) -> None:
        """Copies into the masters what code outside the optimizer wrote into the module's weights. No collective."""

    def gradient_buffers(self) -> list[torch.Tensor | None]:
        """Returns the tensors that hold gradients beside the `.grad` of parameters and masters; entries may be None."""
        ...

    def load_masters(self, index: int, value: torch.Tensor) -> None:
        """Sets the index-th master, or this rank's piece of it, from its full value, if masters are separate."""

    def full_parameter(self, index: int) -> Gathering:
        """Returns the gathering of the index-th unsharded master weight, on every rank."""
        ...

    def full_gradient(self, index: int) -> Gathering:
        """Returns the gathering of the index-th unsharded gradient, on every rank; it gives None if no rank used it."""
        ...

    def whole(self, index: int, piece: torch.Tensor) -> Gathering:
        """Returns the gathering of a tensor that is sharded as the index-th master (optimizer state), from all pieces.

        piece   this rank's piece of it
        """
        ...


class PieceSlots(Protocol):
    """A technique whose slots are pieces of parameters.

    params   trainable parameters as the module holds them, whole or as shards
    """

    slots: list[Slot]
    params: list[Any]

    def select(self, index: int, whole: torch.Tensor, shard_rank: int) -> torch.Tensor:
        """Returns the view of `whole`, shaped as the index-th parameter, that is the piece of rank `shard_rank`."""
        ...

    def full_parameter(self, index: int) -> Gathering:
        """Returns the gathering of the index-th unsharded master weight."""
        ...


def joined(technique: PieceSlots, index: int, shape: torch.Size, piece: torch.Tensor, axis: Axis) -> Gathering:
    """Returns the gathering of a tensor of this shape, cut as the index-th parameter, from every rank's `piece`.

    piece   this rank's, in any shape, may be empty;  axis  the ranks of dp_shard
    """
    like = torch.empty(shape, device="meta")
    sizes = [technique.select(index, like, rank).numel() for rank in range(axis.size)]
    # pieces differ in size and may be empty, so all are padded to the largest one for a single all-gather
    row = piece.new_zeros(max(sizes))
    row[: piece.numel()] = piece.reshape(-1)
    table = yield row, axis
    whole = piece.new_empty(shape)
    for rank, size in enumerate(sizes):
        if size:
            goal = technique.select(index, whole, rank)  # a view of `whole`
            goal.copy_(table[rank, :size].view(goal.shape))
    return whole


# For weights and masters that code outside the optimizer wrote, or gave other memory.


def follow(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Copies into `master` those elements of `weight` that differ from the rounded master."""
    # equal elements are not copied, since the master has digits that the weight's narrower dtype lost
    master.copy_(torch.where(weight == master.to(weight.dtype), master, weight.to(master.dtype)))


def is_away(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether `tensor` begins at another address than `place`; False if it is empty."""
    return tensor.numel() > 0 and tensor.data_ptr() != place.data_ptr()


def bring_back(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Copies `tensor` into `place` and makes it a view of that memory again, if its `.data` was set to other memory."""
    if is_away(tensor, place):
        place.copy_(tensor.detach())
        tensor.data = place


def check_shape(name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    """Raises `InputError` if the shape of parameter `name`, whose `.data` a script may have set, is not `shape`."""
    if tensor.shape != shape:
        raise InputError(
            f"the data of parameter '{name}' is a tensor of {tuple(tensor.shape)} now, where the weight is "
            f"{tuple(shape)}: the plan holds weights as they were"
        )
