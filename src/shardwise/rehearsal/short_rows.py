"""How much of a rank's row must be rehearsed until nothing new can be seen: a schedule repeats itself.

1f1b, rank 0 of 4    F0 F1 F2 F3 B0 F4 | B1 F5 B2 F6 B3 F7 B4 B5 B6 B7        the rest holds no more than before
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.layout.schedule_kinds import Op

Kind = tuple[str, int, int]  # F, B, I or W; stage; samples of the micro-batch


@dataclass(frozen=True)
class _State:
    """What a rank holds when an op begins.

    waiting  micro-batches between their forward and backward (F), or between the two parts of it (I)
    sent     the op whose message was the last: a rank keeps it until it sends the next
    """

    waiting: Counter[Kind]
    sent: Kind | None

    def covers(self, other: _State) -> bool:
        """Whether this state holds at least as much memory as the other.

        A micro-batch more, with its inputs and outputs, is more than any message.
        """
        if self.sent == other.sent:
            return other.waiting <= self.waiting
        message: Counter[Kind] = Counter() if other.sent is None else Counter({("F", *other.sent[1:]): 1})
        return other.waiting + message <= self.waiting


def telling(row: Sequence[Op], sizes: Sequence[int], stages: int) -> list[Op]:
    """Returns the row up to the last op that may hold more than was seen, or that is the first of its kind.

    sizes   samples of each micro-batch
    stages  of all ranks: the first sends no gradient, the last no output
    """
    waiting: Counter[Kind] = Counter()
    sent: Kind | None = None
    seen: dict[Kind, list[_State]] = {}
    last = 0
    for place, op in enumerate(row):
        kind = (op.kind, op.stage, sizes[op.microbatch])
        state = _State(waiting.copy(), sent)
        before = seen.setdefault(kind, [])
        if not any(other.covers(state) for other in before):
            before.append(state)
            last = place + 1
        # a whole backward, or its first half, ends what a forward left; W ends what that first half left
        if op.kind != "F":
            waiting["I" if op.kind == "W" else "F", op.stage, sizes[op.microbatch]] -= 1
        if op.kind in ("F", "I"):
            waiting[kind] += 1
        if (op.kind == "F" and op.stage < stages - 1) or (op.kind in ("B", "I") and op.stage > 0):
            sent = kind
    return list(row[:last])
