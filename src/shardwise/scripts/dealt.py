"""Which samples of a batch a rank counts and which it holds (in most batches the same ones); batches without a loader.

    8 samples, 4 ranks                0 1 | 2 3 | 4 5 | 6 7
    4 samples                          0  |  1  |  2  |  3
    1 sample                           0  |  0  |  0  |  0       only one rank counts it, others hold it as a stand-in

    x, y = prepared.deal(x, y)      every rank has made the batch, and goes on with its samples of it
    loss_scope="global" or "model"  a batch is what the model is called with; nothing is dealt

What this does not do: go on within an epoch of a script's own batches from a checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
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


def deal(total: int, ranks: int, rank: int) -> Dealt:
    """Returns this rank's part of `total` samples; a rank without a sample holds the first one as a stand-in."""
    low, high = cut(total, ranks, rank)
    start, stop = (low, high) if high > low else (0, min(1, total))
    part, local = Share(None, high - low, low, total), Share(None, stop - start, start, total)
    return Dealt(part, local, total % ranks == 0)


UNFED = (
    "prepare was given no loader, so which samples the model is called with is not known: deal out each batch that the "
    'script makes, x, y = prepared.deal(x, y), before the model sees it; or take prepare(..., loss_scope="global"), '
    'which spreads the model over the samples that it is called with, or loss_scope="model", by which every rank runs '
    "it on all of them"
)


class OwnBatches:
    """Stands for a loader: an endless one of the batches that a script gives."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._epoch: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._waiting.popleft()

    def deal(self, parts: Any, batch: Any) -> Any:
        """Returns this rank's samples of one more batch, as its loader `parts` deals them."""
        self._waiting.append(batch)
        if self._epoch is None:
            self._epoch = iter(parts)
        return next(self._epoch)
