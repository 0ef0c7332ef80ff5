"""Maps positions in the sample order to steps, and reads this rank's parts of a step.

How: a step starts at a position and takes a batch from there, at most to the end of the epoch. The batch is
dealt by `layout.dealing` over micro-batches and ranks; each part is one `source.read` of this rank's samples
only. Random numbers used in reading are those of one process (`random.reading_seeds`): a dataset's are seeded by
sample. If a function that gets several samples (a collate function that masks words) uses random numbers, or may pad
to the longest sample, every rank reads the whole batch and keeps its parts.

What it does not do: remember a position (`loader`) or read ahead (`prefetch`).
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
    """A map from positions in the data to steps and their parts; immutable, so that a thread may share it."""

    source: Source
    order: Order
    batch_size: int  # samples of a step, over all ranks
    accumulate: int = 1  # micro-batches of a step
    data_rank: int = 0  # this rank's index among the `data_ranks` that samples are dealt to
    data_ranks: int = 1
    drop_last: bool = False  # whether an epoch's last batch is left out if it is short
    draws: bool | None = None  # whether reading uses random numbers; None: unknown; False: RNGs are not touched
    whole: bool = False  # whether the whole batch is read, of which this rank's parts are kept

    def __post_init__(self) -> None:
        check_ranks(self.data_rank, self.data_ranks)
        if self.batch_size < 1 or self.accumulate < 1:
            raise InputError(
                f"batch_size and accumulate must be at least 1, got {self.batch_size} and {self.accumulate}"
            )

    def span(self, position: int) -> tuple[int, int]:
        """Returns positions (start, stop) of the step that begins at or after `position`, within one epoch."""
        length = self.order.length
        end = (position // length + 1) * length
        if self.drop_last and end - position < self.batch_size:
            position, end = end, end + length
        return position, min(position + self.batch_size, end)

    def walk(self, position: int, end: int | None) -> Iterator[tuple[list[Share], int]]:
        """Yields (parts, position after them) of each step from `position` up to position `end` (None: endlessly)."""
        steps = self
        start, stop = self.span(position)
        while end is None or stop <= end:
            parts, steps = steps.read(start, stop)
            yield parts, stop
            start, stop = self.span(stop)

    def read(self, start: int, stop: int) -> tuple[list[Share], Steps]:
        """Returns (this rank's parts of the batch at positions [start, stop), `Steps` to use for the next read).

        The latter know whether this read used random numbers or padding. Raises `InputError` if the source's length has
        changed, or it returns another number of samples.
        """
        now = len(self.source)
        if now != self.order.length:
            raise InputError(
                f"{name_of(self.source)} had {self.order.length} samples when the run began and has {now} now: a "
                "source must not change while it is read; start anew with the data as it is"
            )
        # a thread must not touch the process's RNGs, which the training step uses
        if self.draws is False:
            return self._dealt(start, stop), self
        with drawing(self.order.seed, start // self.order.length, start) as drawn:
            parts = self._dealt(start, stop)
        following = self._having(drawn)
        # a collate function that is random or pads was given this rank's samples alone: read again, the whole batch
        return (parts, following) if following.whole == self.whole else following.read(start, stop)

    def _having(self, drawn: ReadDraws) -> Steps:
        """Returns a copy with `draws` and `whole` set by what a read was seen to do (`drawn`)."""
        return replace(
            self,
            draws=self.draws or drawn.by_sample or drawn.together or None,
            whole=self.whole or ((drawn.together or drawn.pads) and self.accumulate * self.data_ranks > 1),
        )

    def _dealt(self, start: int, stop: int) -> list[Share]:
        """Returns this rank's `Share` of each micro-batch of the step at positions [start, stop).

        A share without a sample gets one stand-in, and `count` 0.
        """
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
    """Returns `source.read(indices)`; `InputError` if the batch has another number of samples."""
    batch = source.read(indices)
    check_samples(batch, len(indices), name=f"{type(source).__name__}.read(...)")
    return batch


def length_of(source: Source) -> int:
    """Returns `len(source)`; raises `InputError` if the source is empty or is no `Source`."""
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
