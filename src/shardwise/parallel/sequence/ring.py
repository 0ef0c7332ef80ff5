"""Ring attention: keys and values of every rank pass by; each rank merges what its queries find in each block.

    step 0     rank r has keys r       q_r K_r     -> o, lse          meanwhile K_r goes on to r+1
    step 1     rank r has keys r-1     q_r K_{r-1} -> merged          ...
    backward   the blocks pass by again, and with them the sums of their gradients, which end at their owners

Merging, in float32 (float64 for float64), with lse the log of the sum of exponents of each row's scores:

    lse = log(exp(lse_a) + exp(lse_b))      o = o_a exp(lse_a - lse) + o_b exp(lse_b - lse)

A block is split along the runs of indices that its rank owns, so that any dealing of positions is right: a pair of
runs is empty by the mask (nothing is computed), full, on the causal diagonal, or masked. A block goes from one rank
that reads any of it to the next, past those that do not, and the sum of its gradients likewise, then to its owner.

Bytes received by a rank in a forward, where every rank reads of every block: 2 B S H_kv D (p-1)/p elements; in
backward the same again, and as much for the gradients of keys and values (p-1 hops), in the dtype that they are summed
in: float32, or float64 for float64. Of a block that h other ranks read, h in the place of p-1.
Source: Liu et al., "Ring Attention" (2023); Milakov and Gimelshein, "Online normalizer calculation" (2018).

What this does not do: dropout, which goes by heads instead.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm import Axis, Pending, receive, send
from shardwise.host import read, to_device
from shardwise.parallel.sequence.kernels import attended, finite, gradients, wide
from shardwise.part import Owners, Part, Sum, Uncut
from shardwise.part.levels import Distributed
from shardwise.part.tensor import gather, share_of

HEADS, POSITIONS = 1, 2
Range = tuple[int, int]
At = Range | np.ndarray  # global indices: a range, or each of them
MOST_PAIRS = 256  # of runs, of all ranks together, whose masks are looked at one by one


@dataclass(frozen=True)
class _Call:
    """What all ranks of a ring know of one attention."""

    axis: Axis
    queries: Owners
    keys: Owners | None  # None: whole on every rank
    key_count: int
    is_causal: bool
    scale: float
    shapes: tuple[tuple[int, ...], ...]  # of this rank's keys and values
    masked: bool = False
    kinds: Mapping[tuple[Range, Range], str] | None = None  # of pairs of runs, as the mask says

    @cached_property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the other ranks that read any of its keys, in the order in which these come to them."""
        ranks = range(self.axis.size)
        others = [[(source + hop) % len(ranks) for hop in ranks[1:]] for source in ranks]
        return tuple(tuple(r for r in others[source] if _reads_any(self, r, source)) for source in ranks)

    def before(self, source: int) -> int | None:
        """The rank from which this one gets a rank's keys; None where it needs none of them."""
        way = (source, *self.ways[source])
        return way[way.index(self.axis.index) - 1] if self.axis.index in way[1:] else None

    def after(self, source: int) -> int | None:
        """The rank to which this one sends them on."""
        way = (source, *self.ways[source])
        place = way.index(self.axis.index) + 1
        return way[place] if place < len(way) else None


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, axis: Axis, *,
    is_causal: bool, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of queries (B, H, S, D) whose positions are cut over `axis`; keys and values are cut too, or whole.

    mask  plain, broadcast to (B, H, S, T): True where a key may be read, or what is added to scores
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _Ring.apply(query, key, value, mask, axis, is_causal, factor)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, axis: Axis, is_causal: bool, scale: float):
        q, k, v = (_from_axis(t, axis) for t in (query, key, value))
        keys = k.part.owners if k.part is not None else None
        assert q.part is not None
        heads = _Inside.of(q)
        mask_here = heads.mask(mask)
        call = _Call(axis, q.part.owners, keys, key.shape[POSITIONS], is_causal, scale,
                     (tuple(k.payload.shape), tuple(v.payload.shape)), mask is not None,
                     _kinds(mask, mask_here, q.part.owners, keys, key.shape[POSITIONS], is_causal))  # fmt: skip
        output, lse = _forward(call, q.payload, k.payload, v.payload, mask_here, _reads(q, k))
        ctx.call, ctx.kinds, ctx.reads = call, (q, k, v), _reads(q, k)
        ctx.heads, ctx.mask_shape = heads, None if mask is None else mask.shape
        ctx.save_for_backward(q.payload, k.payload, v.payload, mask_here, output, lse)
        return q.like(output)

    @staticmethod
    def backward(ctx: Any, gradient: Any):
        q, k, v = ctx.kinds
        payload = q.share(gradient)
        query, key, value, mask, output, lse = ctx.saved_tensors
        wants = mask is not None and ctx.needs_input_grad[3]
        dq, dk, dv, dmask = _backward(ctx.call, payload, query, key, value, mask, output, lse, ctx.reads, wants)
        mask_gradient = ctx.heads.mask_gradient(dmask, ctx.mask_shape, ctx.call.axis) if dmask is not None else None
        return q.like(dq), k.gradient(dk, q), v.gradient(dv, q), mask_gradient, None, None, None


