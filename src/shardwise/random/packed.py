"""Which sequence and which time each row of a packed sequence has, for draws by index.

torch packs sequences of different lengths by time: first the first words of all, then the second words of those that
have one, so which row is whose hangs on the lengths of all sequences that lie together. A draw for such rows (dropout
between the layers of a packed LSTM) is dealt by the sequence and the time that a row belongs to. Where all sequences
are equally long, torch's recurrent layers take the rows apart into times and sequences, which lie as the rows do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence


class PackedRows(NamedTuple):
    """The order of a `PackedSequence`: how many sequences have each time, and the sequence at each place."""

    batch_sizes: torch.Tensor
    order: torch.Tensor | None  # None: as they were given

    @property
    def sequences(self) -> int:
        return int(self.batch_sizes[0])

    def as_rows(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns (rows, ...) for the shape of a tensor that has these rows, or (times, sequences, ...); else None."""
        sizes = self.batch_sizes
        # all equally long: torch's layers then compute on (times, sequences, ...) in the order of the rows
        if sizes[0] == sizes[-1] and shape[:2] == (len(sizes), int(sizes[0])):
            return (shape[0] * shape[1], *shape[2:])
        return shape if shape and shape[0] == int(sizes.sum()) else None

    def numbers(self, start: int, count: int, total: int, device: torch.device) -> torch.Tensor:
        """Returns (rows,) one number for each row's time and sequence, alike on whichever rank the sequence lies.

        `count` samples of all `total`, from `start` on, have these sequences, each as many.
        """
        sizes, of_each = self.batch_sizes, self.sequences // max(count, 1)
        rows = torch.arange(int(sizes.sum()))
        time = torch.arange(len(sizes)).repeat_interleave(sizes)
        # rows of a time follow those of the times before
        place = (rows - (sizes.cumsum(0) - sizes)[time]).to(device)
        sequence = place if self.order is None else self.order[place]
        return time.to(device) * (of_each * total) + of_each * start + sequence


def packed_among(arguments: Iterable[Any]) -> PackedRows | None:
    """Returns the rows of the first packed sequence among a module's arguments; None where there is none."""
    for one in arguments:
        if isinstance(one, PackedSequence):
            return PackedRows(one.batch_sizes, one.sorted_indices)
    return None
