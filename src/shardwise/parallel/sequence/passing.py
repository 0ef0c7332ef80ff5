"""Pass keys, values and their gradients around a ring, as pairs' `Call` has it. A plan's key would come by `Axis`.

A block goes from one rank that reads any of it to the next, past those that do not; the next one comes while the one
at hand is computed. The sum of its gradients goes the same way, then to its owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.comm import Axis, Pending, receive, send
from shardwise.parallel.sequence.kernels import wide
from shardwise.parallel.sequence.layers import POSITIONS
from shardwise.parallel.sequence.pairs import Call


def blocks_passing(call: Call, mine: tuple[torch.Tensor, ...]) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Yields (rank, its tensors) of this rank, then of those whose keys it reads; the next come while some are used."""
    axis, me = call.axis, call.axis.index
    if call.keys is None:  # whole on every rank: nothing passes
        yield me, mine
        return
    block, sent = mine, _Sent(axis)
    for step in range(axis.size):
        source, coming = (me - step) % axis.size, (me - step - 1) % axis.size
        if step == 0 or call.before(source) is not None:  # this rank has the block: it reads it, or owns it
            sent.add(block, call.after(source), _KEYS, source)
        # posted before the block at hand is yielded, so that the next one arrives while it is used
        arriving = None
        if step + 1 < axis.size and call.before(coming) is not None:
            arriving = _Arriving(call, coming, mine, call.before(coming), _KEYS)
        if step == 0 or call.before(source) is not None:
            yield source, block
        block = arriving.received() if arriving is not None else ()
    sent.wait()


def gradients_around(call: Call, mine: tuple[torch.Tensor, ...], block: Any) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of this rank's tensors, summed over the ranks that used them: sums travel with their block.

    The sum of a block begins at the first rank that it comes to, and goes to its owner from the last one.

    block  (source, *tensors of that rank): this rank's summand of their gradients
    """
    axis, me = call.axis, call.axis.index
    if call.keys is None:
        return block(me, *mine)
    like = tuple(tensor.new_empty(0, dtype=wide(tensor.dtype)) for tensor in mine)
    own: tuple[torch.Tensor, ...] = ()
    sent = _Sent(axis)
    sums: dict[int, _Arriving] = {}  # what other ranks have summed of the next block, on its way
    for source, tensors in blocks_passing(call, mine):
        gradients = block(source, *tensors)
        if source in sums:
            gradients = _added(gradients, sums.pop(source).received())
        if source == me:
            own = gradients  # stays here; what other ranks add to it comes at the end
        else:
            after = call.after(source)
            sent.add(gradients, source if after is None else after, _SUMS, source)
        # the next block that this rank will read: its sum is received while its gradients are computed
        coming = (source - 1) % axis.size
        while coming != me and call.before(coming) is None:
            coming = (coming - 1) % axis.size
        before = call.before(coming)
        if before is not None and before != coming:  # from its owner a block comes first to this rank: no sum before
            sums[coming] = _Arriving(call, coming, like, before, _SUMS)
        del gradients, tensors  # not kept while the next block is computed
    if call.ways[me]:
        home = _Arriving(call, me, like, call.ways[me][-1], _SUMS).received()
        own = _added(own, home)
    sent.wait()
    return own


def _added(sums: tuple[torch.Tensor, ...], more: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns what this rank has just made, with what came added to it, in place: nobody else has these tensors."""
    return tuple(mine.add_(other) for mine, other in zip(sums, more, strict=True))


def _shapes(shapes: tuple[tuple[int, ...], ...], positions: int) -> list[list[int]]:
    """Returns the shapes of a rank's keys and values that has so many positions."""
    return [[positions if d == POSITIONS else n for d, n in enumerate(shape)] for shape in shapes]


_KEYS, _SUMS = 0, 2  # kinds of messages, of two tensors each


class _Sent:
    """Holds tensors that are being sent until the sends have ended, so that their memory is not used again."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.pending: list[tuple[Pending, torch.Tensor]] = []

    def add(self, tensors: tuple[torch.Tensor, ...], to: int | None, kind: int, source: int) -> None:
        """Send what is of the block of `source` to a rank; nothing where that is None. Does not wait."""
        self.pending = [(p, t) for p, t in self.pending if not p.over]  # what has left gives its memory back
        for place, tensor in enumerate(tensors if to is not None else ()):
            if tensor.numel() and to is not None:  # a rank without positions sends nothing, and nobody expects it
                out = tensor.contiguous()
                self.pending.append((send(out, self.axis, to, "ring", 4 * source + kind + place), out))

    def wait(self) -> None:
        """Wait until everything has left."""
        for pending, _ in self.pending:
            pending.wait()
        self.pending.clear()


class _Arriving:
    """What is of the block of `source`, on its way here."""

    def __init__(self, call: Call, source: int, like: tuple[torch.Tensor, ...], sender: int | None, kind: int):
        assert call.keys is not None and sender is not None
        shapes = _shapes(call.shapes, call.keys.counts[source])
        self.tensors = tuple(t.new_empty(shape) for t, shape in zip(like, shapes, strict=True))
        # a tag for each tensor: keys and sums of one block may be on their way between two ranks at once
        self.pending = [
            receive(into, call.axis, sender, "ring", 4 * source + kind + place)
            for place, into in enumerate(self.tensors)
            if into.numel()
        ]

    def received(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of the block that arrives; waits for them."""
        for pending in self.pending:
            pending.wait()
        return self.tensors
