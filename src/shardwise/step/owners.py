"""Updates of optimizers that need whole tensors (LAMB, Muon), by owners. Any is found by a trial: engine/optimizer.

    pieces of g_i on every rank --all-to-all--> whole g_i on its owner
    owner: optimizer state and master of its parameters alone, about 1/N of them all
    whole w_i on its owner --all-to-all--> pieces of w_i on every rank

Owners are chosen largest first, each to the rank that has least so far, over dp_shard; replicas do the same twice.
What tp cuts goes one exchange further: of the ranks that hold a weight's shares one puts the whole together.
Bytes on the wire: 2 (N-1)/N P over dp_shard for each optimizer step, beside those of the stage, and as much of what tp
cuts over tp.

What this does not do: balance better than whole parameters allow, or serve an optimizer that looks at all tensors
at once. What tp does not cut each of its ranks updates, as it does under any optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm import Axis, Gathering, all_to_all, gathered_alone, gathered_together
from shardwise.device import CPU, on_host
from shardwise.host import to_device
from shardwise.parallel.slots import PieceSlots, follow
from shardwise.part.pairs import as_complex, as_pairs

if TYPE_CHECKING:
    from shardwise.parallel.tensor.cut_weights import TensorParallel


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's elements as real numbers, flat: two for each complex element."""
    return as_pairs(tensor).reshape(-1)


def choose_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Returns the owner's rank of each parameter: largest first, to the rank with the fewest elements so far."""
    load = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = min(range(ranks), key=lambda r: (load[r], r))
        load[owners[index]] += sizes[index]
    return owners


def share_owners(sizes: Mapping[int, int], groups: Sequence[int], ranks: int) -> dict[int, int]:
    """Returns {index of a cut weight: tp rank that puts it together}, balanced by elements within each group.

    sizes   of the whole weights, by index
    groups  which rank of dp_shard each weight, cut or not, belongs to: its ranks of tp share the weights among them
    """
    owner_of: dict[int, int] = {}
    for group in set(groups):
        own = [index for index in sizes if groups[index] == group]
        owner_of |= dict(zip(own, choose_owners([sizes[index] for index in own], ranks), strict=True))
    return owner_of


