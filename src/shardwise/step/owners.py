"""Updates by optimizers that need unsharded tensors (LAMB, Muon): each tensor is updated by the rank that owns it.

    pieces of g_i on every rank --all-to-all--> whole g_i on its owner
    owner: optimizer state and master of its parameters alone, about 1/N of them all
    whole w_i on its owner --all-to-all--> pieces of w_i on every rank

Owners are ranks of dp_shard: parameters, largest first, each go to the rank with the fewest elements so far. Replicas
repeat the same updates. A weight that tp shards needs a second exchange, in which one of the tp ranks collects it.
Bytes on the wire: 2 (N-1)/N P over dp_shard for each optimizer step, besides those of the ZeRO stage, and over tp as
much for the parameters that tp shards.

What this does not do: balance better than whole parameters allow, or serve an optimizer that looks at all tensors
at once. A parameter that tp does not shard is updated on each tp rank, as with other optimizers.
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
    """Returns a tensor's elements as a flat real tensor, two numbers for each complex element."""
    return as_pairs(tensor).reshape(-1)


def choose_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Returns for each parameter, of `sizes` elements, the rank that owns it, balanced by elements."""
    load = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = min(range(ranks), key=lambda r: (load[r], r))
        load[owners[index]] += sizes[index]
    return owners


def share_owners(sizes: Mapping[int, int], groups: Sequence[int], ranks: int) -> dict[int, int]:
    """Returns {index of a weight that tp shards: tp rank that owns it unsharded}.

    sizes   index of such a weight -> elements, unsharded
    groups  for each weight, of any kind, its owner's dp_shard rank; elements are balanced over tp within each
    ranks   of tp
    """
    owner_of: dict[int, int] = {}
    for group in set(groups):
        own = [index for index in sizes if groups[index] == group]
        owner_of |= dict(zip(own, choose_owners([sizes[index] for index in own], ranks), strict=True))
    return owner_of


@dataclass(frozen=True)
class _Exchange:
    """Exchange of tensors between pieces on all ranks of an axis and unsharded tensors on their owners.

    owner_of  index of a parameter -> rank of the axis that owns it
    shapes    index -> unsharded shape;  kinds  dtype of each parameter, by index
    take      function (index, unsharded tensor, rank) -> that rank's piece, a view or a copy
    put       function (index, unsharded tensor, rank, piece) that writes a rank's piece into its place
    home      device on which tensors are exchanged
    """

    axis: Axis
    owner_of: Mapping[int, int]
    shapes: Mapping[int, torch.Size]
    kinds: Sequence[torch.dtype]
    take: Callable[[int, torch.Tensor, int], torch.Tensor]
    put: Callable[[int, torch.Tensor, int, torch.Tensor], None]
    home: torch.device

    def owned_by(self, rank: int, used: set[int]) -> list[int]:
        """Returns the indices of the parameters that `rank` owns, but those not in `used`, which are not updated."""
        return [index for index, owner in self.owner_of.items() if owner == rank and index in used]

    def _shape(self, index: int, rank: int) -> torch.Size:
        return self.take(index, torch.empty(self.shapes[index], device="meta"), rank).shape

    def _size(self, index: int, rank: int) -> int:
        """Returns the number of real numbers in `rank`'s piece of the parameter `index`."""
        return self._shape(index, rank).numel() * (2 if self.kinds[index].is_complex else 1)

    def _shaped(self, index: int, numbers: torch.Tensor, rank: int) -> torch.Tensor:
        shape = self._shape(index, rank)
        return as_complex(numbers.view(*shape, 2)) if self.kinds[index].is_complex else numbers.view(shape)

    def collect(self, pieces: Mapping[int, torch.Tensor], used: set[int]) -> dict[int, torch.Tensor]:
        """Returns {index: unsharded tensor} of the `used` parameters that this rank owns. Collective.

        pieces  index -> this rank's piece
        """
        ranks, me = self.axis.size, self.axis.index
        sent = (pieces[i] for rank in range(ranks) for i in self.owned_by(rank, used) if self._size(i, me))
        # Every rank computes the sizes from shapes and owners, so none are sent.
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
        """Yields (index, this rank's piece, perhaps empty) of the `used` parameters' unsharded tensors. Collective.

        wholes  index -> unsharded tensor, of the parameters that this rank owns
        """
        ranks, me = self.axis.size, self.axis.index
        mine = self.owned_by(me, used)
        sent = (self.take(i, wholes[i].detach(), rank) for rank in range(ranks) for i in mine)
        # every rank computes the sizes from shapes and owners, so none are sent
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
        """Returns, flat, what all ranks send to this one, by one all-to-all. Collective.

        sent  this rank's pieces for others, in order of the receiving ranks
        sent_sizes, received_sizes  real numbers to and from each rank;  tag  of the collective in the ledger
        """
        outgoing, at = torch.empty(sum(sent_sizes), dtype=self.kinds[0].to_real(), device=self.home), 0
        for piece in sent:  # one at a time, since flattening a strided piece makes a temporary copy
            numbers = as_numbers(piece)
            outgoing[at : at + len(numbers)] = numbers
            at += len(numbers)
        received = outgoing.new_empty(sum(received_sizes))
        all_to_all(received, outgoing, received_sizes, sent_sizes, self.axis, tag)
        return received


