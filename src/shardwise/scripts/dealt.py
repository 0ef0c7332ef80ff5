"""Deals the samples of a batch over ranks: those that count on a rank, and those that it holds; batches without a
loader.

    8 samples, 4 ranks                0 1 | 2 3 | 4 5 | 6 7
    4 samples                          0  |  1  |  2  |  3
    4 samples, two to a rank          0 1 | 2 3 | 0 1 | 2 3      ranks 2 and 3 hold samples that count elsewhere
    1 sample                           0  |  0  |  0  |  0       only rank 0 counts it

A batch that is smaller than earlier ones (an epoch's last) is dealt two samples to a rank if it has too few for two on
every rank, because a script's squeeze() would remove the dim of a single sample. The sum over ranks does not change.

    x, y = prepared.deal(x, y)      every rank has made the batch, and goes on with its samples of it
    loss_scope="global" or "model"  a batch is what the model is called with; nothing is dealt

What this does not do: resume from a checkpoint within an epoch of batches that a script makes itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.layout.dealing import Share, cut


@dataclass(frozen=True)
class Dealt:
    """One rank's samples of a batch; the batches in the two `Share`s are None.

    part    the samples that count on this rank: `count` of them from `start` on, of `total`
    local   the samples that this rank's batch holds; differs from `part` if `part.count` is 0
    even    Whether every rank counts equally many
    """

    part: Share
    local: Share
    even: bool


def deal(total: int, ranks: int, rank: int, *, several: bool = False) -> Dealt:
    """Returns the `Dealt` of rank `rank` of `ranks` for a batch of `total` samples.

    several  Whether each rank that counts any gets two or more, if possible; the other ranks hold copies of their
             samples
    """
    holders = max(1, min(ranks, total // 2)) if several else max(1, min(ranks, total))
    if holders < ranks and not several:
        low, high = cut(total, ranks, rank)  # one each, spread over the ranks
        local_range = (low, high) if high > low else (0, 1)  # a rank without a sample runs the first as a stand-in
    else:
        local_range = cut(total, holders, rank % holders)
        low, high = local_range if rank < holders else (local_range[0], local_range[0])
    part = Share(None, high - low, low, total)
    local = Share(None, local_range[1] - local_range[0], local_range[0], total)
    return Dealt(part, local, holders == ranks and total % ranks == 0)


class Dealer:
    """Deals the batches of one epoch over `ranks` data ranks, for data rank `rank`."""

    def __init__(self, ranks: int, rank: int, beside: Callable[[], bool] = bool) -> None:
        """`beside` returns whether the loss is also of another loader's samples; batches are then dealt singly."""
        self.ranks, self.rank, self._beside = ranks, rank, beside
        self._most = 0  # samples of the largest batch so far

    def deal(self, total: int) -> Dealt:
        """Returns this rank's `Dealt` of the next batch, which has `total` samples."""
        few = self.ranks > 1 and 2 <= total < 2 * self.ranks
        several = few and total < self._most and not self._beside()
        self._most = max(self._most, total)
        return deal(total, self.ranks, self.rank, several=several)


UNFED = (
    "prepare was given no loader, so which samples the model is called with is not known: deal out each batch that the "
    'script makes, x, y = prepared.deal(x, y), before the model sees it; or take prepare(..., loss_scope="global"), '
    'which spreads the model over the samples that it is called with, or loss_scope="model", by which every rank runs '
    "it on all of them. What no loss comes of (an action) is computed under torch.no_grad(). A model beside "
    "another one of the loop is given its loader: prepare(model, optimizer, first.loader)"
)


class OwnBatches:
    """An endless loader of the batches that a script makes itself and gives to `deal`."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._epoch: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._waiting.popleft()

    def deal(self, parts: Any, batch: Any) -> Any:
        """Returns this rank's samples of `batch`, cut by `parts`, the `PartLoader` over this loader."""
        self._waiting.append(batch)
        if self._epoch is None:
            self._epoch = iter(parts)
        return next(self._epoch)
