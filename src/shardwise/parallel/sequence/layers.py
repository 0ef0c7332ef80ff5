"""Take apart queries, keys and values that a ring's axis and one axis further in cut, and put them together again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shardwise.comm import Axis
from shardwise.parallel.sequence.pair_mask import PairMask
from shardwise.part import Owners, Part, Sum, Uncut
from shardwise.part.gathering import gather
from shardwise.part.levels import Distributed
from shardwise.part.moves import share_of
from shardwise.part.sums import plain

SAMPLES, HEADS, POSITIONS = 0, 1, 2  # of queries, keys and values (B, H, S, D)


@dataclass(frozen=True)
class Layers:
    """A tensor as it is from `axis` on: cut over it (or not), and over at most one axis further in; its payload."""

    part: Part | None  # over the ring's axis
    inner: Part | None  # over an axis further in
    axis: Axis
    payload: torch.Tensor

    def shell(self) -> Layers:
        """Returns the same description of the cuts, without the tensor's memory."""
        part, inner = (None if level is None else level.shell() for level in (self.part, self.inner))
        return Layers(part, inner, self.axis, self.payload.new_empty(()).expand(self.payload.shape))

    def like(self, payload: torch.Tensor) -> torch.Tensor:
        """Returns another payload as a tensor that is distributed alike."""
        local = payload if self.inner is None else self.inner.with_local(payload)
        return local if self.part is None else self.part.with_local(local)

    def gradient(self, payload: torch.Tensor, queries: Layers) -> torch.Tensor:
        """Returns the gradient `payload` of keys or values, wrapped as they are cut; a `Sum` where they are whole."""
        local = payload
        if self.inner is not None:
            local = self.inner.with_local(payload)
        elif queries.inner is not None:  # each rank of tp has used the keys that all have, for its own queries
            local = Sum(payload, queries.inner.axis, spread=False)
        if self.part is None:
            return Sum(local, self.axis) if self.axis.size > 1 else local
        return self.part.with_local(local)

    def share(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of a gradient, cut as this tensor is. Collective where it comes cut otherwise."""
        local = gradient
        if self.part is not None:
            local = share_of(gradient, POSITIONS, self.part.owners, self.axis)
        if self.inner is not None:
            local = share_of(local, self.inner.dim_cut, self.inner.owners, self.inner.axis)
        elif isinstance(local, Distributed):  # where attention's output was whole
            local = plain(local)
        return local.contiguous()


def from_axis(tensor: torch.Tensor, axis: Axis) -> Layers:
    """Split a tensor into its cut over `axis`, which must be the outermost, one further in, and this rank's payload."""
    part = inner = None
    tensor = tensor.detach()  # the ring is an autograd function of its own, and records nothing inside
    if isinstance(tensor, Distributed):
        tensor = tensor.settled()
    if isinstance(tensor, Part) and tensor.axis is axis:
        part, tensor = tensor, tensor.local
        if part.dim_cut != POSITIONS:
            raise Uncut(f"ring attention over {axis.name} of tensors that it cuts along dim {part.dim_cut}")
    if isinstance(tensor, Distributed):
        tensor = tensor.settled()
    if isinstance(tensor, Part):
        inner, tensor = tensor, tensor.local
        if inner.may_gather:  # such a cut may be gathered where an operation has no rule for it
            tensor, inner = gather(inner), None
        elif inner.dim_cut not in (SAMPLES, HEADS) or isinstance(tensor, Distributed):
            raise Uncut(f"ring attention of tensors that are cut over {inner.axis.name} along dim {inner.dim_cut}")
    return Layers(part, inner, axis, tensor.contiguous())


@dataclass(frozen=True)
class HeadsHere:
    """The heads (or samples) of the queries that this rank has, where a further axis cuts them too."""

    inner: Part | None

    @classmethod
    def of(cls, queries: Layers) -> HeadsHere:
        return cls(queries.inner)

    def mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the mask (b, h, S, T) of this rank's heads or samples; a `PairMask` as it is, the same for all."""
        if mask is None or isinstance(mask, PairMask):
            return mask
        if isinstance(mask, Distributed):
            raise Uncut("ring attention with a mask that is cut over an axis")
        mask = mask.detach()
        mask = mask.view(*([1] * (4 - mask.dim())), *mask.shape)
        inner = self.inner
        if inner is None or mask.shape[inner.dim_cut] == 1:
            return mask
        return inner.owners.take(mask, inner.dim_cut, inner.axis.index)

    def mask_gradient(self, local: torch.Tensor, shape: torch.Size, axis: Axis) -> torch.Tensor:
        """Returns the gradient of a learned bias of this shape: a sum, to which each rank of the ring adds its rows."""
        inner = self.inner
        if inner is None:
            return Sum(local.view(shape), axis)
        if len(shape) + inner.dim_cut < 4 or shape[inner.dim_cut - 4] == 1:  # the same for all of them
            return Sum(Sum(local.view(shape), inner.axis, spread=False), axis)
        dim = inner.dim_cut - (4 - len(shape))  # `mask` has put dims of one in front, which the bias lacks
        return Sum(Part(local.view([*local.shape[4 - len(shape) :]]), dim, inner.owners, inner.axis), axis)


def refuse_other_samples(query: Layers, *others: Layers) -> None:
    """Raises `Uncut` where an axis further in cuts the samples of queries, keys and values, and not all alike."""
    # heads are looked up (`key_heads_read`); a sample's keys must lie where its queries do
    inner = [layers.inner for layers in (query, *others)]
    cuts = [part if part is not None and part.dim_cut == SAMPLES else None for part in inner]
    first = next((cut for cut in cuts if cut is not None), None)
    if first is not None and any(cut is None or not cut.beside(first) for cut in cuts):
        raise Uncut(f"ring attention of queries and keys whose samples {first.axis.name} cuts differently")


def key_heads_read(q: Layers, k: Layers) -> torch.Tensor | None:
    """Returns (H,) the local key head of each local query head; None where equal runs of query heads share one."""
    if q.inner is None or q.inner.dim_cut != HEADS:
        return None
    queries_per_key = q.inner.shape[HEADS] // (k.inner.shape[HEADS] if k.inner is not None else k.payload.shape[HEADS])
    places = [_places(q.inner.owners, k.inner, queries_per_key, rank) for rank in range(q.inner.owners.ranks)]
    if any(place is None for place in places):  # of any rank: all refuse alike
        raise Uncut("attention of queries and keys whose heads are cut differently")
    mine = places[q.inner.axis.index]
    assert mine is not None
    count = k.payload.shape[HEADS]
    if count and len(mine) % count == 0 and np.array_equal(mine, np.arange(len(mine)) // (len(mine) // count)):
        return None
    return torch.from_numpy(mine)


def _places(queries: Owners, keys: Part | None, queries_per_key: int, rank: int) -> np.ndarray | None:
    """Returns (H,): for each query head of `rank`, its key head's place among those of the rank; None: one is missing.

    In numpy: a tensor's values could not be read in a rehearsal, which has none.
    """
    read = queries.indices(rank) // queries_per_key
    if keys is None:
        return read
    keys_here = keys.owners.indices(rank)
    place = np.searchsorted(keys_here, read).clip(max=max(len(keys_here) - 1, 0))
    return place if len(keys_here) and np.array_equal(keys_here[place], read) else None
