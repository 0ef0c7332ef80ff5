"""`scaled_dot_product_attention` on cut positions, by heads (Ulysses) or around a ring. Sharded heads: part/rules.

    cp_ulysses   positions -> heads (all-to-all), attention of whole sequences, heads -> positions
    cp           keys and values of every rank pass by, and the blocks' results are merged (see `ring`)

With both, heads are exchanged first, and then the ring runs. The module calls `scaled_dot_product_attention` unchanged.
Attention that a module writes as products and a softmax is exact too, by their rules, but its keys are all-gathered and
its scores materialised.

Bytes received by a rank in a forward with cp_ulysses=p: (p-1)/p of its shares of queries, keys, values and output.
Source: Jacobs et al., "DeepSpeed Ulysses" (2023).

Heads are distributed so that the queries of one key head stay together; the degree need not divide them. With fewer
key heads than ranks, keys and values are gathered, and each rank takes the heads that its queries read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from shardwise.comm import Axis
from shardwise.host import to_device
from shardwise.parallel.sequence.pair_mask import PairMask, whole_mask
from shardwise.parallel.sequence.ring import ring_attention
from shardwise.part import Owners, Part, Sum, Uncut
from shardwise.part.crossing import axes_of
from shardwise.part.cuts import blocks_within, repeated
from shardwise.part.levels import Distributed
from shardwise.part.moves import from_axis, moved, replaced_from_axis, share_of
from shardwise.part.sums import redealt, whole_gradient, whole_over_axis
from shardwise.part.tensor import FUNCTIONS

HEADS, POSITIONS = 1, 2  # of queries, keys and values (B, H, S, D)


@dataclass(frozen=True)
class AttentionCall:
    """Facts of one call of attention on cut positions.

    axis        that cuts the positions;  heads  whether it goes by heads; else around a ring
    causal      whether it is causal;  masked  whether it is given a mask
    elements    (elements that a rank receives in a forward for a sample by this route, by the other route)
    mask        shape of the mask if it has an element for each pair of positions; else ()
    mask_bytes  its size
    """

    axis: Axis
    heads: bool
    causal: bool
    masked: bool
    elements: tuple[int, int]
    mask: tuple[int, ...] = ()
    mask_bytes: int = 0

    @classmethod
    def of(
        cls, query: torch.Tensor, key: torch.Tensor, axis: Axis, *, heads: bool, causal: bool, mask: torch.Tensor | None
    ) -> AttentionCall:
        """Returns the facts of a call with queries and keys (B, H, S, D) and `mask`, before it runs.

        A ring that sends less because of its mask is counted in full.
        """
        p, head_size = axis.size, query.shape[-1]
        inside = [_heads_inside(t, axis) for t in (query, key)]  # under tp a rank has some heads; the most are counted
        of_q, of_k = (t.shape[HEADS] if i is None else max(i.counts) for t, i in zip((query, key), inside, strict=True))
        ring = 2 * key.shape[POSITIONS] * of_k * head_size * (p - 1) / p
        by_heads = 2 * query.shape[POSITIONS] * of_q * head_size * (p - 1) / p**2
        by_heads += ring if of_k < p else ring / p  # fewer key heads than ranks are gathered
        elements = (by_heads, ring) if heads else (ring, by_heads)
        # a mask given as a function, or broadcast along S or T, has no (S, T) in memory
        pairs = isinstance(mask, PairMask)
        shape = () if mask is None or pairs or mask.dim() < 2 or 1 in mask.shape[-2:] else tuple(mask.shape)
        mask_bytes = math.prod(shape) * mask.element_size() if mask is not None and shape else 0
        return cls(axis, heads, causal, mask is not None, (round(elements[0]), round(elements[1])), shape, mask_bytes)


_SEEN: list[list[AttentionCall]] = []


@contextmanager
def watching() -> Iterator[list[AttentionCall]]:
    """Context that yields a list, to which an `AttentionCall` is added for every attention on cut positions inside."""
    _SEEN.append([])
    try:
        yield _SEEN[-1]
    finally:
        _SEEN.pop()


def explained(seen: Sequence[AttentionCall]) -> list[str]:
    """Returns lines of text, each with a number of alike calls, their route, and elements received by both routes."""
    counts = Counter((s.axis.name, s.axis.size, s.heads, s.elements) for s in seen)
    said = []
    for (name, size, heads, (here, there)), count in counts.items():
        route, other = ("by heads", "around a ring") if heads else ("around a ring", "by heads")
        # cp uses a ring unless there is dropout, whose random mask is of whole rows
        why = ": it has dropout, which draws for whole rows" if heads and name == "cp" else ""
        said.append(
            f"{count} attention{'s' * (count > 1)} over {name}={size} {'go' if count > 1 else 'goes'} {route}{why}; in "
            f"a forward a rank receives {here:,} elements for a sample ({there:,} {other})"
        )
    return said


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Returns `scaled_dot_product_attention` of (B, H, S, D) tensors, of which any may be a `Part`. Collective."""
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    tensors = (query, key, value)
    # (B, S, D) gets a dim of heads; only if all three have it, since torch broadcasts a tensor of fewer dims
    if all(tensor.dim() == 3 for tensor in tensors) and any(isinstance(tensor, Distributed) for tensor in tensors):
        mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(1)
        return attend(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), mask, **options).squeeze(1)
    # with a `PairMask` a ring would ignore `is_causal`
    if isinstance(attn_mask, PairMask) and (is_causal or dropout_p or query.dim() != 4):
        attn_mask = whole_mask(attn_mask)
    if query.dim() != 4:  # torch decomposes it into operations that have rules
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    axis = _innermost(query) or _innermost(key)
    if axis is None:  # no axis cuts positions
        return _of_whole_positions(query, key, value, attn_mask, options)
    if attn_mask is not None and isinstance(attn_mask, Distributed):  # a rank reads other rows and columns than its own
        attn_mask = whole_over_axis(attn_mask, axis)
    if _cut_over(query, axis) is None:  # uncut queries of cut keys, for which all ranks compute the same
        key, value = whole_over_axis(key, axis), whole_over_axis(value, axis)
        return attend(query, key, value, attn_mask, **options)
    key, value = _cut_as(key, value), _cut_as(value, key)
    beyond = _levels(query)[0].axis is not axis  # only the outermost axis can be a ring
    # a ring has a row's scores in pieces, but dropout's random numbers are of whole rows
    heads = axis.name == "cp_ulysses" or bool(dropout_p) or beyond
    if _SEEN:
        causal = is_causal or (isinstance(attn_mask, PairMask) and attn_mask.looks_back)
        _SEEN[-1].append(AttentionCall.of(query, key, axis, heads=heads, causal=causal, mask=attn_mask))
    if heads:
        return _by_heads(query, key, value, attn_mask, axis, options)
    if _owners(key, axis) != _owners(value, axis):  # a ring passes keys and values together
        key, value = whole_over_axis(key, axis), whole_over_axis(value, axis)
    return ring_attention(query, key, value, attn_mask, axis, is_causal=is_causal, scale=scale)


