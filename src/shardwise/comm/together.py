"""Batch many small all-gathers into few, by concatenating the rows that several tensors need gathered.

A gathering is a generator that describes how one tensor is unsharded. It yields (this rank's row, axis), is sent the
table of all ranks' rows, may yield again, and returns the unsharded tensor. Rows of several gatherings that are over
the same axis are sent in one message.

    weight 1   row -- table --> whole              weights 1, 2, 3   rows of bytes, end to end -- table --> wholes
    weight 2   row -- table --> whole

Bytes on the wire: those of the rows, and up to 15 of padding for each. Besides the results, at most `MOST_BYTES` of
tables are held, or the table of one larger tensor.

What this does not do: check that ranks run the same gatherings in the same order, which they must.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import torch

from shardwise.comm.collectives import Axis, broadcast, gather_rows

# yields (this rank's row (k,), axis), is sent the table (ranks, k) of all rows, ..., and returns its result
Gathering = Generator[tuple[torch.Tensor, Axis], torch.Tensor, Any]
MOST_BYTES = 16 * 2**20
_UNIT = 16  # bytes of the widest dtype; rows begin at multiples of it, so that they can be viewed as any dtype


def ready(value: Any) -> Gathering:
    """Returns a gathering that sends nothing and whose result is `value`."""
    return value
    yield


def gathered_alone(gathering: Gathering) -> Any:
    """Runs one gathering and returns its result. Collective."""
    return next(gathered_together([gathering]))


def gathered_together(gatherings: Iterable[Gathering]) -> Iterator[Any]:
    """Yields the results of `gatherings`, in order; rows of up to `MOST_BYTES` share messages. Collective."""
    begun: list[_Begun] = []
    table_bytes = 0
    for gathering in gatherings:
        gathering_begun = _Begun(gathering)
        if begun and table_bytes + gathering_begun.table_bytes > MOST_BYTES:
            yield from _finished(begun)
            begun, table_bytes = [], 0
        begun.append(gathering_begun)
        table_bytes += gathering_begun.table_bytes
    yield from _finished(begun)


class _Begun:
    """A running gathering, which waits for a table (`asks`) or has its result (`value`)."""

    def __init__(self, gathering: Gathering):
        self.gathering = gathering
        self.asks: tuple[torch.Tensor, Axis] | None = None  # (row, axis) that it yielded; None: `value` is its result
        self.value: Any = None
        self.go_on(None)
        self.table_bytes = 0 if self.asks is None else self.asks[0].nbytes * self.asks[1].size

    def go_on(self, table: Any) -> None:
        """Sends `table` to the generator (None at first), and stores the next row that it yields, or its result."""
        try:
            self.asks = self.gathering.send(table)
        except StopIteration as end:
            self.asks, self.value = None, end.value


def _finished(begun: list[_Begun]) -> Iterator[Any]:
    """Runs these gatherings to their end, in rounds of messages, and yields their results. Collective."""
    while waiting := [gathering for gathering in begun if gathering.asks is not None]:
        # keyed by ranks too, since axes of one name may differ in them, and by device, since shards may be offloaded
        over: dict[tuple[str, tuple[int, ...], torch.device], tuple[Axis, list[_Begun]]] = {}
        for gathering in waiting:
            assert gathering.asks is not None
            row, axis = gathering.asks
            over.setdefault((axis.name, axis.ranks, row.device), (axis, []))[1].append(gathering)
        for axis, some in over.values():
            rows = [gathering.asks[0] for gathering in some if gathering.asks is not None]
            for gathering, table in zip(some, _tables(rows, axis), strict=True):
                gathering.go_on(table)
    for gathering in begun:
        yield gathering.value


def _tables(rows: list[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    """Returns for each row (k,) the table (ranks, k) of that row on all ranks. Collective."""
    if axis.size == 1 or (len(rows) == 1 and rows[0].is_floating_point()):  # no backend sends every dtype
        return [gather_rows(row, axis) for row in rows]
    starts, end = [], 0
    for row in rows:
        starts.append(end)
        end += -(-row.nbytes // _UNIT) * _UNIT
    sent = torch.zeros(end, dtype=torch.uint8, device=rows[0].device)
    for start, row in zip(starts, rows, strict=True):
        sent[start : start + row.nbytes] = row.contiguous().view(torch.uint8)
    table = gather_rows(sent, axis)
    # rows of no elements (of an expert that lies elsewhere) have no bytes to be seen as another dtype
    return [
        table[:, start : start + row.nbytes].contiguous().view(row.dtype) if row.numel() else row.expand(axis.size, 0)
        for start, row in zip(starts, rows, strict=True)
    ]


def broadcast_together(tensors: Sequence[torch.Tensor], axis: Axis, source: int, tag: str) -> None:
    """Overwrites `tensors` on all ranks with those of the axis's `source`-th rank, in one message per dtype."""
    # one buffer has one dtype
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        broadcast(flat, axis, source, tag)
        # the source has its values already
        if axis.index != source:
            for tensor, shared in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(shared.view(tensor.shape))
