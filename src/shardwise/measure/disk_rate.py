"""Measures the disk of the temporary folder, written and read as an offloading tier does it (tiers/disk)."""

from __future__ import annotations

import os
import tempfile
import time

from shardwise.errors import RefusedPlan
from shardwise.tiers.disk import BUFFERS, StateFile
from shardwise.tiers.subgroups import Subgroup

GROUP_BYTES, GROUPS = 32 << 20, 6


def disk_rate() -> float:
    """Returns bytes a second of the disk when written and read in turn, without the page cache if possible."""
    try:
        rates = file_rates(GROUPS, GROUP_BYTES)
    except RefusedPlan:  # the folder is in memory or has no room, so it cannot be a tier; plain files are timed
        return _written_rate()
    return 2 / (1 / rates["write"] + 1 / rates["read"])


def file_rates(groups: int, group_bytes: int) -> dict[str, float]:
    """Returns {"write": bytes a second, "read": bytes a second} of a tier's file.

    groups, group_bytes  number of sub-groups that are moved, and bytes of each

    Raises `RefusedPlan` if the temporary folder is in memory, or has no room.
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
    for part in parts:  # the mapped file is freed with the last tensor in it
        part.rest = part.after = part.buffer
    file.close()
    return rates


def _written_rate() -> float:
    """Returns bytes a second at which a file of 64 MiB is written and synced."""
    data = os.urandom(2**20) * 64
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return len(data) / (time.perf_counter() - began)
