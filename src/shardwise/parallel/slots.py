"""The interface of data-parallel techniques, which step/ calls: replicate, flat, full, expert/reduce implement it.

A `Slot` is one trainable parameter as the optimizer sees it on this rank: the whole of it, or a piece.
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

    name    its path in the module
    shape   its full shape
    master  what the optimizer updates: the whole tensor, or this rank's flat or dim-0 piece
    whole   `master` is the whole parameter
    counted no other rank of dp_shard counts these elements in the norm
    """

    name: str
    shape: torch.Size
    master: nn.Parameter
    whole: bool
    counted: bool = True


class ShardMemory(Protocol):
    """Memory elsewhere, in which the shards of some units lie and are read for each gather.

    memory  of the shards of each unit that moves, in order: the first ones
    """

    memory: list[list[torch.Tensor]]

    def before_gather(self, unit: int) -> None:
        """Called before the shards of a unit, by its number, are read."""

    def after_gather(self, unit: int) -> None:
        """Called when the shards of a unit have been read."""

    def let_go(self) -> None:
        """Let go of what was read or written by others than gathers."""


@dataclass
class Phase:
    """The kind of samples that the engine runs now, for code inside the module that must know."""

    samples: int = 1  # how many this rank runs that count; 0: a stand-in
    same: bool = False  # every rank runs the same samples, which count once
    looked_at: bool = False  # a few samples are run to see what it does with them

    @property
    def stand_in(self) -> bool:
        """Returns whether this rank runs a sample that counts nothing."""
        return self.samples == 0


# told of the slots whose gradients are there, and of the flat tensor (by its number) in which these or others lie
Arrived = Callable[[list[Slot], int, torch.Tensor | None], None]
ValueOf = Callable[[str], torch.Tensor]  # name -> full initial tensor on the CPU


class DataParallel(Protocol):
    """A technique: owns the parameters' storage, reduces gradients, publishes updated weights."""

    slots: list[Slot]
    in_pieces: bool  # each rank of dp_shard holds a part of every gradient, so their square norms add up

    def start_step(self) -> None:
        """Forget the last step's gradients."""

    def start_micro_batch(self, *, last: bool) -> None:
        """Called before each forward; `last`: it is the step's last micro-batch."""

    def expect_pieces(self) -> None:
        """Called before a backward that may bring a gradient in parts (reentrant checkpoints): their sum is reduced."""

    def finish_micro_batch(self) -> set[int]:
        """Called after each backward; returns which parameters (by index) this rank's backward reached."""
        ...

    def finish_step(self, used: set[int]) -> None:
        """Wait for reductions; sets `slot.master.grad` to the sum over ranks, None where no rank used it (`used`)."""

    def flat_gradients(self) -> list[torch.Tensor] | None:
        """Returns the tensors in which this step's gradients lie end to end, zeros between; None where they do not."""
        ...

    def use_as_made(self, arrived: Arrived) -> None:
        """Call a function for gradients within backward, once they are summed; their memory is held by slots alone.

        Not of those that this rank's backward does not reach, which `finish_step` sets.
        """

    def wide_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (weight, wider master) of each tensor in which masters lie; [] where masters are the weights."""
        ...

    def publish(self, *, rounded: bool = False) -> None:
        """Brings the module's weights up to the masters after the optimizer; `rounded`: this rank's are already."""

    def take_weights(self) -> None:
        """Copy into the masters what was written into the module's weights past the optimizer. Nothing is sent."""

    def gradient_buffers(self) -> list[torch.Tensor | None]:
        """Returns the storage of gradients beside the `.grad` of parameters and masters."""
        ...

    def load_masters(self, index: int, value: torch.Tensor) -> None:
        """Sets a master (or this rank's piece) from its full value, where masters are wider than weights."""

    def full_parameter(self, index: int) -> Gathering:
        """Returns the gathering of the whole master weight, on every rank."""
        ...

    def full_gradient(self, index: int) -> Gathering:
        """Returns the gathering of the whole gradient, on every rank; of None where no rank used the parameter."""
        ...

    def whole(self, index: int, piece: torch.Tensor) -> Gathering:
        """Returns the gathering of a tensor cut as the index-th master is (its state), from every rank's `piece`."""
        ...


class PieceSlots(Protocol):
    """A technique whose slots are pieces; `select` says where each rank's piece lies in the whole parameter."""

    slots: list[Slot]
    params: list[Any]  # what the module has: whole, or shards

    def select(self, index: int, whole: torch.Tensor, shard_rank: int) -> torch.Tensor:
        """Returns the view of `whole`, shaped as the index-th parameter, that is the piece of rank `shard_rank`."""
        ...

    def full_parameter(self, index: int) -> Gathering:
        """Returns the gathering of the whole weight."""
        ...


def joined(technique: PieceSlots, index: int, shape: torch.Size, piece: torch.Tensor, axis: Axis) -> Gathering:
    """Returns the gathering of the whole tensor of this shape from every rank's `piece` (any shape, may be empty)."""
    like = torch.empty(shape, device="meta")
    sizes = [technique.select(index, like, rank).numel() for rank in range(axis.size)]
    # pieces differ in size, and some are empty: rows of the largest one, so that one gather takes all
    row = piece.new_zeros(max(sizes))
    row[: piece.numel()] = piece.reshape(-1)
    table = yield row, axis
    whole = piece.new_empty(shape)
    for rank, size in enumerate(sizes):
        if size:
            goal = technique.select(index, whole, rank)  # a view: what is copied into it stands in `whole`
            goal.copy_(table[rank, :size].view(goal.shape))
    return whole


# Weights that were written past the optimizer: masters follow, and lie where they belong.


def follow(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Copies into a master those elements of a weight that differ from the master's, rounded: written by hand."""
    # where they agree the master stays: it has digits that the weight's narrower dtype lost
    master.copy_(torch.where(weight == master.to(weight.dtype), master, weight.to(master.dtype)))


def is_away(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """Returns whether a tensor lies in other memory than `place`; False for an empty one, which lies nowhere."""
    return tensor.numel() > 0 and tensor.data_ptr() != place.data_ptr()


def bring_back(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Copy a tensor whose `.data` was set back into `place`, and let it lie there again."""
    if is_away(tensor, place):
        place.copy_(tensor.detach())
        tensor.data = place


def check_shape(name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    """Raise `InputError` where `.data` was set to a tensor of another shape."""
    if tensor.shape != shape:
        raise InputError(
            f"the data of parameter '{name}' is a tensor of {tuple(tensor.shape)} now, where the weight is "
            f"{tuple(shape)}: the plan holds weights as they were"
        )
