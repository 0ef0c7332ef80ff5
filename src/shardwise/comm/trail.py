"""Detect ranks that take different branches: each writes to shared memory what it is about to run, and compares.

Each rank writes (position, event) into memory that all ranks of the host have mapped, and checks whether another rank
wrote a different event at the same position. Nobody waits. Of two ranks that differ, the later one finds it, before it
enters a collective that would hang, abort, or silently mix two blocks of one size.

    rank 0   0 embed   1 block.0   2 block.1   ...
    rank 1   0 embed   1 block.1  <- "rank 1 runs block.1 where rank 0 runs block.0"

What this does not do: compare ranks of different hosts. There the step's control row, or a timeout, shows it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import tempfile
import zlib
from pathlib import Path

import torch

from shardwise.comm.collectives import Axis, barrier, gather_rows
from shardwise.errors import RunError
from shardwise.host import put, read

_UNITS = (
    "Under zero=3 every rank must run the same units in the same order, since each unit is gathered from all of them; "
    "one process would take one branch for all samples. If the choice is made sample by sample, use zero=2 with "
    'Task(branches="per_sample"), in a script prepare(..., branches="per_sample"), or larger units (wrap=); if a term '
    "of the loss is left out where a batch has nothing of it, give it as a sum that may be of nothing, in a script "
    "prepared.backward(term.sum() / max(n, 1), mean_over=n) of its own"
)
_RING = 4096  # positions kept of each rank; collectives keep ranks closer than that
_CONTROL_BITS = 40


class Trail:
    """This rank's sequence of events, in memory that the ranks of its host share. Its constructor is collective.

    axis    ranks that must run the same events in the same order
    events  all names that `mark` may be given, in the same order on all ranks
    why     text of the error: why ranks must not differ, and what to do
    """

    def __init__(self, axis: Axis, events: list[str], device: torch.device, why: str = _UNITS):
        self.axis = axis
        self.why = why
        self.number = {name: index for index, name in enumerate(events)}
        self.events = events
        self.position = 0
        self._others: list[int] = []
        self._table: memoryview | None = None
        if not axis.silent:
            self._share(device)

    def _share(self, device: torch.device) -> None:
        """Maps one file for the ranks of this host, and deletes its name when all have mapped it. Collective."""
        host = float(zlib.crc32(socket.gethostname().encode()))
        mine = put([host, float(secrets.randbits(_CONTROL_BITS))], device)
        rows = read(gather_rows(mine, self.axis), "hosts")
        together = [index for index, row in enumerate(rows) if row[0] == host]
        self._others = [index for index in together if index != self.axis.index]
        path = Path(tempfile.gettempdir()) / f"shardwise-trail-{int(rows[together[0]][1]):x}"
        size = self.axis.size * _RING * 16
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, size)
            self._table = memoryview(mmap.mmap(handle, size)).cast("q")
        finally:
            os.close(handle)
        barrier(self.axis)
        if self.axis.index == together[0]:  # the memory stays as long as a process has it mapped
            path.unlink()
        barrier(self.axis)

    def mark(self, event: str) -> None:
        """Writes the event at the next position; `RunError` if another rank of the host has another one there."""
        # one rank, or a rehearsal
        if self._table is None:
            return
        self.position += 1
        place, number = self.position % _RING, self.number[event]
        at = 2 * (self.axis.index * _RING + place)
        self._table[at + 1] = number  # written before the position, which makes it valid for other ranks
        self._table[at] = self.position
        for other in self._others:
            at = 2 * (other * _RING + place)
            if self._table[at] == self.position and self._table[at + 1] != number:
                self.refuse(event, other, self.events[self._table[at + 1]])

    def refuse(self, event: str, other: int, theirs: str) -> None:
        """Raises the `RunError` for this rank at `event` and rank `other` (index on the axis) at `theirs`."""
        raise RunError(
            f"a branch differs between ranks: rank {self.axis.ranks[self.axis.index]} comes to {event} where rank "
            f'{self.axis.ranks[other]} came to {theirs}. {self.why}; if it is random, use randomness="global"'
        )
