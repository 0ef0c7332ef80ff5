"""Plan a ring: which rank sends whose keys to whom, which queries read which keys, and how a mask affects each pair.

Keys and queries of a rank are split into the runs of consecutive positions that it owns. A pair of runs is empty by
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

MOST_PAIRS = 256  # pairs of runs, of all ranks together, up to which each pair's mask is examined
LEAST_TILE = 512  # least positions of a tile, for which a mask given as a function is evaluated and examined
MOST_RUNS = 64  # tiles of a sequence, and a few more if runs are not multiples of a tile
MOST_TILES = 4 * MOST_RUNS**2  # pairs of tiles up to which each pair is examined


@dataclass(frozen=True)
class Call:
    """One attention around a ring, as all its ranks know it, without tensors.

    axis           the ring
    queries, keys  which rank owns which position; keys: None if every rank has all
    key_count      number of positions of keys, over all ranks
    is_causal      whether query i reads keys up to i;  scale  of the scores
    shapes         of this rank's keys and values
    masked         whether a mask is given
    kinds          (run of queries, run of keys) -> its kind under the mask, as of `kinds_of`; None: not examined
    tile           positions of a run that are computed at a time; 0: all
    """

    axis: Axis
    queries: Owners
    keys: Owners | None
    key_count: int
    is_causal: bool
    scale: float
    shapes: tuple[tuple[int, ...], ...]
    masked: bool = False
    kinds: Mapping[tuple[Range, Range], str] | None = None
    tile: int = 0

    @cached_property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """Returns, for each rank, the other ranks that read any of its keys, in the order in which these reach them."""
        ranks = range(self.axis.size)
        others = [[(source + hop) % len(ranks) for hop in ranks[1:]] for source in ranks]
        return tuple(tuple(r for r in others[source] if reads_any(self, r, source)) for source in ranks)

    def before(self, source: int) -> int | None:
        """Returns the rank that sends the keys of `source` to this one; None if it reads none of them or owns them."""
        way = (source, *self.ways[source])
        return way[way.index(self.axis.index) - 1] if self.axis.index in way[1:] else None

    def after(self, source: int) -> int | None:
        """Returns the rank to which this one sends the keys of `source`; None if it is the last that reads them."""
        way = (source, *self.ways[source])
        place = way.index(self.axis.index) + 1
        return way[place] if place < len(way) else None


def _ranges(owners: Owners | None, rank: int, size: int, tile: int) -> list[tuple[Range, Range]]:
    """Returns (global range, range among the rank's own positions) of each run that a rank owns, or of its tiles.

    owners  of `size` positions; None: `rank` has all;  tile  as of `Call`
    """
    ranges, place, start = [], 0, 0
    stops, who = ([size], [rank]) if owners is None else (owners.stops.tolist(), owners.who.tolist())
    for stop, owner in zip(stops, who, strict=True):
        for first, last in _tiles(start, stop, tile) if owner == rank else ():
            ranges.append(((first, last), (place, place + last - first)))
            place += last - first
        start = stop
    return ranges


def _tiles(start: int, stop: int, tile: int) -> Iterator[Range]:
    """Yields the run [start, stop) in pieces of `tile` positions; in one piece if `tile` is 0."""
    for first in range(start, stop, tile or max(stop - start, 1)):
        yield first, min(stop, first + tile) if tile else stop


def pairs(call: Call, source: int, rank: int | None = None) -> Iterator[tuple[At, At, Range, Range, str]]:
    """Yields (queries, keys, range among the rank's queries, range in the block, kind) of pairs that are not empty.

    source   rank whose keys are read;  rank  whose queries read them; None: this one
    Queries and keys are global positions. kind: "full", "diagonal" (causal, of one run), "causal" (across the
    diagonal), "masked" or "masked causal".
    """
    rank = call.axis.index if rank is None else rank
    queries = _ranges(call.queries, rank, call.queries.size, call.tile)
    keys = _ranges(call.keys, source, call.key_count, call.tile)
    # with stripes runs are single positions, and one masked pair is cheaper than a kernel call for each
    if len(queries) * len(keys) > MOST_PAIRS and call.kinds is None:
        yield from _at_once(call, source, rank)
        return
    for q, q_here in queries:
        for k, k_here in keys:
            kind = _kind(call, q, k)
            if kind != "empty":
                yield q, k, q_here, k_here, kind


def _kind(call: Call, q: Range, k: Range) -> str:
    """Returns the kind of a pair of runs of queries and keys, as of `pairs`, or "empty" if no key may be read."""
    if call.kinds is not None:
        return call.kinds[q, k]
    if not call.is_causal or k[1] - 1 <= q[0]:  # no key is later than any query
        return "masked" if call.masked else "full"
    if k == q:  # the causal form that kernels have
        return "masked causal" if call.masked else "diagonal"
    return "causal" if k[0] <= q[1] - 1 else "empty"


def _at_once(call: Call, source: int, rank: int) -> Iterator[tuple[At, At, Range, Range, str]]:
    """Yields all runs of two ranks as one pair, masked index by index; nothing if no query reads a key."""
    q = call.queries.indices(rank)
    k = np.arange(call.key_count) if call.keys is None else call.keys.indices(source)
    # a causal pair is empty if even the last query is before the first key
    if len(q) and len(k) and not (call.is_causal and k[0] > q[-1]):
        yield q, k, (0, len(q)), (0, len(k)), "causal" if call.is_causal else "masked" if call.masked else "full"


def reads_any(call: Call, rank: int, source: int) -> bool:
    """Whether the queries of `rank` may read any of the keys of `source`."""
    return next(pairs(call, source, rank), None) is not None


class _Looked:
    """Cache of the kinds under the last mask, since most models give one mask to all layers."""

    key: tuple | None = None  # (version of the mask, queries, keys, its shape, its dtype)
    mask: weakref.ref | None = None
    kinds: Mapping[tuple[Range, Range], str] | None = None


def kinds_of(
    given_mask: torch.Tensor | None, mask: torch.Tensor | None, queries: Owners, keys: Owners | None, key_count: int,
    is_causal: bool,
) -> Mapping[tuple[Range, Range], str] | None:  # fmt: skip
    """Returns (run of queries, run of keys) -> kind under the mask; None if the mask is not examined.

    given_mask  the mask that attention was called with;  mask  (b, h, S, T) this rank's heads of it
    A kind is "empty", "full", "diagonal" or "masked". The mask is the same on all ranks of the ring, and so the result.
    """
    if isinstance(mask, PairMask):
        tile = tile_of(queries.size, key_count)
        rows, columns = (list(_runs_of(owners, n, tile)) for owners, n in ((queries, queries.size), (keys, key_count)))
        if len(rows) * len(columns) > MOST_TILES:  # many short runs, which are all treated as masked
            return None
        return mask.kinds(tuple((q, k) for q in rows for k in columns))
    runs, others = list(_runs_of(queries, queries.size)), list(_runs_of(keys, key_count))
    many = len(runs) * len(others) > MOST_PAIRS
    # under `is_causal` positions decide (`_kind`)
    if mask is None or given_mask is None or is_causal or many or not can_read(mask):
        return None
    key = (given_mask._version, queries, keys, mask.shape, mask.dtype)
    if given_mask.is_leaf and given_mask.requires_grad:  # an optimizer may change it without a new version
        return _look(mask, runs, others)
    # the cache holds for the same object with the same version, as in the next layer
    if _Looked.key != key or _Looked.mask is None or _Looked.mask() is not given_mask:
        _Looked.key, _Looked.mask = key, weakref.ref(given_mask)
        _Looked.kinds = _look(mask, runs, others)
    return _Looked.kinds


def _look(mask: torch.Tensor, runs: list[Range], others: list[Range]) -> Mapping[tuple[Range, Range], str]:
    """Returns (run, other run) -> kind, with one read from the device for all pairs."""
    holds = mask.dtype is torch.bool
    allowed = mask if holds else mask != -torch.inf
    looks = []
    pairs = [(q, k) for q in runs for k in others]
    for q, k in pairs:
        block = _block(allowed, q, k)
        # a mask of added values is never "full" or "diagonal", since its values count
        alike = holds and q == k and block.shape[-2:] == (q[1] - q[0],) * 2
        looks.append(look_at(block, alike, full=holds))
    return kinds_by_pair(pairs, read(torch.stack(looks), "which blocks a mask leaves"))


def tile_of(queries: int, keys: int) -> int:
    """Returns the positions of a tile for a mask given as a function, for these numbers of queries and keys."""
    return max(LEAST_TILE, -(-max(queries, keys) // MOST_RUNS))


def _runs_of(owners: Owners | None, size: int, tile: int = 0) -> Iterator[Range]:
    """Yields the runs (start, stop) of all ranks, in tiles as of `_tiles`; one run of `size` if `owners` is None."""
    start = 0
    for stop in owners.stops.tolist() if owners is not None else [size] * bool(size):
        yield from _tiles(start, stop, tile)
        start = stop


def _block(mask: torch.Tensor, q: At, k: At) -> Any:
    """Returns the rows `q` and columns `k` of a mask (..., S or 1, T or 1), for a `PairMask` as a `MaskBlock`."""
    if isinstance(mask, PairMask):
        return mask.block(q, k)
    return _along(_along(mask, -2, q), -1, k)


def _along(mask: torch.Tensor, dim: int, at: At) -> torch.Tensor:
    """Returns the entries of a mask at indices `at` along a dim; the mask itself if that has size 1."""
    if mask.shape[dim] == 1:
        return mask
    if isinstance(at, tuple):
        return mask.narrow(dim, at[0], at[1] - at[0])
    return mask.index_select(dim, to_device(at, mask.device))


def bias_of(call: Call, mask: torch.Tensor | None, q: At, k: At, kind: str, device: torch.device) -> Any:
    """Returns the mask or bias of one pair of runs, causality included if `kind` is causal; None if it needs none."""
    if kind in ("full", "diagonal"):  # kernels handle the diagonal themselves
        return None
    part = None if mask is None else _block(mask, q, k)
    if kind == "masked":
        return part
    allowed = indices_at(q, device).unsqueeze(1) >= indices_at(k, device)
    if part is None:
        return allowed
    return part & allowed if part.dtype is torch.bool else torch.where(allowed, part, -torch.inf)


def add_to_mask(dmask: torch.Tensor, ds: torch.Tensor, rows: At, columns: At) -> None:
    """Adds the gradient `ds` (B, H, s, t) of a block's scores to `dmask`, at the rows and columns that it read."""
    shape = [ds.shape[dim] if dmask.shape[dim] != 1 else 1 for dim in range(ds.dim())]
    gradient = ds.sum_to_size(shape)  # summed along dims in which the mask is broadcast
    if isinstance(rows, tuple) and isinstance(columns, tuple):
        _block(dmask, rows, columns).add_(gradient)
        return
    at = [indices_at(indices, dmask.device) if dmask.shape[dim] != 1 else torch.zeros(1, dtype=torch.int64)
          for dim, indices in ((-2, rows), (-1, columns))]  # fmt: skip
    dmask[..., at[0].unsqueeze(1), at[1]] += gradient


SAMPLES, HEADS, POSITIONS = 0, 1, 2  # of queries, keys and values (B, H, S, D)


@dataclass(frozen=True)
class Layers:
    """A tensor taken apart into its cuts and its plain data.

    part     its cut over the ring's `axis`; None if that does not cut it
    inner    its cut over one axis further in; None if there is none
    payload  this rank's plain share
    """

    part: Part | None
    inner: Part | None
    axis: Axis
    payload: torch.Tensor

    def shell(self) -> Layers:
        """Returns a copy that describes the cuts, without the tensor's memory."""
        part, inner = (None if level is None else level.shell() for level in (self.part, self.inner))
        return Layers(part, inner, self.axis, self.payload.new_empty(()).expand(self.payload.shape))

    def like(self, payload: torch.Tensor) -> torch.Tensor:
        """Returns another plain share as a tensor that is cut as this one is."""
        local = payload if self.inner is None else self.inner.with_local(payload)
        return local if self.part is None else self.part.with_local(local)

    def gradient(self, payload: torch.Tensor, queries: Layers) -> torch.Tensor:
        """Returns this rank's gradient `payload` of keys or values as a tensor cut as they are.

        A `Sum` over axes that do not cut them, of which each rank has the summand of its own `queries`.
        """
        local = payload
        if self.inner is not None:
            local = self.inner.with_local(payload)
        elif queries.inner is not None:
            local = Sum(payload, queries.inner.axis, spread=False)
        if self.part is None:
            return Sum(local, self.axis) if self.axis.size > 1 else local
        return self.part.with_local(local)

    def share(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns this rank's plain share of a gradient, as this tensor is cut. Collective if it is cut otherwise."""
        local = gradient
        if self.part is not None:
            local = share_of(gradient, POSITIONS, self.part.owners, self.axis)
        if self.inner is not None:
            local = share_of(local, self.inner.dim_cut, self.inner.owners, self.inner.axis)
        elif isinstance(local, Distributed):
            local = plain(local)
        return local.contiguous()


def from_axis(tensor: torch.Tensor, axis: Axis) -> Layers:
    """Returns a tensor's `Layers`, of which the cut over `axis` must be the outermost.

    Raises `Uncut` for cuts for which a ring has no rule.
    """
    part = inner = None
    tensor = tensor.detach()  # called inside an autograd function, which needs no graph
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
        if inner.may_gather:
            tensor, inner = gather(inner), None
        elif inner.dim_cut not in (SAMPLES, HEADS) or isinstance(tensor, Distributed):
            raise Uncut(f"ring attention of tensors that are cut over {inner.axis.name} along dim {inner.dim_cut}")
    return Layers(part, inner, axis, tensor.contiguous())


@dataclass(frozen=True)
class HeadsHere:
    """Which heads or samples of the queries this rank has. `inner`: the cut over an axis further in, or None."""

    inner: Part | None

    @classmethod
    def of(cls, queries: Layers) -> HeadsHere:
        """Returns the heads or samples of these queries."""
        return cls(queries.inner)

    def mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the mask (b, h, S, T) of this rank's heads or samples; None and a `PairMask` unchanged.

        Raises `Uncut` for a mask that is cut.
        """
        if mask is None or isinstance(mask, PairMask):
            return mask
        if isinstance(mask, Distributed):
            raise Uncut("ring attention with a mask that is cut over an axis")
        mask = mask.detach()
        mask = mask.view(*([1] * (4 - mask.dim())), *mask.shape)
        inner = self.inner
        if inner is None or mask.shape[inner.dim_cut] == 1:  # broadcast over heads or samples
            return mask
        return inner.owners.take(mask, inner.dim_cut, inner.axis.index)

    def mask_gradient(self, local: torch.Tensor, shape: torch.Size, axis: Axis) -> torch.Tensor:
        """Returns the gradient of a learned bias as a `Sum` over the ring, to which each rank adds that of its rows.

        local   this rank's, (b, h, S, T);  shape  of the bias as attention was given it
        """
        inner = self.inner
        if inner is None:
            return Sum(local.view(shape), axis)
        if len(shape) + inner.dim_cut < 4 or shape[inner.dim_cut - 4] == 1:  # broadcast over heads or samples
            return Sum(Sum(local.view(shape), inner.axis, spread=False), axis)
        dim = inner.dim_cut - (4 - len(shape))  # without the leading dims of size 1 that `mask` has added
        return Sum(Part(local.view([*local.shape[4 - len(shape) :]]), dim, inner.owners, inner.axis), axis)


def refuse_other_samples(query: Layers, *others: Layers) -> None:
    """Raises `Uncut` if an axis further in cuts the samples of queries, keys and values, but not all alike."""
    # unlike heads (`key_heads_read`) samples are not looked up, so a sample's keys must be where its queries are
    inner = [layers.inner for layers in (query, *others)]
    cuts = [part if part is not None and part.dim_cut == SAMPLES else None for part in inner]
    first = next((cut for cut in cuts if cut is not None), None)
    if first is not None and any(cut is None or not cut.beside(first) for cut in cuts):
        raise Uncut(f"ring attention of queries and keys whose samples {first.axis.name} cuts differently")


def key_heads_read(q: Layers, k: Layers) -> torch.Tensor | None:
    """Returns (H,) the index of the local key head that each local query head reads.

    None if equal runs of consecutive query heads share one, as in torch's grouped queries. Raises `Uncut`, on all ranks
    alike, if some rank lacks a key head that its queries read.
    """
    if q.inner is None or q.inner.dim_cut != HEADS:
        return None
    queries_per_key = q.inner.shape[HEADS] // (k.inner.shape[HEADS] if k.inner is not None else k.payload.shape[HEADS])
    places = [_places(q.inner.owners, k.inner, queries_per_key, rank) for rank in range(q.inner.owners.ranks)]
    if any(place is None for place in places):  # of any rank, so that all raise
        raise Uncut("attention of queries and keys whose heads are cut differently")
    mine = places[q.inner.axis.index]
    assert mine is not None
    count = k.payload.shape[HEADS]
    if count and len(mine) % count == 0 and np.array_equal(mine, np.arange(len(mine)) // (len(mine) // count)):
        return None
    return torch.from_numpy(mine)


def _places(queries: Owners, keys: Part | None, queries_per_key: int, rank: int) -> np.ndarray | None:
    """Returns, for each query head of `rank`, the index of its key head among the rank's; None if one is missing there.

    Computed in numpy, since a rehearsal's tensors have no values.
    """
    read = queries.indices(rank) // queries_per_key
    if keys is None:
        return read
    keys_here = keys.owners.indices(rank)
    place = np.searchsorted(keys_here, read).clip(max=max(len(keys_here) - 1, 0))
    return place if len(keys_here) and np.array_equal(keys_here[place], read) else None