@dataclass(frozen=True)
class _Layers:
    """A tensor as it is from `axis` on: cut over it (or not), and over at most one axis further in; its payload."""

    part: Part | None  # over the ring's axis
    inner: Part | None  # over an axis further in
    axis: Axis
    payload: torch.Tensor

    def like(self, payload: torch.Tensor) -> torch.Tensor:
        """Another payload, distributed alike."""
        local = payload if self.inner is None else self.inner.with_local(payload)
        return local if self.part is None else self.part.with_local(local)

    def gradient(self, payload: torch.Tensor, queries: _Layers) -> torch.Tensor:
        """The gradient of keys or values: where they are whole and the queries cut, every rank has a summand."""
        local = payload
        if self.inner is not None:
            local = self.inner.with_local(payload)
        elif queries.inner is not None:
            local = Sum(payload, queries.inner.axis, spread=False)
        return Sum(local, self.axis) if self.part is None else self.part.with_local(local)

    def share(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's payload of a gradient, however it is dealt. Collective where it is dealt otherwise."""
        assert self.part is not None
        local = share_of(gradient, POSITIONS, self.part.owners, self.axis)
        if self.inner is not None:
            local = share_of(local, self.inner.dim_cut, self.inner.owners, self.inner.axis)
        elif isinstance(local, Distributed):
            raise Uncut(f"a gradient that is cut over {local.axis.name}, where attention's output was not")
        return local.contiguous()


def _from_axis(tensor: torch.Tensor, axis: Axis) -> _Layers:
    """Takes a tensor apart; the axis must be its outermost."""
    part = inner = None
    tensor = tensor.detach()
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
        if inner.soft:
            tensor, inner = gather(inner), None
        elif inner.dim_cut != HEADS or isinstance(tensor, Distributed):
            raise Uncut(f"ring attention of tensors that are cut over {inner.axis.name} along dim {inner.dim_cut}")
    return _Layers(part, inner, axis, tensor.contiguous())


@dataclass(frozen=True)
class _Inside:
    """Which of the queries' heads (or samples) this rank has, where an axis further in cuts them."""

    inner: Part | None

    @classmethod
    def of(cls, queries: _Layers) -> _Inside:
        return cls(queries.inner)

    def mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask (b, h, S, T) of this rank's heads."""
        if mask is None:
            return None
        if isinstance(mask, Distributed):
            raise Uncut("ring attention with a mask that is cut over an axis")
        mask = mask.detach()
        mask = mask.view(*([1] * (4 - mask.dim())), *mask.shape)
        inner = self.inner
        if inner is None or mask.shape[inner.dim_cut] == 1:
            return mask
        return inner.owners.take(mask, inner.dim_cut, inner.axis.index)

    def mask_gradient(self, local: torch.Tensor, shape: torch.Size, axis: Axis) -> torch.Tensor:
        """The gradient of a learned bias: each rank of the ring has that of its rows."""
        inner = self.inner
        if inner is None:
            return Sum(local.view(shape), axis)
        if local.shape[inner.dim_cut] == 1 and len(shape) + inner.dim_cut >= 4 and shape[inner.dim_cut - 4] == 1:
            return Sum(Sum(local.view(shape), inner.axis, spread=False), axis)
        dim = inner.dim_cut - (4 - len(shape))
        return Sum(Part(local.view([*local.shape[4 - len(shape) :]]), dim, inner.owners, inner.axis), axis)


def _reads(q: _Layers, k: _Layers) -> torch.Tensor | None:
    """The key head of each of this rank's queries, where that is not a fixed number of queries for each key."""
    if q.inner is None or q.inner.dim_cut != HEADS:
        return None
    each = q.inner.shape[HEADS] // (k.inner.shape[HEADS] if k.inner is not None else k.payload.shape[HEADS])
    places = [_places(q.inner.owners, k.inner, each, rank) for rank in range(q.inner.owners.ranks)]
    if any(place is None for place in places):  # of any rank: all refuse alike
        raise Uncut("attention of queries and keys whose heads are cut differently")
    mine = places[q.inner.axis.index]
    assert mine is not None
    count = k.payload.shape[HEADS]
    regular = count and len(mine) % count == 0
    if regular and bool((mine == torch.arange(len(mine)) // (len(mine) // count)).all()):
        return None
    return mine


def _places(queries: Owners, keys: Part | None, each: int, rank: int) -> torch.Tensor | None:
    """Where a rank of an axis further in finds the key head of each of its queries; None where it lacks one."""
    read = torch.from_numpy(queries.indices(rank)) // each
    if keys is None:
        return read
    held = torch.from_numpy(keys.owners.indices(rank))
    place = torch.searchsorted(held, read).clamp_(max=max(len(held) - 1, 0))
    return place if len(held) and bool((held[place] == read).all()) else None


def _ranges(owners: Owners | None, rank: int, size: int) -> list[tuple[Range, Range]]:
    """(global range, range among the rank's own) of each run of indices that a rank owns."""
    if owners is None:
        return [((0, size), (0, size))] if size else []
    found, place, start = [], 0, 0
    for stop, who in zip(owners.stops.tolist(), owners.who.tolist(), strict=True):
        if who == rank:
            found.append(((start, stop), (place, place + stop - start)))
            place += stop - start
        start = stop
    return found


def _pairs(call: _Call, source: int, rank: int | None = None) -> Iterator[tuple[At, At, Range, Range, str]]:
    """(queries, keys, their places here and in the block, kind) of runs of a rank and of `source` that meet.

    kind  "full" | "diagonal" (causal, of one run) | "causal" (across the diagonal) | "masked"
    """
    rank = call.axis.index if rank is None else rank
    queries = _ranges(call.queries, rank, call.queries.size)
    keys = _ranges(call.keys, source, call.key_count)
    if len(queries) * len(keys) > MOST_PAIRS and call.kinds is None:
        yield from _at_once(call, source, rank)
        return
    for q, q_here in queries:
        for k, k_here in keys:
            kind = _kind(call, q, k)
            if kind != "empty":
                yield q, k, q_here, k_here, kind


def _kind(call: _Call, q: Range, k: Range) -> str:
    if call.kinds is not None:
        return call.kinds[q, k]
    if not call.is_causal or k[1] - 1 <= q[0]:
        return "masked" if call.masked else "full"
    if k == q:
        return "masked causal" if call.masked else "diagonal"
    return "causal" if k[0] <= q[1] - 1 else "empty"


def _at_once(call: _Call, source: int, rank: int) -> Iterator[tuple[At, At, Range, Range, str]]:
    """All runs of two ranks as one pair, where there are many."""
    q = call.queries.indices(rank)
    k = np.arange(call.key_count) if call.keys is None else call.keys.indices(source)
    if len(q) and len(k) and not (call.is_causal and k[0] > q[-1]):
        yield q, k, (0, len(q)), (0, len(k)), "causal" if call.is_causal else "masked" if call.masked else "full"


def _reads_any(call: _Call, rank: int, source: int) -> bool:
    """Whether a rank's queries may read any of a rank's keys."""
    return next(_pairs(call, source, rank), None) is not None


class _Looked:
    """The last mask that was looked at, and what was seen: the layers of a model are given the same."""

    key: tuple | None = None
    mask: weakref.ref | None = None
    kinds: Mapping[tuple[Range, Range], str] | None = None


def _kinds(
    given: torch.Tensor | None, mask: torch.Tensor | None, queries: Owners, keys: Owners | None, key_count: int,
    is_causal: bool,
) -> Mapping[tuple[Range, Range], str] | None:  # fmt: skip
    """What the mask (b, h, S, T) says of each pair of runs of queries and keys; None where it is not looked at.

    The mask is the same on all ranks of the ring, and so is the answer.
    """
    runs, others = list(_runs_of(queries, queries.size)), list(_runs_of(keys, key_count))
    many = len(runs) * len(others) > MOST_PAIRS
    if mask is None or given is None or is_causal or many or isinstance(mask, FakeTensor) or mask.is_meta:
        return None
    key = (given._version, queries, keys, mask.shape, mask.dtype)
    if given.is_leaf and given.requires_grad:  # trained, and changed in ways that a version may not show
        return _look(mask, runs, others)
    if _Looked.key != key or _Looked.mask is None or _Looked.mask() is not given:
        _Looked.key, _Looked.mask = key, weakref.ref(given)
        _Looked.kinds = _look(mask, runs, others)
    return _Looked.kinds


def _look(mask: torch.Tensor, runs: list[Range], others: list[Range]) -> Mapping[tuple[Range, Range], str]:
    holds = mask.dtype is torch.bool
    allowed = mask if holds else mask != -torch.inf
    found = []
    pairs = [(q, k) for q in runs for k in others]
    for q, k in pairs:
        block = _block(allowed, q, k)
        every = block.all() if holds else block.new_zeros(())
        alike = holds and q == k and block.shape[-2:] == (q[1] - q[0],) * 2
        diagonal = (block == torch.ones_like(block[0, 0]).tril()).all() if alike else block.new_zeros(())
        found.append(torch.stack([block.any(), every, diagonal]))
    table = read(torch.stack(found), "which blocks a mask leaves")
    names = {pair: "empty" if not some else "full" if every else "diagonal" if diagonal else "masked"
             for pair, (some, every, diagonal) in zip(pairs, table, strict=True)}  # fmt: skip
    return names


def _runs_of(owners: Owners | None, size: int) -> Iterator[Range]:
    start = 0
    for stop in owners.stops.tolist() if owners is not None else [size] * bool(size):
        yield start, stop
        start = stop


def _block(mask: torch.Tensor, q: At, k: At) -> torch.Tensor:
    """The rows `q` and columns `k` of a mask (.., S or 1, T or 1)."""
    return _along(_along(mask, -2, q), -1, k)


def _along(mask: torch.Tensor, dim: int, at: At) -> torch.Tensor:
    if mask.shape[dim] == 1:
        return mask
    if isinstance(at, tuple):
        return mask.narrow(dim, at[0], at[1] - at[0])
    return mask.index_select(dim, to_device(at, mask.device))


def _positions(at: At, device: torch.device) -> torch.Tensor:
    return torch.arange(*at, device=device) if isinstance(at, tuple) else to_device(at, device)


def _bias(call: _Call, mask: torch.Tensor | None, q: At, k: At, kind: str, device: torch.device) -> Any:
    """The mask of one pair of runs; causality is in it where the pair lies across the diagonal."""
    if kind in ("full", "diagonal"):
        return None
    part = None if mask is None else _block(mask, q, k)
    if kind == "masked":
        return part
    allowed = _positions(q, device).unsqueeze(1) >= _positions(k, device)
    if part is None:
        return allowed
    return part & allowed if part.dtype is torch.bool else torch.where(allowed, part, -torch.inf)


def _expanded(tensor: torch.Tensor, queries: int, reads: torch.Tensor | None) -> torch.Tensor:
    """Keys or values with a head for each query head."""
    if reads is not None:
        return tensor.index_select(HEADS, to_device(reads, tensor.device))
    each = queries // tensor.shape[HEADS]
    return tensor if each == 1 else tensor.repeat_interleave(each, HEADS)


def _collapsed(gradient: torch.Tensor, heads: int, reads: torch.Tensor | None) -> torch.Tensor:
    """The adjoint of `_expanded`."""
    if reads is not None:
        shape = [gradient.shape[0], heads, *gradient.shape[2:]]
        return gradient.new_zeros(shape).index_add_(HEADS, to_device(reads, gradient.device), gradient)
    each = gradient.shape[HEADS] // heads
    return gradient if each == 1 else gradient.unflatten(HEADS, (heads, each)).sum(HEADS + 1)


def _forward(
    call: _Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    reads: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(output (B, H, s, D) in q's dtype, log-sum-exp (B, H, s) in the wide one) of this rank's queries."""
    dtype, heads = wide(q.dtype), q.shape[HEADS]
    output = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    for source, (key, value) in _blocks(call, (k, v)):
        for at, of, here, there, kind in _pairs(call, source):
            rows, columns = slice(*here), slice(*there)
            bias = _bias(call, mask, at, of, kind, q.device)
            keys, values = (_expanded(t[:, :, columns], heads, reads).to(dtype) for t in (key, value))
            mine, found = attended(q[:, :, rows].to(dtype), keys, values, bias, kind == "diagonal", call.scale)
            weight = torch.sigmoid(found - finite(lse[:, :, rows])).masked_fill(lse[:, :, rows].isinf(), 1.0)
            weight = weight.masked_fill(found.isinf(), 0.0).unsqueeze(-1)  # of what this block found
            output[:, :, rows] += weight * (mine - output[:, :, rows])
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], found)
    return output.to(q.dtype), lse


def _backward(
    call: _Call, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    output: torch.Tensor, lse: torch.Tensor, reads: torch.Tensor | None, wants_mask: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Gradients of queries, keys, values and of a mask that is added, whose rows are this rank's."""
    dtype, heads = wide(q.dtype), q.shape[HEADS]
    dq = torch.zeros_like(q, dtype=dtype)
    dmask = torch.zeros_like(mask, dtype=dtype) if wants_mask and mask is not None else None
    dout, output = gradient.to(dtype), output.to(dtype)

    def block(source: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dk, dv = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for at, of, here, there, kind in _pairs(call, source):
            rows, columns = slice(*here), slice(*there)
            bias = _bias(call, mask, at, of, kind, q.device)
            keys, values = (_expanded(t[:, :, columns], heads, reads).to(dtype) for t in (key, value))
            of_q, of_k, of_v, of_scores = gradients(
                dout[:, :, rows], q[:, :, rows].to(dtype), keys, values, output[:, :, rows], lse[:, :, rows], bias,
                kind == "diagonal", call.scale,
            )  # fmt: skip
            dq[:, :, rows] += of_q
            dk[:, :, columns] += _collapsed(of_k, dk.shape[HEADS], reads)
            dv[:, :, columns] += _collapsed(of_v, dv.shape[HEADS], reads)
            if dmask is not None and of_scores is not None:
                _add_mask(dmask, of_scores, at, of)
        return dk, dv

    dk, dv = _gradients_around(call, (k, v), block)
    dmask = dmask.to(mask.dtype) if dmask is not None and mask is not None else None
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask


def _add_mask(dmask: torch.Tensor, ds: torch.Tensor, rows: At, columns: At) -> None:
    """Adds the gradient of a block's scores to that of the mask's rows and columns that it read."""
    shape = [ds.shape[dim] if dmask.shape[dim] != 1 else 1 for dim in range(ds.dim())]
    found = ds.sum_to_size(shape)
    if isinstance(rows, tuple) and isinstance(columns, tuple):
        _block(dmask, rows, columns).add_(found)
        return
    at = [_positions(one, dmask.device) if dmask.shape[dim] != 1 else torch.zeros(1, dtype=torch.int64)
          for dim, one in ((-2, rows), (-1, columns))]  # fmt: skip
    dmask[..., at[0].unsqueeze(1), at[1]] += found


def _blocks(call: _Call, mine: tuple[torch.Tensor, ...]) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """(rank, its tensors) of this rank, then of those whose keys it reads; the next ones come while some are used."""
    axis, me = call.axis, call.axis.index
    if call.keys is None:
        yield me, mine
        return
    held, sent = mine, _Sent(axis)
    for step in range(axis.size):
        source, coming = (me - step) % axis.size, (me - step - 1) % axis.size
        if step == 0 or call.before(source) is not None:
            sent.add(held, call.after(source), _KEYS, source)
        arriving = None
        if step + 1 < axis.size and call.before(coming) is not None:
            arriving = _Arriving(call, coming, mine, call.before(coming), _KEYS)
        if step == 0 or call.before(source) is not None:
            yield source, held
        held = arriving.found() if arriving is not None else ()
    sent.wait()


def _gradients_around(call: _Call, mine: tuple[torch.Tensor, ...], block: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of this rank's tensors, summed over the ranks that used them: sums travel with their block.

    The sum of a block begins at the first rank that it comes to, and goes to its owner from the last one.
    """
    axis, me = call.axis, call.axis.index
    if call.keys is None:
        return block(me, *mine)
    like = tuple(tensor.new_empty(0, dtype=wide(tensor.dtype)) for tensor in mine)
    own: tuple[torch.Tensor, ...] = ()
    sent = _Sent(axis)
    sums: dict[int, _Arriving] = {}  # what other ranks have summed of the next block, on its way
    for source, held in _blocks(call, mine):
        found = block(source, *held)
        if source in sums:
            found = tuple(a + b for a, b in zip(sums.pop(source).found(), found, strict=True))
        if source == me:
            own = found  # stays here
        else:
            after = call.after(source)
            sent.add(found, source if after is None else after, _SUMS, source)
        coming = (source - 1) % axis.size
        while coming != me and call.before(coming) is None:
            coming = (coming - 1) % axis.size
        before = call.before(coming)
        if before is not None and before != coming:
            sums[coming] = _Arriving(call, coming, like, before, _SUMS)
    if call.ways[me]:
        home = _Arriving(call, me, like, call.ways[me][-1], _SUMS).found()
        own = tuple(a + b for a, b in zip(own, home, strict=True))
    sent.wait()
    return own


def _shapes(shapes: tuple[tuple[int, ...], ...], positions: int) -> list[list[int]]:
    return [[positions if d == POSITIONS else n for d, n in enumerate(shape)] for shape in shapes]


_KEYS, _SUMS = 0, 2  # kinds of messages, of two tensors each


class _Sent:
    """Tensors on their way to other ranks, kept until they have left."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.pending: list[tuple[Pending, torch.Tensor]] = []

    def add(self, tensors: tuple[torch.Tensor, ...], to: int | None, kind: int, source: int) -> None:
        """Send what is of the block of `source`."""
        self.pending = [(p, t) for p, t in self.pending if p.work is not None and not p.work.is_completed()]
        for place, tensor in enumerate(tensors if to is not None else ()):
            if tensor.numel() and to is not None:
                out = tensor.contiguous()
                self.pending.append((send(out, self.axis, to, "ring", 4 * source + kind + place), out))

    def wait(self) -> None:
        """Until everything has left."""
        for pending, _ in self.pending:
            pending.wait()
        self.pending.clear()


class _Arriving:
    """What is of the block of `source`, on its way here."""

    def __init__(self, call: _Call, source: int, like: tuple[torch.Tensor, ...], sender: int | None, kind: int):
        assert call.keys is not None and sender is not None
        shapes = _shapes(call.shapes, call.keys.counts[source])
        self.tensors = tuple(t.new_empty(shape) for t, shape in zip(like, shapes, strict=True))
        self.pending = [
            receive(into, call.axis, sender, "ring", 4 * source + kind + place)
            for place, into in enumerate(self.tensors)
            if into.numel()
        ]

    def found(self) -> tuple[torch.Tensor, ...]:
        """It. Waits."""
        for pending in self.pending:
            pending.wait()
        return self.tensors