def _of_whole_positions(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:  # fmt: skip
    """Returns attention on uncut positions. `options`: the other arguments of `scaled_dot_product_attention`."""
    if isinstance(mask, PairMask):
        # a ring of one rank reads the mask tile by tile, and handles one axis further in. If no axis cuts positions at
        # all, the model only runs beside another one whose positions are cut, and gets its mask as a tensor as usual
        levels = [_levels(tensor) for tensor in (query, key, value)]
        of_cut = any(part.axis.positions for parts in levels for part in parts)
        if of_cut and max(map(len, levels)) < 2:
            return ring_attention(query, key, value, mask, Axis.alone("cp"), is_causal=False, scale=options["scale"])
        mask = whole_mask(mask)
    return F.scaled_dot_product_attention(query, key, value, mask, **options)


def _cut_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` cut also over the axes that cut only positions of `other`. Differentiable; nothing is sent.

    Of keys and values, one may be uncut because it is learned or was gathered.
    """
    for part in _levels(other):
        if part.dim_cut != POSITIONS or not part.axis.positions or part.axis in axes_of(tensor):
            continue
        if from_axis(tensor, part.axis).shape[POSITIONS] != part.owners.size:  # broadcast, or torch will refuse it
            break
        tensor = redealt(tensor, partial(_own_share, part.owners, part.axis))
    return tensor


def _own_share(owners: Owners, axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that `axis` does not cut as a `Part` along its positions, this rank's share by `owners`."""
    share = owners.take(from_axis(tensor, axis), POSITIONS, axis.index).contiguous()
    return replaced_from_axis(tensor, axis, Part(share, POSITIONS, owners, axis))


def _refuse_few_heads(query: torch.Tensor, axis: Axis) -> None:
    """Raises `Uncut`, on all ranks alike, if other axes shard the heads and leave too few of them for `axis`."""
    beside = [part.axis for part in _levels(query) if part.dim_cut == HEADS]
    heads, axes = query.shape[HEADS], [axis, *beside]
    if beside and heads < math.prod(a.size for a in axes):
        degrees = " x ".join(f"{a.name}={a.size}" for a in axes)
        raise Uncut(
            f"attention by heads: {heads} heads are dealt over {degrees}, and every rank needs one: use fewer ranks, "
            "or cp without dropout in attention, which goes around a ring"
        )


def _by_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, axis: Axis,
    options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Returns attention computed with heads sharded over `axis` in place of positions (Ulysses), cut as queries are.

    If axes further out cut positions too, the attention inside goes by heads over them in the same way, or by a ring.
    """
    part = _cut_over(query, axis)
    assert part is not None
    if query.shape[HEADS] < axis.size and len(_positions(query)) > 1:
        # too few heads for this axis, over which queries are gathered, so that all its ranks compute the same
        whole_query, key, value = (whole_over_axis(tensor, axis) for tensor in (query, key, value))
        output = attend(whole_query, key, value, mask, **options)
        return redealt(whole_gradient(output, axis), partial(_own_share, part.owners, axis))
    _refuse_few_heads(query, axis)
    queries_per_key = query.shape[HEADS] // key.shape[HEADS]
    inside = _heads_inside(key, axis)
    few = min(key.shape[HEADS] if inside is None else min(inside.counts), key.shape[HEADS]) < axis.size
    if few:  # a rank would have no key head, so all are gathered, and each rank selects those that its queries read
        owners = blocks_within(query.shape[HEADS], axis.size, _heads_inside(query, axis))
        read = _Read(axis, owners, _inside(query, axis), queries_per_key)
        key, value = (_ReadHeads.apply(whole_over_axis(t, axis), read) for t in (key, value))
        options = {**options, "enable_gqa": False}  # there is now a key head for each query head
    else:
        of_keys = blocks_within(key.shape[HEADS], axis.size, inside)
        owners = repeated(of_keys, queries_per_key)  # queries go where their key head is
        key, value = (_moved_to_heads(t, of_keys, axis) for t in (key, value))
    inside = _heads_inside(query, axis)
    output = attend(moved(query, HEADS, owners, axis), key, value, mask, **options)
    return moved(output, POSITIONS, part.owners, axis, inside)


@dataclass(frozen=True)
class _Read:
    """Which key heads each rank's query heads read, if there are fewer key heads than ranks.

    axis             over which query heads are sharded, by `owners`
    inside           queries as an axis further in (tp) shards their heads; None if none does
    queries_per_key  number of query heads that read one key head
    """

    axis: Axis
    owners: Owners
    inside: Part | None
    queries_per_key: int

    def places(self, held_keys: Part | None) -> np.ndarray:
        """Returns, for each query head of this rank, the index of its key head among the key heads held here.

        held_keys   keys as an axis further in shards their heads; None if all are here
        """
        mine = self.owners.indices(self.axis.index)
        if self.inside is not None:
            mine = np.intersect1d(mine, self.inside.owners.indices(self.inside.axis.index))
        keys = mine // self.queries_per_key
        if held_keys is not None:
            keys = np.searchsorted(held_keys.owners.indices(held_keys.axis.index), keys)
        return keys

    def wrapped(self, payload: torch.Tensor) -> torch.Tensor:
        """Returns `payload`, with a key head for each local query head, as a tensor sharded as the queries are."""
        if self.inside is not None:
            dealt = self.inside.owners.array[self.owners.indices(self.axis.index)]
            payload = Part(payload, HEADS, Owners.of(dealt, self.inside.owners.ranks), self.inside.axis)
        return Part(payload, HEADS, self.owners, self.axis)


class _ReadHeads(torch.autograd.Function):
    """Selects from keys or values, uncut over an axis, the head that each local query head reads."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, read: _Read) -> torch.Tensor:
        """Returns (B, local query heads, S, D), sharded by heads as the queries are."""
        inner = from_axis(key.detach(), read.axis)
        held_keys = inner if isinstance(inner, Part) else None
        # shells describe the cuts without memory, which the context would keep until backward
        inside = None if read.inside is None else read.inside.shell()
        ctx.read, ctx.held_keys = replace(read, inside=inside), None if held_keys is None else held_keys.shell()
        payload = inner if held_keys is None else held_keys.local
        ctx.shape, ctx.places = payload.shape, to_device(read.places(held_keys), payload.device)
        return replaced_from_axis(key.detach(), read.axis, read.wrapped(payload.index_select(HEADS, ctx.places)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor):
        """Returns the gradient of keys or values, to which each rank adds that of its own query heads, and None."""
        read, held_keys = ctx.read, ctx.held_keys
        payload = share_of(from_axis(gradient, read.axis), HEADS, read.owners, read.axis)
        if read.inside is not None:  # tp cuts the query heads
            dealt = Owners.of(read.inside.owners.array[read.owners.indices(read.axis.index)], read.inside.owners.ranks)
            payload = share_of(payload, HEADS, dealt, read.inside.axis)
        # several query heads read one key head, so their gradients are added
        local = payload.new_zeros(ctx.shape).index_add_(HEADS, ctx.places, payload)
        if held_keys is not None:  # tp shards the keys' heads
            local = held_keys.with_local(local)
        elif read.inside is not None:  # all of tp's ranks have the keys, and each has used them for its own queries
            local = Sum(local, read.inside.axis, spread=False)
        return replaced_from_axis(gradient, read.axis, Sum(local, read.axis, spread=False)), None


def _moved_to_heads(tensor: torch.Tensor, owners: Owners, axis: Axis) -> torch.Tensor:
    """Returns keys or values with heads sharded over `axis` in place of positions; unchanged if `axis` cuts neither.

    Uncut ones belong to another sequence, and each rank reads the heads that its queries need.
    """
    return tensor if _cut_over(tensor, axis) is None else moved(tensor, HEADS, owners, axis)


def _levels(tensor: torch.Tensor) -> list[Part]:
    """Returns the nested `Part`s of a tensor, the outermost axis first. Reduces sums in between, so collective."""
    parts = []
    while isinstance(tensor, Distributed):
        tensor = tensor.settled()
        if isinstance(tensor, Part):
            parts.append(tensor)
            tensor = tensor.local
    return parts


def _innermost(tensor: torch.Tensor) -> Axis | None:
    """Returns the innermost axis that cuts the positions of queries, keys or values; None if none does."""
    axes = _positions(tensor)
    return axes[-1] if axes else None


def _positions(tensor: torch.Tensor) -> list[Axis]:
    """Returns the axes over which the positions of a tensor are cut, outermost first."""
    return [part.axis for part in _levels(tensor) if part.dim_cut == POSITIONS and part.axis.positions]


def _cut_over(tensor: torch.Tensor, axis: Axis) -> Part | None:
    """Returns the `Part` of a tensor whose positions `axis` cuts; None if it does not."""
    return next((p for p in _levels(tensor) if p.axis is axis and p.dim_cut == POSITIONS), None)


def _owners(tensor: torch.Tensor, axis: Axis) -> Owners | None:
    """Returns the owners of a tensor's positions over `axis`; None if it does not cut them."""
    part = _cut_over(tensor, axis)
    return None if part is None else part.owners


def _inside(tensor: torch.Tensor, axis: Axis) -> Part | None:
    """Returns the `Part` inside a tensor whose heads an axis further in than `axis` (tp) shards; None if none does."""
    return next((p for p in _levels(tensor) if p.axis.depth > axis.depth and p.dim_cut == HEADS), None)


def _heads_inside(tensor: torch.Tensor, axis: Axis) -> Owners | None:
    """Returns the owners of a tensor's heads over an axis further in than `axis`; None if none shards them."""
    inside = _inside(tensor, axis)
    return None if inside is None else inside.owners


FUNCTIONS[F.scaled_dot_product_attention] = attend
__all__ = ["AttentionCall", "attend", "explained", "watching"]