@dataclass(frozen=True)
class _Exchange:
    """Collects whole tensors, by index, from pieces on an axis's ranks on the rank that owns each, and sends them back.

    take    (index, whole, rank) -> that rank's piece of it
    put     (index, whole, rank, piece): writes the piece into its place
    shapes  of the wholes; kinds: their dtypes
    """

    axis: Axis
    owner_of: Mapping[int, int]
    shapes: Mapping[int, torch.Size]
    kinds: Sequence[torch.dtype]
    take: Callable[[int, torch.Tensor, int], torch.Tensor]
    put: Callable[[int, torch.Tensor, int, torch.Tensor], None]
    home: torch.device

    def owned_by(self, rank: int, used: set[int]) -> list[int]:
        """Returns the indices of the used parameters that `rank` owns: others have no gradient and stay."""
        return [index for index, owner in self.owner_of.items() if owner == rank and index in used]

    def _shape(self, index: int, rank: int) -> torch.Size:
        return self.take(index, torch.empty(self.shapes[index], device="meta"), rank).shape

    def _size(self, index: int, rank: int) -> int:
        """Returns how many real numbers `rank`'s piece of a tensor has."""
        return self._shape(index, rank).numel() * (2 if self.kinds[index].is_complex else 1)

    def _shaped(self, index: int, numbers: torch.Tensor, rank: int) -> torch.Tensor:
        shape = self._shape(index, rank)
        return as_complex(numbers.view(*shape, 2)) if self.kinds[index].is_complex else numbers.view(shape)

    def collect(self, pieces: Mapping[int, torch.Tensor], used: set[int]) -> dict[int, torch.Tensor]:
        """Returns {index: whole tensor} of the used parameters that this rank owns. Collective."""
        ranks, me = self.axis.size, self.axis.index
        sent = (pieces[i] for rank in range(ranks) for i in self.owned_by(rank, used) if self._size(i, me))
        # Sizes follow from shapes and owners on every rank, so none are sent.
        sent_sizes = [sum(self._size(i, me) for i in self.owned_by(rank, used)) for rank in range(ranks)]
        mine = self.owned_by(me, used)
        received_sizes = [sum(self._size(i, rank) for i in mine) for rank in range(ranks)]
        received = self._send(sent, sent_sizes, received_sizes, "gradients")
        wholes = {i: received.new_empty(self.shapes[i], dtype=self.kinds[i]) for i in mine}
        at = 0
        for rank in range(ranks):
            for i in mine:
                size = self._size(i, rank)
                self.put(i, wholes[i], rank, self._shaped(i, received[at : at + size], rank))
                at += size
        return wholes

    def hand_out(self, wholes: Mapping[int, torch.Tensor], used: set[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (index, this rank's piece) of whole tensors as their owners have them; some are empty. Collective."""
        ranks, me = self.axis.size, self.axis.index
        mine = self.owned_by(me, used)
        sent = (self.take(i, wholes[i].detach(), rank) for rank in range(ranks) for i in mine)
        # sizes follow from shapes and owners, which every rank knows: none are sent
        sent_sizes = [sum(self._size(i, rank) for i in mine) for rank in range(ranks)]
        received_sizes = [sum(self._size(i, me) for i in self.owned_by(rank, used)) for rank in range(ranks)]
        received = self._send(sent, sent_sizes, received_sizes, "parameters")
        at = 0
        for rank in range(ranks):
            for i in self.owned_by(rank, used):
                size = self._size(i, me)
                yield i, self._shaped(i, received[at : at + size], me)
                at += size

    def _send(
        self, sent: Iterator[torch.Tensor], sent_sizes: list[int], received_sizes: list[int], tag: str
    ) -> torch.Tensor:
        """Returns, flat, what all ranks send to this one. `sent`: this rank's pieces, in rank order. Collective."""
        outgoing, at = torch.empty(sum(sent_sizes), dtype=self.kinds[0].to_real(), device=self.home), 0
        for piece in sent:  # one after the other: a piece that does not lie in one run is copied to be flat
            numbers = as_numbers(piece)
            outgoing[at : at + len(numbers)] = numbers
            at += len(numbers)
        received = outgoing.new_empty(sum(received_sizes))
        all_to_all(received, outgoing, received_sizes, sent_sizes, self.axis, tag)
        return received


class OwnedMasters:
    """Whole masters of the parameters that this rank owns, and the exchanges with everybody's pieces."""

    def __init__(
        self, technique: PieceSlots, names: list[str], shapes: list[torch.Size], shard: Axis | None,
        tensor: TensorParallel | None = None,
    ) -> None:  # fmt: skip
        """Gather the technique's present masters to their owners. Collective.

        names   of the technique's parameters; shapes: of the whole ones
        shard   where ranks hold pieces of them, the axis of these ranks
        tensor  the cuts of tp
        """
        self.technique, self._tensor, self._names = technique, tensor, names
        self.axis = shard
        index_of = {name: index for index, name in enumerate(names)}
        self._slot = {index_of[slot.name]: slot for slot in technique.slots}
        # all whole ones lie with the shards, where some of these lie on the host and what is not cut on the device
        places = [slot.master.device for slot in technique.slots]
        self._home = next(filter(on_host, places), places[0] if places else CPU)
        sizes = [shape.numel() for shape in shapes]
        self.owner_of = choose_owners(sizes, shard.size if shard is not None else 1)
        self._cut = {index_of[name] for name in (tensor.cuts if tensor is not None else ()) if name in index_of}
        self.share_owner_of = (
            share_owners({index: sizes[index] for index in sorted(self._cut)}, self.owner_of, tensor.axis.size)
            if tensor is not None
            else {}
        )
        wholes = gathered_together(self._whole(index) for index in range(len(names)))
        kinds: list[torch.dtype] = []
        self.masters: dict[int, nn.Parameter] = {}
        self._own: set[int] = set()  # masters of the technique itself, which has them whole
        for index, whole in enumerate(wholes):
            kinds.append(whole.dtype)
            if shard is None and index not in self._cut:
                # what tp leaves whole every rank has already: a copy would cost memory, and drift from the weight
                self.masters[index] = self._slot[index].master
                self._own.add(index)
            # gathered on every rank, which takes part in each gather; one keeps it
            elif self._owns(index):
                self.masters[index] = nn.Parameter(whole.detach().to(self._home, copy=True))
        self._over_shards = self._shards(shard, shapes, kinds) if shard is not None else None
        self._over_shares = self._shares(shapes, kinds) if tensor is not None else None

    def _owns(self, index: int) -> bool:
        mine = self.axis is None or self.owner_of[index] == self.axis.index
        return mine and (self._tensor is None or self.share_owner_of.get(index) in (None, self._tensor.axis.index))

    def _share_shape(self, index: int, whole: torch.Size) -> torch.Size:
        """Returns the shape of this rank's tp share of a parameter of shape `whole`."""
        if self._tensor is None or index not in self._cut:
            return whole
        return self._tensor.share(self._names[index], torch.empty(whole, device="meta")).shape

    def _shards(self, shard: Axis, shapes: list[torch.Size], kinds: list[torch.dtype]) -> _Exchange:
        """Returns the exchange of shards over dp_shard: which piece of each parameter goes to its owner."""

        def put(index: int, whole: torch.Tensor, rank: int, piece: torch.Tensor) -> None:
            self.technique.select(index, whole, rank).copy_(piece)  # a view: what is copied into it stands in `whole`

        shares = {index: self._share_shape(index, shape) for index, shape in enumerate(shapes)}
        owner_of = dict(enumerate(self.owner_of))
        return _Exchange(shard, owner_of, shares, kinds, self.technique.select, put, self._home)

    def _shares(self, shapes: list[torch.Size], kinds: list[torch.dtype]) -> _Exchange:
        """Returns the exchange over tp, between shares on its ranks and whole tensors on their owners."""
        assert self._tensor is not None
        cuts, names = self._tensor.cuts, self._names

        def take(index: int, whole: torch.Tensor, rank: int) -> torch.Tensor:
            cut = cuts[names[index]]
            return cut.owners.take(whole, cut.dim, rank)

        def put(index: int, whole: torch.Tensor, rank: int, piece: torch.Tensor) -> None:
            cut = cuts[names[index]]
            whole.index_copy_(cut.dim, to_device(cut.owners.indices(rank), whole.device), piece)

        here = [i for i in sorted(self._cut) if self.axis is None or self.owner_of[i] == self.axis.index]
        owner_of = {index: self.share_owner_of[index] for index in here}
        wholes = {index: shapes[index] for index in here}
        return _Exchange(self._tensor.axis, owner_of, wholes, kinds, take, put, self._home)

    def _whole(self, index: int) -> Gathering:
        share = yield from self.technique.full_parameter(index)
        return share if self._tensor is None else (yield from self._tensor.whole(self._names[index], share))

    @torch.no_grad()
    def collect_gradients(self, used: set[int]) -> None:
        """Gather whole gradients of the owned parameters from everybody's pieces. Collective."""
        pieces = {i: slot.master.grad for i, slot in self._slot.items() if i in used and slot.master.grad is not None}
        # shards first: what they make whole is a share over tp, which is joined next
        wholes = pieces if self._over_shards is None else self._over_shards.collect(pieces, used)
        if self._over_shares is not None:
            wholes = wholes | self._over_shares.collect(wholes, used)
        for i, master in self.masters.items():
            if i not in self._own:
                master.grad = wholes.get(i)  # None where nobody used it: the optimizer leaves it alone

    @torch.no_grad()
    def hand_out(self, used: set[int]) -> None:
        """Send the pieces of the owners' updated masters to the ranks that hold them. Collective."""
        wholes: dict[int, torch.Tensor] = {i: master for i, master in self.masters.items() if i not in self._own}
        if self._over_shares is not None:
            wholes |= self._over_shares.hand_out(wholes, used)
        pieces = wholes.items() if self._over_shards is None else self._over_shards.hand_out(wholes, used)
        for i, piece in pieces:
            if i in used and i in self._slot:  # this rank may have no slot for an empty piece
                self._slot[i].master.copy_(piece)
        for i, master in self.masters.items():
            if i not in self._own:
                master.grad = None  # whole gradients are not held beside the next step's

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copy weights that code has written into the owners' masters. Collective where ranks hold parts of weights."""
        for index, weight in enumerate(self.technique.params):
            whole = weight.detach()
            if isinstance(weight, DTensor):  # all ranks, though one owns it: the gather is collective
                whole = gathered_alone(self.technique.full_parameter(index))
            if self._tensor is not None:
                whole = gathered_alone(self._tensor.whole(self._names[index], whole))
            if index in self.masters and index not in self._own:
                follow(self.masters[index], whole)

    def route(self, index: int) -> list[tuple[Axis, int]]:
        """Returns the broadcasts, (axis, index of the sender), that take a tensor from a parameter's owner to all.

        In order: of ranks without it some send what the next one overwrites.
        """
        # over tp first: all of its groups send, though only the one in which the owner lies has something to tell
        of_shares = [(self._tensor.axis, self.share_owner_of[index])] if self._tensor and index in self._cut else []
        return of_shares + ([(self.axis, self.owner_of[index])] if self.axis is not None else [])