class OwnedMasters:
    """The unsharded masters of the parameters that this rank owns, and the exchanges with all ranks' pieces.

    masters         index of a parameter -> unsharded master, on its owner only
    owner_of        for each parameter, the owner's rank on the shard axis (0 without one)
    share_owner_of  index of a parameter that tp shards -> its owner's rank on tp
    """

    def __init__(
        self, technique: PieceSlots, names: list[str], shapes: list[torch.Size], shard: Axis | None,
        tensor: TensorParallel | None = None,
    ) -> None:  # fmt: skip
        """Gathers the technique's present masters, and keeps those that this rank owns. Collective.

        names   of the technique's parameters;  shapes  unsharded, of each
        shard   axis of the ranks that hold pieces of masters; None if masters are not sharded by ZeRO
        tensor  the cuts of tp; None without tp
        """
        self.technique, self._tensor, self._names = technique, tensor, names
        self.axis = shard
        index_of = {name: index for index, name in enumerate(names)}
        self._slot = {index_of[slot.name]: slot for slot in technique.slots}
        # all masters here lie on the host if some shards do (offload), since one exchange needs one device
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
        self._own: set[int] = set()  # indices whose master is the technique's own, since it is unsharded there
        for index, whole in enumerate(wholes):
            kinds.append(whole.dtype)
            if shard is None and index not in self._cut:
                # each rank has this master unsharded; a copy would cost memory, and drift from the weight
                self.masters[index] = self._slot[index].master
                self._own.add(index)
            # all ranks take part in the gather; the owner keeps the result
            elif self._owns(index):
                self.masters[index] = nn.Parameter(whole.detach().to(self._home, copy=True))
        self._over_shards = self._shards(shard, shapes, kinds) if shard is not None else None
        self._over_shares = self._shares(shapes, kinds) if tensor is not None else None

    def _owns(self, index: int) -> bool:
        """Whether this rank owns the parameter, over dp_shard and, if tp shards it, over tp."""
        mine = self.axis is None or self.owner_of[index] == self.axis.index
        return mine and (self._tensor is None or self.share_owner_of.get(index) in (None, self._tensor.axis.index))

    def _share_shape(self, index: int, whole: torch.Size) -> torch.Size:
        """Returns the shape of this rank's tp share of a parameter of shape `whole`."""
        if self._tensor is None or index not in self._cut:
            return whole
        return self._tensor.share(self._names[index], torch.empty(whole, device="meta")).shape

    def _shards(self, shard: Axis, shapes: list[torch.Size], kinds: list[torch.dtype]) -> _Exchange:
        """Returns the exchange over dp_shard, between ZeRO's pieces and tensors that ZeRO does not shard."""

        def put(index: int, whole: torch.Tensor, rank: int, piece: torch.Tensor) -> None:
            self.technique.select(index, whole, rank).copy_(piece)  # a view: what is copied into it stands in `whole`

        shares = {index: self._share_shape(index, shape) for index, shape in enumerate(shapes)}
        owner_of = dict(enumerate(self.owner_of))
        return _Exchange(shard, owner_of, shares, kinds, self.technique.select, put, self._home)

    def _shares(self, shapes: list[torch.Size], kinds: list[torch.dtype]) -> _Exchange:
        """Returns the exchange over tp, between shares and unsharded tensors, of parameters this dp_shard rank owns."""
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
        """Returns the gathering of the unsharded master of a parameter, over dp_shard and tp."""
        share = yield from self.technique.full_parameter(index)
        return share if self._tensor is None else (yield from self._tensor.whole(self._names[index], share))

    @torch.no_grad()
    def collect_gradients(self, used: set[int]) -> None:
        """Sets `.grad` of the owned masters to unsharded gradients, collected from all ranks. Collective.

        used  indices of the parameters that any rank reached; others get None
        """
        pieces = {i: slot.master.grad for i, slot in self._slot.items() if i in used and slot.master.grad is not None}
        # over dp_shard first, which gives a tp share, then over tp
        wholes = pieces if self._over_shards is None else self._over_shards.collect(pieces, used)
        if self._over_shares is not None:
            wholes = wholes | self._over_shares.collect(wholes, used)
        for i, master in self.masters.items():
            if i not in self._own:
                master.grad = wholes.get(i)  # None if no rank used it, so that the optimizer skips it

    @torch.no_grad()
    def hand_out(self, used: set[int]) -> None:
        """Sends the pieces of the owners' masters, of `used` parameters, to the ranks that hold them. Collective."""
        wholes: dict[int, torch.Tensor] = {i: master for i, master in self.masters.items() if i not in self._own}
        if self._over_shares is not None:
            wholes |= self._over_shares.hand_out(wholes, used)
        pieces = wholes.items() if self._over_shards is None else self._over_shards.hand_out(wholes, used)
        for i, piece in pieces:
            if i in used and i in self._slot:  # this rank may have no slot for an empty piece
                self._slot[i].master.copy_(piece)
        for i, master in self.masters.items():
            if i not in self._own:
                master.grad = None  # else unsharded gradients would be held until the next step

    @torch.no_grad()
    def take_weights(self) -> None:
        """Updates the owners' masters from weights that code has written. Collective if weights are sharded."""
        for index, weight in enumerate(self.technique.params):
            whole = weight.detach()
            if isinstance(weight, DTensor):  # on all ranks, though one owns it, since the gather is collective
                whole = gathered_alone(self.technique.full_parameter(index))
            if self._tensor is not None:
                whole = gathered_alone(self._tensor.whole(self._names[index], whole))
            if index in self.masters and index not in self._own:
                follow(self.masters[index], whole)

    def route(self, index: int) -> list[tuple[Axis, int]]:
        """Returns the broadcasts, as (axis, index of the sender), that take a tensor from the owner of `index` to all.

        They must be done in order; the second one overwrites what ranks without the tensor sent in the first.
        """
        # over tp first, in all groups, though only the owner's group has the tensor
        of_shares = [(self._tensor.axis, self.share_owner_of[index])] if self._tensor and index in self._cut else []
        return of_shares + ([(self.axis, self.owner_of[index])] if self.axis is not None else [])
