"""Ring attention: keys and values of every rank pass by; each rank merges what its queries find in each block.

    step 0     rank r has keys r       q_r K_r     -> o, lse          meanwhile K_r goes on to r+1
    step 1     rank r has keys r-1     q_r K_{r-1} -> merged          ...
    backward   the blocks pass by again, and with them the sums of their gradients, which end at their owners

Merging, in float32 (float64 for float64), with lse the log of the sum of exponents of each row's scores:

    lse = log(exp(lse_a) + exp(lse_b))      o = o_a exp(lse_a - lse) + o_b exp(lse_b - lse)

A block is split along the runs of indices that its rank owns, so that any dealing of positions is right: for a causal
mask a pair of runs is empty (nothing is computed), full, or on the diagonal.

Bytes received by a rank in a forward: 2 B S H_kv D (p-1)/p elements; in backward the same again, and as much for the
gradients of keys and values (p-1 hops), in the dtype that they are summed in: float32, or float64 for float64.
Source: Liu et al., "Ring Attention" (2023); Milakov and Gimelshein, "Online normalizer calculation" (2018).

What this does not do: skip sending blocks that no query of a rank reads; dropout, which goes by heads instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import Axis, Pending, receive, send
from shardwise.parallel.sequence.kernels import attended, finite, gradients, wide
from shardwise.part import Owners, Part, Sum, Uncut
from shardwise.part.levels import Distributed
from shardwise.part.tensor import gather, share_of

HEADS, POSITIONS = 1, 2
Range = tuple[int, int]


@dataclass(frozen=True)
class _Call:
    """What all ranks of a ring know of one attention."""

    axis: Axis
    queries: Owners
    keys: Owners | None  # None: whole on every rank
    key_count: int
    is_causal: bool
    scale: float


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
        call = _Call(axis, q.part.owners, keys, key.shape[POSITIONS], is_causal, scale)
        heads = _Inside.of(q)
        mask_here = heads.mask(mask)
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
    mine = torch.from_numpy(q.inner.owners.indices(q.inner.axis.index)) // each
    if k.inner is not None:
        held = torch.from_numpy(k.inner.owners.indices(k.inner.axis.index))
        place = torch.searchsorted(held, mine).clamp_(max=max(len(held) - 1, 0))
        if not len(held) or bool((held[place] != mine).any()):
            raise Uncut("attention of queries and keys whose heads are cut differently")
        mine = place
    count = k.payload.shape[HEADS]
    regular = count and len(mine) % count == 0
    if regular and bool((mine == torch.arange(len(mine)) // (len(mine) // count)).all()):
        return None
    return mine


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


def _pairs(call: _Call, source: int) -> Iterator[tuple[Range, Range, Range, Range, str]]:
    """(queries, keys, their places here and in the block, "full" | "diagonal" | "causal") of runs that meet."""
    for q, q_here in _ranges(call.queries, call.axis.index, call.queries.size):
        for k, k_here in _ranges(call.keys, source, call.key_count):
            if not call.is_causal or k[1] - 1 <= q[0]:
                yield q, k, q_here, k_here, "full"
            elif k == q:
                yield q, k, q_here, k_here, "diagonal"
            elif k[0] <= q[1] - 1:
                yield q, k, q_here, k_here, "causal"


def _bias(call: _Call, mask: torch.Tensor | None, q: Range, k: Range, kind: str, device: torch.device) -> Any:
    """The mask of one pair of runs; causality is in it where the pair lies across the diagonal."""
    part = None
    if mask is not None:
        part = mask if mask.shape[-2] == 1 else mask[..., q[0] : q[1], :]
        part = part if part.shape[-1] == 1 else part[..., k[0] : k[1]]
    if kind != "causal":
        return part
    allowed = torch.arange(*q, device=device).unsqueeze(1) >= torch.arange(*k, device=device)
    if part is None:
        return allowed
    return part & allowed if part.dtype is torch.bool else torch.where(allowed, part, -torch.inf)


def _expanded(tensor: torch.Tensor, queries: int, reads: torch.Tensor | None) -> torch.Tensor:
    """Keys or values with a head for each query head."""
    if reads is not None:
        return tensor.index_select(HEADS, reads.to(tensor.device))
    each = queries // tensor.shape[HEADS]
    return tensor if each == 1 else tensor.repeat_interleave(each, HEADS)


def _collapsed(gradient: torch.Tensor, heads: int, reads: torch.Tensor | None) -> torch.Tensor:
    """The adjoint of `_expanded`."""
    if reads is not None:
        shape = [gradient.shape[0], heads, *gradient.shape[2:]]
        return gradient.new_zeros(shape).index_add_(HEADS, reads.to(gradient.device), gradient)
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
            merged = torch.logaddexp(lse[:, :, rows], found)
            base = finite(merged)
            output[:, :, rows] = output[:, :, rows] * (lse[:, :, rows] - base).exp().unsqueeze(-1)
            output[:, :, rows] += mine * (finite(found) - base).exp().unsqueeze(-1) * found.isfinite().unsqueeze(-1)
            lse[:, :, rows] = merged
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


def _add_mask(dmask: torch.Tensor, ds: torch.Tensor, rows: Range, columns: Range) -> None:
    target = dmask if dmask.shape[-2] == 1 else dmask[..., rows[0] : rows[1], :]
    target = target if target.shape[-1] == 1 else target[..., columns[0] : columns[1]]
    target += ds.sum_to_size(target.shape)


def _blocks(call: _Call, mine: tuple[torch.Tensor, ...]) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """(rank, its tensors) of every rank of the ring, this one first; the next one comes while one is used."""
    axis = call.axis
    if call.keys is None:
        yield axis.index, mine
        return
    held, coming = mine, None
    for step in range(axis.size):
        source = (axis.index - step) % axis.size
        if step + 1 < axis.size:
            coming = _Passing(axis, held, _shapes(held, call.keys.counts[(source - 1) % axis.size]), 0)
        yield source, held
        if coming is not None and step + 1 < axis.size:
            held = coming.arrived()


def _gradients_around(call: _Call, mine: tuple[torch.Tensor, ...], block: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of this rank's tensors, summed over the ranks that used them: sums travel with their block."""
    axis = call.axis
    if call.keys is None:
        return block(axis.index, *mine)
    own: tuple[torch.Tensor, ...] = ()
    coming: _Passing | None = None
    for source, held in _blocks(call, mine):
        found = block(source, *held)
        if source == axis.index:
            own = found  # stays here: the sum of a block begins at the rank after its owner
            continue
        if coming is not None:
            found = tuple(a + b for a, b in zip(coming.arrived(), found, strict=True))
        coming = _Passing(axis, found, _shapes(found, call.keys.counts[(source - 1) % axis.size]), 2)
    assert coming is not None
    return tuple(a + b for a, b in zip(own, coming.arrived(), strict=True))


def _shapes(tensors: tuple[torch.Tensor, ...], positions: int) -> list[list[int]]:
    return [[positions if d == POSITIONS else n for d, n in enumerate(t.shape)] for t in tensors]


class _Passing:
    """Tensors on their way to the next rank of a ring, and those of the one before on theirs to this one."""

    def __init__(self, axis: Axis, sent: tuple[torch.Tensor, ...], shapes: list[list[int]], number: int):
        after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
        self.sent = tuple(tensor.contiguous() for tensor in sent)  # kept until it is over
        self.found = tuple(t.new_empty(shape) for t, shape in zip(sent, shapes, strict=True))
        self.pending: list[Pending] = []
        for place, (out, into) in enumerate(zip(self.sent, self.found, strict=True)):
            if out.numel():
                self.pending.append(send(out, axis, after, "ring", number + place))
            if into.numel():
                self.pending.append(receive(into, axis, before, "ring", number + place))

    def arrived(self) -> tuple[torch.Tensor, ...]:
        """What the rank before sent. Waits for it."""
        for pending in self.pending:
            pending.wait()
        return self.found
