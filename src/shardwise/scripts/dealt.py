"""Which samples of a batch a rank counts and which it holds; in most batches the same ones.

    8 samples, 4 ranks                0 1 | 2 3 | 4 5 | 6 7
    4 samples                          0  |  1  |  2  |  3
    4 samples, two to a rank          0 1 | 2 3 | 0 1 | 2 3      ranks 2 and 3 hold samples that count elsewhere
    1 sample                           0  |  0  |  0  |  0       only rank 0 counts it

Of one sample by itself nothing shows whether others would change what is asked of it. So a batch on which model and
loss are looked at is dealt two to a rank where it has too few: the sum over ranks stays what it is. So is a batch that
is smaller than others before it (an epoch's last): a script's squeeze() would take away the dim of one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.layout.dealing import Share, cut


@dataclass(frozen=True)
class Dealt:
    """One rank's samples of a batch.

    part    those that count: `count` of them from `start` on, of `total`
    held    those that its batch holds; other than `part` where none count
    even    every rank counts as many
    several every rank holds two or more
    elsewhere   some rank holds samples that count on another one
    """

    part: Share
    held: Share
    even: bool
    several: bool
    elsewhere: bool = False

    def proportion(self, ranks: int) -> float:
        """Returns the factor for a mean over this rank's samples, so that the mean over ranks is that over samples."""
        return self.part.count * ranks / self.part.total if self.part.total else 0.0


def deal(total: int, ranks: int, rank: int, *, several: bool = False, uneven: bool = False) -> Dealt:
    """Returns this rank's part of `total` samples.

    several   two or more to each rank that has any, where possible
    uneven    one of the second rank's goes to the first, so that what hangs on the number of samples shows
    """
    if uneven:
        low, high = cut(total, ranks, rank)
        part = Share(None, high + (rank == 0) - low - (rank == 1), low + (rank == 1), total)
        return Dealt(part, part, False, total // ranks > 2)
    holders = max(1, min(ranks, total // 2)) if several else max(1, min(ranks, total))
    if holders < ranks and not several:
        low, high = cut(total, ranks, rank)  # one each, spread over the ranks
        held = (low, high) if high > low else (0, 1)
    else:
        held = cut(total, holders, rank % holders)
        low, high = held if rank < holders else (held[0], held[0])
    part = Share(None, high - low, low, total)
    whole = Share(None, held[1] - held[0], held[0], total)
    return Dealt(part, whole, holders == ranks and total % ranks == 0, total // holders > 1, holders < ranks)


class Dealer:
    """Deals the batches of one pass over a loader; asks `wanted` whether one is to be looked at."""

    def __init__(
        self, ranks: int, rank: int, wanted: Callable[[], bool], uneven: Callable[[], bool] = bool,
        beside: Callable[[], bool] = bool,
    ) -> None:  # fmt: skip
        """`beside`: losses are of another loader's samples too, so that every rank should count some of this one's."""
        self.ranks, self.rank, self._wanted, self._uneven, self._beside = ranks, rank, wanted, uneven, beside
        self._promised = False  # a batch that was dealt for a look is on its way (workers read ahead)
        self._most = 0  # samples of a batch

    def deal(self, total: int) -> Dealt:
        """Returns how the next batch is dealt; the same on every rank."""
        few = self.ranks > 1 and 2 <= total < 2 * self.ranks
        looked_at = few and not self._promised and self._wanted()
        several = looked_at or (few and total < self._most and not self._beside())
        self._promised |= looked_at
        self._most = max(self._most, total)
        if self.ranks > 1 and total >= 2 * self.ranks and self._uneven():
            return deal(total, self.ranks, self.rank, uneven=True)
        return deal(total, self.ranks, self.rank, several=several)

    def handed_out(self, dealt: Dealt) -> None:
        """Note that the script has gone through a batch dealt so."""
        if dealt.several and dealt.part.total >= self._most:
            self._promised = False
