"""Plan a ring: who sends whose keys to whom (`Call`), which queries meet which keys, what a mask says of them.

A block of keys is split along the runs of indices that its rank owns, and so are queries. A pair of runs is empty by
the mask (nothing is computed or sent), full, on the causal diagonal, or masked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from shardwise.comm import Axis
from shardwise.host import can_read, read, to_device
from shardwise.parallel.sequence.pair_mask import At, PairMask, Range, indices_at, kinds_by_pair, look_at
from shardwise.part import Owners, Part, Sum, Uncut
from shardwise.part.gathering import gather
from shardwise.part.levels import Distributed
from shardwise.part.moves import share_of
from shardwise.part.sums import plain

MOST_PAIRS = 256  # of runs, of all ranks together, whose masks are looked at one by one
LEAST_TILE = 512  # positions of a run whose mask is made and looked at by itself, where it is a function of indices
MOST_RUNS = 64  # tiles of a sequence; a few more where runs do not divide
MOST_TILES = 4 * MOST_RUNS**2  # pairs of tiles that are looked at


@dataclass(frozen=True)
class Call:
    """One attention around a ring, as all its ranks know it: who reads which keys, in which order they pass."""

    axis: Axis  # the ring
    queries: Owners  # who owns which position of them
    keys: Owners | None  # None: whole on every rank
    key_count: int  # positions of keys, over all ranks
    is_causal: bool
    scale: float
    shapes: tuple[tuple[int, ...], ...]  # of this rank's keys and values
    masked: bool = False  # a mask is given; `kinds` has what it says, where that is known
    kinds: Mapping[tuple[Range, Range], str] | None = None  # of pairs of runs, as the mask says
    tile: int = 0  # positions of a run that are taken at a time; 0: all

    @cached_property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """Returns, of each rank, the other ranks that read any of its keys, in the order in which these pass them."""
        ranks = range(self.axis.size)
        others = [[(source + hop) % len(ranks) for hop in ranks[1:]] for source in ranks]
        return tuple(tuple(r for r in others[source] if reads_any(self, r, source)) for source in ranks)

    def before(self, source: int) -> int | None:
        """Returns the rank from which this one gets the keys of `source`; None where it needs none of them."""
        way = (source, *self.ways[source])
        return way[way.index(self.axis.index) - 1] if self.axis.index in way[1:] else None

    def after(self, source: int) -> int | None:
        """Returns the rank to which this one sends on the keys of `source`; None where it is the last to read them."""
        way = (source, *self.ways[source])
        place = way.index(self.axis.index) + 1
        return way[place] if place < len(way) else None


def _ranges(owners: Owners | None, rank: int, size: int, tile: int) -> list[tuple[Range, Range]]:
    """Returns (global range, range among the rank's own) of each run of indices that a rank owns, or of its tiles."""
    ranges, place, start = [], 0, 0
    stops, who = ([size], [rank]) if owners is None else (owners.stops.tolist(), owners.who.tolist())
    for stop, owner in zip(stops, who, strict=True):
        for first, last in _tiles(start, stop, tile) if owner == rank else ():
            ranges.append(((first, last), (place, place + last - first)))
            place += last - first
        start = stop
    return ranges


def _tiles(start: int, stop: int, tile: int) -> Iterator[Range]:
    """Yields a run in pieces of `tile` positions; as it is where `tile` is 0."""
    for first in range(start, stop, tile or max(stop - start, 1)):
        yield first, min(stop, first + tile) if tile else stop


def pairs(call: Call, source: int, rank: int | None = None) -> Iterator[tuple[At, At, Range, Range, str]]:
    """Yields (queries, keys, range among the rank's queries, range in the block, kind) of runs that meet.

    kind  "full", "diagonal" (causal, of one run), "causal" (across the diagonal), "masked" or "masked causal"
    """
    rank = call.axis.index if rank is None else rank
    queries = _ranges(call.queries, rank, call.queries.size, call.tile)
    keys = _ranges(call.keys, source, call.key_count, call.tile)
    # dealt in stripes, runs are single positions: all are one masked pair, in the place of a kernel's call for each
    if len(queries) * len(keys) > MOST_PAIRS and call.kinds is None:
        yield from _at_once(call, source, rank)
        return
    for q, q_here in queries:
        for k, k_here in keys:
            kind = _kind(call, q, k)
            if kind != "empty":
                yield q, k, q_here, k_here, kind


def _kind(call: Call, q: Range, k: Range) -> str:
    """Returns the kind of a pair of runs of queries and keys: those of `pairs`, or "empty" where nothing is read."""
    if call.kinds is not None:
        return call.kinds[q, k]
    if not call.is_causal or k[1] - 1 <= q[0]:  # no key lies behind any query
        return "masked" if call.masked else "full"
    if k == q:  # causal from its first row on, as kernels know it
        return "masked causal" if call.masked else "diagonal"
    return "causal" if k[0] <= q[1] - 1 else "empty"


def _at_once(call: Call, source: int, rank: int) -> Iterator[tuple[At, At, Range, Range, str]]:
    """Yields all runs of two ranks as one pair, masked index by index; nothing where no query reads a key."""
    q = call.queries.indices(rank)
    k = np.arange(call.key_count) if call.keys is None else call.keys.indices(source)
    # the last query reads no key that lies behind it, so of a causal pair nothing may be left
    if len(q) and len(k) and not (call.is_causal and k[0] > q[-1]):
        yield q, k, (0, len(q)), (0, len(k)), "causal" if call.is_causal else "masked" if call.masked else "full"


def reads_any(call: Call, rank: int, source: int) -> bool:
    """Returns whether the queries of `rank` may read any of the keys of `source`."""
    return next(pairs(call, source, rank), None) is not None


class _Looked:
    """Caches the kind of each block of the last mask (empty, full, masked): all layers are given the same."""

    key: tuple | None = None  # of the call that was asked last
    mask: weakref.ref | None = None
    kinds: Mapping[tuple[Range, Range], str] | None = None


def kinds_of(
    given_mask: torch.Tensor | None, mask: torch.Tensor | None, queries: Owners, keys: Owners | None, key_count: int,
    is_causal: bool,
) -> Mapping[tuple[Range, Range], str] | None:  # fmt: skip
    """Returns the kind of each pair of runs under the mask (b, h, S, T); None where the mask is not looked at.

    given_mask  the one that attention was called with, of which `mask` is this rank's heads

    The mask is the same on all ranks of the ring, and so is the answer.
    """
    if isinstance(mask, PairMask):
        tile = tile_of(queries.size, key_count)
        rows, columns = (list(_runs_of(owners, n, tile)) for owners, n in ((queries, queries.size), (keys, key_count)))
        if len(rows) * len(columns) > MOST_TILES:  # dealt in many short runs: all are taken as masked
            return None
        return mask.kinds(tuple((q, k) for q in rows for k in columns))
    runs, others = list(_runs_of(queries, queries.size)), list(_runs_of(keys, key_count))
    many = len(runs) * len(others) > MOST_PAIRS
    # beside `is_causal` indices decide, as `_kind` has it; what has no values here, or changes by steps, is not read
    if mask is None or given_mask is None or is_causal or many or not can_read(mask):
        return None
    key = (given_mask._version, queries, keys, mask.shape, mask.dtype)
    if given_mask.is_leaf and given_mask.requires_grad:  # trained, and changed in ways that a version may not show
        return _look(mask, runs, others)
    # the same object, not written into since: the next layer of the same step
    if _Looked.key != key or _Looked.mask is None or _Looked.mask() is not given_mask:
        _Looked.key, _Looked.mask = key, weakref.ref(given_mask)
        _Looked.kinds = _look(mask, runs, others)
    return _Looked.kinds


def _look(mask: torch.Tensor, runs: list[Range], others: list[Range]) -> Mapping[tuple[Range, Range], str]:
    """Returns the kind of each pair of runs, by one read of the device for all of them."""
    holds = mask.dtype is torch.bool
    allowed = mask if holds else mask != -torch.inf
    looks = []
    pairs = [(q, k) for q in runs for k in others]
    for q, k in pairs:
        block = _block(allowed, q, k)
        # an added mask is never "full": its numbers count even where it forbids nothing
        alike = holds and q == k and block.shape[-2:] == (q[1] - q[0],) * 2
        looks.append(look_at(block, alike, full=holds))
    return kinds_by_pair(pairs, read(torch.stack(looks), "which blocks a mask leaves"))


def tile_of(queries: int, keys: int) -> int:
    """Returns how many positions of a run are taken at a time, where a mask is made as it is read."""
    return max(LEAST_TILE, -(-max(queries, keys) // MOST_RUNS))


def _runs_of(owners: Owners | None, size: int, tile: int = 0) -> Iterator[Range]:
    start = 0
    for stop in owners.stops.tolist() if owners is not None else [size] * bool(size):
        yield from _tiles(start, stop, tile)
        start = stop


def _block(mask: torch.Tensor, q: At, k: At) -> Any:
    """Returns the rows `q` and columns `k` of a mask (.., S or 1, T or 1)."""
    if isinstance(mask, PairMask):
        return mask.block(q, k)
    return _along(_along(mask, -2, q), -1, k)


def _along(mask: torch.Tensor, dim: int, at: At) -> torch.Tensor:
    """Returns the part of a mask at these indices along a dim; itself where it is broadcast there."""
    if mask.shape[dim] == 1:
        return mask
    if isinstance(at, tuple):
        return mask.narrow(dim, at[0], at[1] - at[0])
    return mask.index_select(dim, to_device(at, mask.device))


def bias_of(call: Call, mask: torch.Tensor | None, q: At, k: At, kind: str, device: torch.device) -> Any:
    """Returns the mask of one pair of runs, with causality in it where the pair lies across the diagonal; or None."""
    if kind in ("full", "diagonal"):  # all may be read, or the kernel masks the diagonal by itself
        return None
    part = None if mask is None else _block(mask, q, k)
    if kind == "masked":
        return part
    # "causal", or "masked causal": indices are compared, and a mask is added
    allowed = indices_at(q, device).unsqueeze(1) >= indices_at(k, device)
    if part is None:
        return allowed
    # a mask of bools says what may be read, one of numbers is added to scores
    return part & allowed if part.dtype is torch.bool else torch.where(allowed, part, -torch.inf)


def add_to_mask(dmask: torch.Tensor, ds: torch.Tensor, rows: At, columns: At) -> None:
    """Adds the gradient of a block's scores to that of the mask's rows and columns that it read."""
    shape = [ds.shape[dim] if dmask.shape[dim] != 1 else 1 for dim in range(ds.dim())]
    gradient = ds.sum_to_size(shape)  # of a mask that is broadcast along a dim, all that read it
    if isinstance(rows, tuple) and isinstance(columns, tuple):
        _block(dmask, rows, columns).add_(gradient)
        return
    at = [indices_at(indices, dmask.device) if dmask.shape[dim] != 1 else torch.zeros(1, dtype=torch.int64)
          for dim, indices in ((-2, rows), (-1, columns))]  # fmt: skip
    dmask[..., at[0].unsqueeze(1), at[1]] += gradient


SAMPLES, HEADS, POSITIONS = 0, 1, 2  # of queries, keys and values (B, H, S, D)


@dataclass(frozen=True)
class Layers:
    """A tensor's cuts over `axis` (or none) and over at most one axis further in; and its payload, plain."""

    part: Part | None  # over the ring's axis
    inner: Part | None  # over an axis further in
    axis: Axis
    payload: torch.Tensor

    def shell(self) -> Layers:
        """Returns a copy that describes the cuts, without the tensor's memory."""
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
    """Returns a tensor's `Layers`: its cut over `axis`, which must be outermost, one further in, and the payload.

    Raises `Uncut` for cuts that a ring has no rule for.
    """
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
        """Returns the mask (b, h, S, T) of this rank's heads or samples; raises `Uncut` for a cut one.

        mask   None and a `PairMask` are returned as they are
        """
        if mask is None or isinstance(mask, PairMask):
            return mask
        if isinstance(mask, Distributed):
            raise Uncut("ring attention with a mask that is cut over an axis")
        mask = mask.detach()
        mask = mask.view(*([1] * (4 - mask.dim())), *mask.shape)
        inner = self.inner
        if inner is None or mask.shape[inner.dim_cut] == 1:  # one for all heads or samples
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
    # samples are cut on some and not on others: a block would meet another sample's
    if first is not None and any(cut is None or not cut.beside(first) for cut in cuts):
        raise Uncut(f"ring attention of queries and keys whose samples {first.axis.name} cuts differently")


def key_heads_read(q: Layers, k: Layers) -> torch.Tensor | None:
    """Returns (H,) the local key head of each local query head; None where equal runs of query heads share one.

    Raises `Uncut`, on all ranks alike, where some rank lacks a key head that its queries read.
    """
    # heads are not cut, or over another axis: queries and keys lie together
    if q.inner is None or q.inner.dim_cut != HEADS:
        return None
    queries_per_key = q.inner.shape[HEADS] // (k.inner.shape[HEADS] if k.inner is not None else k.payload.shape[HEADS])
    places = [_places(q.inner.owners, k.inner, queries_per_key, rank) for rank in range(q.inner.owners.ranks)]
    # one rank's key heads would be read by another's queries
    if any(place is None for place in places):  # of any rank: all refuse alike
        raise Uncut("attention of queries and keys whose heads are cut differently")
    mine = places[q.inner.axis.index]
    assert mine is not None
    count = k.payload.shape[HEADS]
    # equal runs: torch's own grouping of query heads finds them
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
