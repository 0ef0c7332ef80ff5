"""Optimizers that need whole tensors (LAMB, Muon; found by engine/optimizer) under ZeRO: owners. Bytes: simulator/held.

    pieces of g_i on every rank --all-to-all--> whole g_i on its owner
    owner: optimizer state and master of its parameters alone, about 1/N of them all
    whole w_i on its owner --all-to-all--> pieces of w_i on every rank

Owners are chosen largest first, each to the rank that has least so far, over dp_shard; replicas do the same twice.
Bytes on the wire: 2 (N-1)/N P for each optimizer step, beside those of the stage.

What this does not do: balance better than whole parameters allow, or serve an optimizer that looks at all tensors
at once.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm import Axis, all_to_all, gathered_alone, gathered_together
from shardwise.device import CPU, on_host
from shardwise.parallel.slots import PieceSlots, follow
from shardwise.part.pairs import as_complex, as_pairs


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the real numbers of a tensor, flat: two for each complex one."""
    return as_pairs(tensor).reshape(-1)


def choose_owners(sizes: list[int], ranks: int) -> list[int]:
    """Returns the owner's rank of each parameter: largest first, to the rank with the fewest elements so far."""
    load = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = min(range(ranks), key=lambda r: (load[r], r))
        load[owners[index]] += sizes[index]
    return owners


class OwnedMasters:
    """Whole masters of the parameters that this rank owns, and the exchange with everybody's pieces."""

    def __init__(self, technique: PieceSlots, names: list[str], shapes: list[torch.Size], axis: Axis):
        self.technique = technique
        self.axis = axis
        self.shapes = shapes
        self.owner_of = choose_owners([shape.numel() for shape in shapes], axis.size)
        index_of = {name: index for index, name in enumerate(names)}
        self._slot = {index_of[slot.name]: slot for slot in technique.slots}
        self.masters: dict[int, nn.Parameter] = {}
        # all whole ones lie with the shards, where some of these lie on the host and what is not cut on the device
        places = [slot.master.device for slot in technique.slots]
        self._home = next(filter(on_host, places), places[0] if places else CPU)
        wholes = gathered_together(technique.full_parameter(index) for index in range(len(shapes)))
        self._kinds: list[torch.dtype] = []
        for index, (owner, whole) in enumerate(zip(self.owner_of, wholes, strict=True)):
            self._kinds.append(whole.dtype)
            if owner == axis.index:
                self.masters[index] = nn.Parameter(whole.detach().to(self._home, copy=True))

    def _owned_by(self, rank: int, used: set[int]) -> list[int]:
        # Of used ones alone: others have no gradient, and their weights stay.
        return [index for index, owner in enumerate(self.owner_of) if owner == rank and index in used]

    def _size(self, index: int, rank: int) -> int:
        """Returns how many real numbers the rank's piece of a parameter has."""
        shape = torch.empty(self.shapes[index], device="meta")
        return self.technique.select(index, shape, rank).numel() * (2 if self._complex(index) else 1)

    def _complex(self, index: int) -> bool:
        return self._kinds[index].is_complex

    def _shaped(self, index: int, numbers: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return as_complex(numbers.view(*shape, 2)) if self._complex(index) else numbers.view(shape)

    def _like(self) -> torch.Tensor:
        return as_pairs(next(iter(self._slot.values())).master.detach()).to(self._home)

    @torch.no_grad()
    def collect_gradients(self, used: set[int]) -> None:
        """Gather whole gradients of the owned parameters from everybody's pieces. Collective."""
        ranks, me = self.axis.size, self.axis.index
        sent = [
            as_numbers(self._slot[i].master.grad).to(self._home)
            for rank in range(ranks)
            for i in self._owned_by(rank, used)
            if self._size(i, me)
        ]
        # Sizes follow from shapes and owners on every rank, so none are sent.
        sent_sizes = [sum(self._size(i, me) for i in self._owned_by(rank, used)) for rank in range(ranks)]
        mine = self._owned_by(me, used)
        received_sizes = [sum(self._size(i, rank) for i in mine) for rank in range(ranks)]
        received = self._exchange(sent, sent_sizes, received_sizes, "gradients")
        wholes = {i: received.new_empty(self.shapes[i], dtype=self._kinds[i]) for i in mine}
        at = 0
        for rank in range(ranks):
            for i in mine:
                piece = self.technique.select(i, wholes[i], rank)
                size = self._size(i, rank)
                piece.copy_(self._shaped(i, received[at : at + size], piece.shape))
                at += size
        for i, master in self.masters.items():
            master.grad = wholes.get(i)  # None where nobody used it: the optimizer leaves it alone

    @torch.no_grad()
    def hand_out(self, used: set[int]) -> None:
        """Send the pieces of the owners' updated masters to the ranks that hold them. Collective."""
        ranks, me = self.axis.size, self.axis.index
        mine = self._owned_by(me, used)
        sent = [as_numbers(self.technique.select(i, self.masters[i], r)) for r in range(ranks) for i in mine]
        sent_sizes = [sum(self._size(i, rank) for i in mine) for rank in range(ranks)]
        received_sizes = [sum(self._size(i, me) for i in self._owned_by(rank, used)) for rank in range(ranks)]
        received = self._exchange(sent, sent_sizes, received_sizes, "parameters")
        at = 0
        for rank in range(ranks):
            for i in self._owned_by(rank, used):
                size = self._size(i, me)
                if size:  # this rank may have no slot for it
                    master = self._slot[i].master
                    master.copy_(self._shaped(i, received[at : at + size], master.shape))
                at += size
        for master in self.masters.values():
            master.grad = None  # whole gradients are not held beside the next step's

    @torch.no_grad()
    def take_weights(self) -> None:
        """Let owners' masters follow what was written into the weights. Collective where ranks hold shards of those."""
        for index, weight in enumerate(self.technique.params):
            whole = weight.detach()
            if isinstance(weight, DTensor):  # all ranks, though one owns it: the gather is collective
                whole = gathered_alone(self.technique.full_parameter(index))
            if index in self.masters:
                follow(self.masters[index], whole)

    def _exchange(self, sent: list[torch.Tensor], sent_sizes, received_sizes, tag: str) -> torch.Tensor:
        like = self._like()
        outgoing = torch.cat(sent) if sent else like.new_empty(0)
        received = like.new_empty(sum(received_sizes))
        all_to_all(received, outgoing.detach(), received_sizes, sent_sizes, self.axis, tag)
        return received
