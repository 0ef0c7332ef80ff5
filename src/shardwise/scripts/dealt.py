"""Which samples of a batch a rank counts and which it holds (in most batches the same ones); batches without a loader.

    8 samples, 4 ranks                0 1 | 2 3 | 4 5 | 6 7
    4 samples                          0  |  1  |  2  |  3
    4 samples, two to a rank          0 1 | 2 3 | 0 1 | 2 3      ranks 2 and 3 hold samples that count elsewhere
    1 sample                           0  |  0  |  0  |  0       only rank 0 counts it

A batch that is smaller than others before it (an epoch's last) is dealt two to a rank where it has too few for all: a
script's squeeze() would take away the dim of one sample. The sum over ranks stays what it is.

    x, y = prepared.deal(x, y)      every rank has made the batch, and goes on with its samples of it
    loss_scope="global" or "model"  a batch is what the model is called with; nothing is dealt

What this does not do: go on within an epoch of a script's own batches from a checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.layout.dealing import Share, cut


@dataclass(frozen=True)
class Dealt:
    """One rank's samples of a batch.

    part    those that count: `count` of them from `start` on, of `total`
    local   those that its batch holds; other than `part` where none count
    even    every rank counts as many
    """

    part: Share
    local: Share
    even: bool


def deal(total: int, ranks: int, rank: int, *, several: bool = False) -> Dealt:
    """Returns this rank's part of `total` samples. `several`: two or more to each rank that has any, where possible."""
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
    """Deals the batches of one pass over a loader."""

    def __init__(self, ranks: int, rank: int, beside: Callable[[], bool] = bool) -> None:
        """`beside`: whether losses are of another loader's samples too; every rank then counts some of this one's."""
        self.ranks, self.rank, self._beside = ranks, rank, beside
        self._most = 0  # samples of a batch

    def deal(self, total: int) -> Dealt:
        """Returns this rank's `Dealt` of the next batch, of `total` samples; each rank is dealt by the same rule."""
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
        """Returns this rank's samples of `batch`; `parts` is the `PartLoader` over this loader, which cuts it."""
        self._waiting.append(batch)
        if self._epoch is None:
            self._epoch = iter(parts)
        return next(self._epoch)
