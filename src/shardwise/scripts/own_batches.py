"""Batches that a script makes by itself, without a loader: rows by `torch.randperm`, a replay buffer, one whole graph.

    x, y = prepared.deal(x, y)      every rank has made the batch, and goes on with its samples of it
    loss_scope="global" or "model"  a batch is what the model is called with; nothing is dealt

What this does not do: go on within an epoch from a checkpoint; the script knows where it stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

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
