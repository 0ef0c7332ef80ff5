"""Rates of the disk on which temporary files lie, as a tier's file is written and read (tiers/disk)."""

from __future__ import annotations

import os
import tempfile
import time

from shardwise.errors import RefusedPlan
from shardwise.tiers.disk import BUFFERS, StateFile
from shardwise.tiers.subgroups import Subgroup

GROUP_BYTES, GROUPS = 32 << 20, 6


def disk_rate() -> float:
    """Returns bytes a second of a disk that is written and read in turn, past the page cache where it can be."""
    try:
        rates = file_rates(GROUPS, GROUP_BYTES)
    except RefusedPlan:  # the folder lies in memory, or has no room: no tier, and files are written there all the same
        return _written_rate()
    return 2 / (1 / rates["write"] + 1 / rates["read"])


def file_rates(groups: int, group_bytes: int) -> dict[str, float]:
    """Returns {"write", "read": bytes a second} of a tier's file of `groups` sub-groups, moved without an update.

    Raises `RefusedPlan` where temporary files lie in memory, or have no room.
    """
    parts = [Subgroup([], number, size=group_bytes) for number in range(groups)]
    file, rates = StateFile(parts, 0), {}
    for part in parts[:BUFFERS]:
        part.buffer.random_(0, 256)
    for name, move in (("write", file.store), ("read", file.fetch)):
        if name == "read":
            file.commit(parts)
        began = time.perf_counter()
        for part in parts:
            file.wait_for(part)
            move(part)
        file.finish()
        rates[name] = groups * group_bytes / (time.perf_counter() - began)
    for part in parts:  # tensors of the mapped file, whose room is given back with the last of them
        part.rest = part.after = part.buffer
    file.close()
    return rates


def _written_rate() -> float:
    """Returns bytes a second that a synced file of 64 MiB takes."""
    data = os.urandom(2**20) * 64
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return len(data) / (time.perf_counter() - began)
