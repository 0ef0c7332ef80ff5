"""Sequence and time of each row of a `PackedSequence`, for random numbers by global index.

torch packs sequences of different lengths by time: first the first tokens of all, then the second tokens of those that
have one. So which row belongs to which sequence depends on the lengths of all sequences packed together. The random
numbers of a row (dropout between the layers of a packed LSTM) are indexed by its sequence and time. If all sequences
are equally long, torch's recurrent layers view the rows as (times, sequences).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence


class PackedRows(NamedTuple):
    """The order of rows in a `PackedSequence`."""

    batch_sizes: torch.Tensor  # (times,) how many sequences are that long
    order: torch.Tensor | None  # (sequences,) the sequence at each place among those of a time; None: as given

    @property
    def sequences(self) -> int:
        return int(self.batch_sizes[0])

    def as_rows(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns `shape` as (rows, ...) if it has these rows, as (rows, ...) or (times, sequences, ...); else None."""
        sizes = self.batch_sizes
        # all equally long: torch's layers then compute on (times, sequences, ...) in the order of the rows
        if sizes[0] == sizes[-1] and shape[:2] == (len(sizes), int(sizes[0])):
            return (shape[0] * shape[1], *shape[2:])
        return shape if shape and shape[0] == int(sizes.sum()) else None

    def numbers(self, start: int, count: int, total: int, device: torch.device) -> torch.Tensor:
        """Returns (rows,) int64 a global index of each row, from its time and sequence, the same on any rank.

        The sequences are those of samples [start, start + count) of the micro-batch's `total`, as many for each.
        """
        sizes, of_each = self.batch_sizes, self.sequences // max(count, 1)
        rows = torch.arange(int(sizes.sum()))
        time = torch.arange(len(sizes)).repeat_interleave(sizes)
        # rows of a time follow those of the times before
        place = (rows - (sizes.cumsum(0) - sizes)[time]).to(device)
        sequence = place if self.order is None else self.order[place]
        return time.to(device) * (of_each * total) + of_each * start + sequence


def packed_among(arguments: Iterable[Any]) -> PackedRows | None:
    """Returns the `PackedRows` of the first packed sequence among a module's arguments; None if there is none."""
    for one in arguments:
        if isinstance(one, PackedSequence):
            return PackedRows(one.batch_sizes, one.sorted_indices)
    return None
