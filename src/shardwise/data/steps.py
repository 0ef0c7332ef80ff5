"""Which positions a step covers, and this rank's parts of them, read from a source.

How: a step starts at a position and takes a batch from there, at most to the end of the epoch. The batch is
dealt by `layout.dealing` over micro-batches and ranks; each part is one `source.read` of this rank's samples
only. Random draws are those of one process (`random.reading_seeds`): a dataset's are made by the sample; where
something draws that is given several samples (a collate function that masks words), or may pad them to the longest,
every rank reads the whole batch and keeps its parts.

What it does not do: hold a place in the data (`loader`) or read ahead (`prefetch`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise.data.order import Order
from shardwise.dataset import Source, name_of
from shardwise.errors import InputError
from shardwise.layout.dealing import Share, deal
from shardwise.random.reading_seeds import ReadDraws, drawing
from shardwise.step.batching import check_ranks, check_samples, slice_samples


@dataclass(frozen=True)
class Steps:
    """Maps positions in the data to steps and their parts; immutable, so that a background thread may share it."""

    source: Source
    order: Order
    batch_size: int  # samples of a step, over all ranks
    accumulate: int = 1  # micro-batches of a step
    data_rank: int = 0  # this rank's place among those that samples are dealt to
    data_ranks: int = 1
    drop_last: bool = False  # leave out an epoch's last batch where it is short
    draws: bool | None = None  # whether reading draws; False: generators are left alone, as a thread must
    whole: bool = False  # read the whole batch, and keep this rank's parts

    def __post_init__(self) -> None:
        check_ranks(self.data_rank, self.data_ranks)
        if self.batch_size < 1 or self.accumulate < 1:
            raise InputError(
                f"batch_size and accumulate must be at least 1, got {self.batch_size} and {self.accumulate}"
            )

    def span(self, position: int) -> tuple[int, int]:
        """Returns positions (start, stop) of the step at or after `position`; never across the border of two epochs."""
        length = self.order.length
        end = (position // length + 1) * length
        if self.drop_last and end - position < self.batch_size:
            position, end = end, end + length
        return position, min(position + self.batch_size, end)

    def walk(self, position: int, end: int | None) -> Iterator[tuple[list[Share], int]]:
        """Yields (parts, position after them) of each step from `position` that ends by `end`; None: endlessly."""
        steps = self
        start, stop = self.span(position)
        while end is None or stop <= end:
            parts, steps = steps.read(start, stop)
            yield parts, stop
            start, stop = self.span(stop)

    def read(self, start: int, stop: int) -> tuple[list[Share], Steps]:
        """Returns (parts of the batch at positions [start, stop), steps to read on with: these know if reading draws).

        Raises `InputError` where the source's length changed, or it gives another number of samples.
        """
        now = len(self.source)
        if now != self.order.length:
            raise InputError(
                f"{name_of(self.source)} had {self.order.length} samples when the run began and has {now} now: a "
                "source must not change while it is read; start anew with the data as it is"
            )
        # a thread beside the step may touch no generator: they are the process's
        if self.draws is False:
            return self._dealt(start, stop), self
        with drawing(self.order.seed, start // self.order.length, start) as drawn:
            parts = self._dealt(start, stop)
        following = self._having(drawn)
        # what draws for several samples at once, or pads them, was given this rank's alone: once more, for all
        return (parts, following) if following.whole == self.whole else following.read(start, stop)

    def _having(self, drawn: ReadDraws) -> Steps:
        """Returns these steps, read as what was seen to draw needs it."""
        return replace(
            self,
            draws=self.draws or drawn.by_sample or drawn.together or None,
            whole=self.whole or ((drawn.together or drawn.pads) and self.accumulate * self.data_ranks > 1),
        )

    def _dealt(self, start: int, stop: int) -> list[Share]:
        """Returns this rank's `Share` of each micro-batch of positions [start, stop); one sample stands in for none."""
        indices = self.order.indices(start, stop).tolist()
        samples = len(indices)
        batch = read(self.source, indices) if self.whole else None
        parts = []
        for first, last, offset, total in deal(samples, min(self.accumulate, samples), self.data_ranks, self.data_rank):
            low, high = (first, last) if last > first else (first - offset, first - offset + 1)
            part = slice_samples(batch, low, high) if self.whole else read(self.source, indices[low:high])
            parts.append(Share(batch=part, count=last - first, start=offset, total=total))
        return parts


def read(source: Source, indices: list[int]) -> Any:
    """Returns the source's batch of these samples; `InputError` where it has another number of them."""
    batch = source.read(indices)
    check_samples(batch, len(indices), name=f"{type(source).__name__}.read(...)")
    return batch


def length_of(source: Source) -> int:
    """Returns `len(source)`; raises `InputError` where the source is empty or is no source at all."""
    name = type(source).__name__
    if not isinstance(source, Source):
        raise InputError(
            f"{name} is not a source: a source has __len__() and read(indices) -> batch; "
            "for a torch Dataset use shardwise.data.as_source(dataset)"
        )
    length = len(source)
    if length < 1:
        raise InputError(f"{name} is empty: there are no samples to read")
    return length
