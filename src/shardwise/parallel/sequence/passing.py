"""Pass keys, values and their gradients around a ring, along the ways that `ring_plan.Call` gives.

A *block* is the keys and values of one rank. It goes from one rank that reads any of it to the next that does, and
arrives there while that rank computes on the block before. The sum of its gradients goes the same way, and from the
last reader to the block's owner. A plan's option for this would arrive with `Call.axis`.

    step t of rank r    has the block of r - t    round t of keys: sends it on, receives the block of r - t - 1
                        computes on it            round t of sums: sends on its gradients, receives those of r - t - 1

All messages of a round begin together, and all ranks run the rounds in the same order, so no ranks wait for each other
in a circle, whatever a backend buffers. If the next rank does not read a block, it is kept until the round in which
its next reader expects it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.comm import Pending, RankMessage, exchange
from shardwise.parallel.sequence.block_attention import wide
from shardwise.parallel.sequence.ring_plan import POSITIONS, Call

Tensors = tuple[torch.Tensor, ...]


def blocks_passing(call: Call, mine: Tensors) -> Iterator[tuple[int, Tensors]]:
    """Yields (owner's rank, (keys, values)) of each block that this rank reads, `mine` first. Collective.

    The next block is received while the caller uses the one that was yielded.
    """
    if call.keys is None:  # keys are not cut
        yield call.axis.index, mine
        return
    for source, block in _steps(call, mine):
        if block is not None:
            yield source, block


def _steps(call: Call, mine: Tensors) -> Iterator[tuple[int, Tensors | None]]:
    """Yields for each step (owner's rank, its tensors; None if this rank reads none of them), this rank's own first."""
    axis, me = call.axis, call.axis.index
    rounds = _Rounds(call, _KEYS)
    waiting: dict[int, list[tuple[int, int, Tensors]]] = {}  # round -> (receiver, owner, block) to send in it
    block: Tensors | None = mine
    for step in range(axis.size):
        source, coming = (me - step) % axis.size, (me - step - 1) % axis.size
        if block is not None and (after := call.after(source)) is not None:
            waiting.setdefault(_round_of(call, source, after), []).append((after, source, block))
        sender = call.before(coming) if step + 1 < axis.size else None
        # before the block is yielded, so that the next one arrives while it is used
        arriving = rounds.begin(waiting.pop(step, []), [] if sender is None else [(sender, coming, mine)])
        yield source, block
        block = arriving[0].received() if arriving else None
    rounds.wait()


def gradients_around(call: Call, mine: Tensors, block: Any) -> Tensors:
    """Returns the gradients of this rank's keys and values `mine`, summed over the ranks that read them. Collective.

    The sum of a block's gradients begins at its first reader, is passed from reader to reader, and from the last one
    to the owner.

    block  from (owner's rank, its keys, its values) to this rank's summands of their gradients
    """
    axis, me = call.axis, call.axis.index
    if call.keys is None:  # every rank has all keys, and nothing is sent
        return block(me, *mine)
    like = tuple(tensor.new_empty(0, dtype=wide(tensor.dtype)) for tensor in mine)
    own: Tensors = ()
    rounds = _Rounds(call, _SUMS)
    waiting: dict[int, list[tuple[int, int, Tensors]]] = {}  # round -> (receiver, owner, sum) to send in it
    coming: _Arriving | None = None  # sum that arrives for the block of the next step
    home: _Arriving | None = None  # sum that arrives for this rank's own block, from its last reader
    for step, (source, tensors) in enumerate(_steps(call, mine)):
        if tensors is not None:  # else this rank reads nothing of the block
            gradients = block(source, *tensors)
            if coming is not None:
                gradients = _added(gradients, coming.received())
            if source == me:
                own = gradients  # the other ranks' sum is added at the end
            # to the next reader, in the round in which it expects the sum, or from the last reader to the owner
            else:
                after = call.after(source)
                number = step if after is None else _round_of(call, source, after)
                waiting.setdefault(number, []).append((source if after is None else after, source, gradients))
            del gradients
        del tensors  # frees the block's memory before the next one is used
        coming, last = None, _last_step(call, me) == step
        comes = _sums_before(call, (source - 1) % axis.size) if step + 1 < axis.size else None
        receives = [] if comes is None else [(comes, (source - 1) % axis.size, like)]
        receives += [(call.ways[me][-1], me, like)] if last else []
        arriving = rounds.begin(waiting.pop(step, []), receives)
        if last:  # the last of `receives`
            home = arriving.pop()
        coming = arriving[0] if arriving else None
    if home is not None:
        own = _added(own, home.received())
    rounds.wait()
    return own


def _round_of(call: Call, source: int, reader: int) -> int:
    """Returns the round in which the block of `source`, or its sum, is sent to `reader`, one before its step."""
    return (reader - source) % call.axis.size - 1


def _last_step(call: Call, source: int) -> int:
    """Returns the step in which the last reader of a block sends its sum to the owner; -1 if no other rank reads it."""
    return (call.ways[source][-1] - source) % call.axis.size if call.ways[source] else -1


def _sums_before(call: Call, source: int) -> int | None:
    """Returns the rank that sends this one the sum of a block's gradients so far; None if this rank begins it."""
    before = call.before(source)
    return None if before == source else before  # the owner's own summand is added at the end


def _added(own: tuple[torch.Tensor, ...], arrived: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Adds the gradients that arrived to this rank's new ones, in place, and returns these."""
    return tuple(mine.add_(other) for mine, other in zip(own, arrived, strict=True))


def _shapes(shapes: tuple[tuple[int, ...], ...], positions: int) -> list[list[int]]:
    """Returns `shapes`, of this rank's keys and values, with another number of positions."""
    return [[positions if d == POSITIONS else n for d, n in enumerate(shape)] for shape in shapes]


_KEYS, _SUMS = 0, 2  # first tags of the two kinds of messages, of two tensors each


class _Rounds:
    """The rounds of one kind of messages, `_KEYS` or `_SUMS`. Keeps tensors alive until they have been sent."""

    def __init__(self, call: Call, kind: int):
        self.call, self.kind = call, kind
        self.pending: list[tuple[Pending, torch.Tensor]] = []

    def begin(self, sends: list[tuple[int, int, Tensors]], receives: list[tuple[int, int, Tensors]]) -> list[_Arriving]:
        """Begins a round of messages without waiting; returns an `_Arriving` for each of `receives`.

        sends     (receiver's rank, owner of the block, its tensors)
        receives  (sender's rank, owner of the block, tensors of the same dtypes)
        """
        kind = self.kind
        self.pending = [(p, t) for p, t in self.pending if not p.over]  # frees what has been sent
        # a tag for each tensor, since keys and sums of one block may travel between two ranks at once; empty tensors
        # are neither sent nor expected
        going = [
            RankMessage(tensor.contiguous(), to, 4 * source + kind + place, "ring")
            for to, source, tensors in sends
            for place, tensor in enumerate(tensors)
            if tensor.numel()
        ]
        made = [_Arriving(self.call, source, like) for _, source, like in receives]
        coming = [
            RankMessage(tensor, sender, 4 * source + kind + place, "ring")
            for (sender, source, _), arriving in zip(receives, made, strict=True)
            for place, tensor in enumerate(arriving.tensors)
            if tensor.numel()
        ]
        sent, received = exchange(going, coming, self.call.axis)
        self.pending += [(pending, message.tensor) for pending, message in zip(sent, going, strict=True)]
        arrivals = iter(received)
        for arriving in made:
            arriving.pending = [next(arrivals) for tensor in arriving.tensors if tensor.numel()]
        return made

    def wait(self) -> None:
        """Waits until everything has been sent."""
        for pending, _ in self.pending:
            pending.wait()
        self.pending.clear()


class _Arriving:
    """The tensors of the block of rank `source` while they are received. `like`: tensors of their dtypes."""

    def __init__(self, call: Call, source: int, like: Tensors):
        assert call.keys is not None
        shapes = _shapes(call.shapes, call.keys.counts[source])
        self.tensors = tuple(t.new_empty(shape) for t, shape in zip(like, shapes, strict=True))
        self.pending: list[Pending] = []

    def received(self) -> Tensors:
        """Waits for the tensors, and returns them."""
        for pending in self.pending:
            pending.wait()
        return self.tensors
