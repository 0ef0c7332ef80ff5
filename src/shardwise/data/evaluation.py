"""Reads held-out data: every sample once, in the order of the source, as this rank's parts.

How: the batches of an unshuffled epoch, one micro-batch each; the last may be short. Every rank takes the
same number of steps; one without a sample in a step gets a stand-in that counts 0.

What it does not do: read ahead, or save a position; an evaluation always starts at the first sample.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.data.order import Order
from shardwise.data.steps import Steps, length_of
from shardwise.dataset import Source
from shardwise.layout.dealing import Share


def evaluation_parts(source: Source, batch_size: int, data_rank: int = 0, data_ranks: int = 1) -> Iterator[list[Share]]:
    """Yields the parts of this rank in each step of one pass over `source`.

    batch_size              samples of a step, over all ranks
    data_rank, data_ranks   this rank's index among those that samples are dealt to, and their number
    """
    length = length_of(source)
    order = Order(length, shuffle=False)
    steps = Steps(source, order, batch_size, data_rank=data_rank, data_ranks=data_ranks)
    return (parts for parts, _ in steps.walk(0, length))
