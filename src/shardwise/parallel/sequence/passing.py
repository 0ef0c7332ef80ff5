"""Pass keys, values and their gradients around a ring, as pairs' `Call` has it. A plan's key would come by `Axis`.

A block goes from one rank that reads any of it to the next, past those that do not; the next one comes while the one
at hand is computed. The sum of its gradients goes the same way, then to its owner.

    step t of rank r    has the block of r - t    round t of keys: it goes on, the block of r - t - 1 comes
                        computes on it            round t of sums: its gradients go on, those of r - t - 1 come

What goes and comes in a round begins together, and all ranks come to the rounds in one order, so that no rank waits for
one that waits for it, whatever a backend buffers. A block that is passed over waits where it is, for the round in
which its next reader expects it.
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
    """Yields (rank, its keys and values): this rank's own, then those that it reads; one block is sent ahead."""
    if call.keys is None:  # whole on every rank: nothing passes
        yield call.axis.index, mine
        return
    for source, block in _steps(call, mine):
        if block is not None:
            yield source, block


def _steps(call: Call, mine: Tensors) -> Iterator[tuple[int, Tensors | None]]:
    """Yields (rank, its tensors, or None where this rank reads none of them) for each step, this rank's own first."""
    axis, me = call.axis, call.axis.index
    rounds = _Rounds(call, _KEYS)
    waiting: dict[int, list[tuple[int, int, Tensors]]] = {}  # by round: (rank, whose block, it) that go on in it
    block: Tensors | None = mine
    for step in range(axis.size):
        source, coming = (me - step) % axis.size, (me - step - 1) % axis.size
        if block is not None and (after := call.after(source)) is not None:
            waiting.setdefault(_round_of(call, source, after), []).append((after, source, block))
        sender = call.before(coming) if step + 1 < axis.size else None
        # begun before the block at hand is yielded, so that the next one arrives while it is used
        arriving = rounds.begin(waiting.pop(step, []), [] if sender is None else [(sender, coming, mine)])
        yield source, block
        block = arriving[0].received() if arriving else None
    rounds.wait()


def gradients_around(call: Call, mine: Tensors, block: Any) -> Tensors:
    """Returns the gradients of this rank's tensors, summed over the ranks that used them: sums travel with their block.

    The sum of a block begins at the first rank that it comes to, and goes to its owner from the last one.

    block  (source, *tensors of that rank): this rank's summand of their gradients
    """
    axis, me = call.axis, call.axis.index
    if call.keys is None:  # every rank has all keys: nothing travels
        return block(me, *mine)
    like = tuple(tensor.new_empty(0, dtype=wide(tensor.dtype)) for tensor in mine)
    own: Tensors = ()
    rounds = _Rounds(call, _SUMS)
    waiting: dict[int, list[tuple[int, int, Tensors]]] = {}  # by round: (rank, whose block, its sum) that go in it
    coming: _Arriving | None = None  # what other ranks have summed of the next step's block
    home: _Arriving | None = None
    for step, (source, tensors) in enumerate(_steps(call, mine)):
        if tensors is not None:  # else this rank reads nothing of the block
            gradients = block(source, *tensors)
            if coming is not None:
                gradients = _added(gradients, coming.received())
            if source == me:
                own = gradients  # stays here; what other ranks add to it comes at the end
            # on to the next rank that reads the block, in the round that brings it there, or, from the last one, home
            else:
                after = call.after(source)
                number = step if after is None else _round_of(call, source, after)
                waiting.setdefault(number, []).append((source if after is None else after, source, gradients))
            del gradients
        del tensors  # not kept while the next block is computed
        coming, last = None, _last_step(call, me) == step
        comes = _sums_before(call, (source - 1) % axis.size) if step + 1 < axis.size else None
        receives = [] if comes is None else [(comes, (source - 1) % axis.size, like)]
        receives += [(call.ways[me][-1], me, like)] if last else []
        arriving = rounds.begin(waiting.pop(step, []), receives)
        if last:  # in this round the sum of this rank's own block comes home
            home = arriving.pop()
        coming = arriving[0] if arriving else None
    if home is not None:
        own = _added(own, home.received())
    rounds.wait()
    return own


def _round_of(call: Call, source: int, reader: int) -> int:
    """Returns the round in which a block, or its sum, is sent to `reader`: the one before it computes with that."""
    return (reader - source) % call.axis.size - 1


def _last_step(call: Call, source: int) -> int:
    """Returns the step in which the last other reader has a block and sends its sum home; -1: nobody else does."""
    return (call.ways[source][-1] - source) % call.axis.size if call.ways[source] else -1


def _sums_before(call: Call, source: int) -> int | None:
    """Returns the rank that sends this one a block's sum of gradients so far; None where this rank begins the sum."""
    before = call.before(source)
    return None if before == source else before  # from its owner a block comes first to this rank: no sum before


def _added(own: tuple[torch.Tensor, ...], arrived: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns this rank's new gradients plus those that arrived, added in place: nobody else has these tensors."""
    return tuple(mine.add_(other) for mine, other in zip(own, arrived, strict=True))


def _shapes(shapes: tuple[tuple[int, ...], ...], positions: int) -> list[list[int]]:
    """Returns the shapes of a rank's keys and values that has so many positions."""
    return [[positions if d == POSITIONS else n for d, n in enumerate(shape)] for shape in shapes]


_KEYS, _SUMS = 0, 2  # kinds of messages, of two tensors each


class _Rounds:
    """The rounds of one kind of messages; holds what is sent until it has left, so its memory is not used again."""

    def __init__(self, call: Call, kind: int):
        self.call, self.kind = call, kind
        self.pending: list[tuple[Pending, torch.Tensor]] = []

    def begin(self, sends: list[tuple[int, int, Tensors]], receives: list[tuple[int, int, Tensors]]) -> list[_Arriving]:
        """Begin a round of messages without waiting; returns what arrives, in the order of `receives`.

        sends     (to which rank, whose block, its tensors)
        receives  (from which rank, whose block, tensors of the same dtypes)
        """
        kind = self.kind
        self.pending = [(p, t) for p, t in self.pending if not p.over]  # what has left gives its memory back
        # a tag for each tensor: keys and sums of one block may be on their way between two ranks at once. A rank
        # without positions sends nothing, and nobody expects it
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
        """Wait until everything has left."""
        for pending, _ in self.pending:
            pending.wait()
        self.pending.clear()


class _Arriving:
    """The tensors of the block of rank `source`, while they are received."""

    def __init__(self, call: Call, source: int, like: Tensors):
        assert call.keys is not None
        shapes = _shapes(call.shapes, call.keys.counts[source])
        self.tensors = tuple(t.new_empty(shape) for t, shape in zip(like, shapes, strict=True))
        self.pending: list[Pending] = []

    def received(self) -> Tensors:
        """Returns the tensors of the block that arrives; waits for them."""
        for pending in self.pending:
            pending.wait()
        return self.tensors
