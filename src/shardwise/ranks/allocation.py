"""Sets glibc's malloc to keep the memory that a CPU rank frees, since allocating it again is slow; or to return it.

glibc returns freed blocks of 128 KiB and more to the system, so every step of a training loop allocates the same pages
again, and each first touch is a page fault, expensive on virtual machines. With two ranks, a step of six linear
layers took 12 to 22 ms with 120 to 190 faults; with memory kept, 9 to 16 ms with 5 to 8, and no system time
(mallopt(3); PyTorch's performance guide recommends other allocators for the same reason).
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 32 * 2**20  # bytes; the largest M_MMAP_THRESHOLD that glibc accepts
AT_FIRST = 128 * 2**10  # bytes; glibc's own thresholds, until the first large block is freed
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Sets malloc to keep freed memory if the group's collectives run on CPUs; returns whether it was set (glibc only).

    Does nothing if an environment variable of glibc chooses otherwise. The process group must be open.
    """
    from shardwise.device import group_on_host

    return group_on_host() and _set_thresholds(LARGEST, 2**31 - 1)


def give_back_at_once() -> bool:
    """Sets malloc to return each large block to the system when it is freed; returns whether it was set (glibc only).

    For ranks that offload tensors to a disk, whose heap becomes fragmented: two ranks with 0.35 GB in use held 1.6 GB,
    and with this setting 0.6 GB. Does nothing if an environment variable of glibc chooses otherwise.
    """
    chosen = _set_thresholds(AT_FIRST, AT_FIRST)
    give_back_freed()
    return chosen


def _set_thresholds(largest: int, trim: int) -> bool:
    """Sets malloc's thresholds; returns whether both were set.

    largest   bytes from which a block is mapped by itself
    trim      free bytes at the heap's end from which they are returned to the system

    Sets nothing under another C library, or if an environment variable in `CHOSEN` is set.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in CHOSEN):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, largest)) and bool(mallopt(M_TRIM_THRESHOLD, trim))


def give_back_freed() -> None:
    """Returns free memory between used blocks to the system, which malloc would keep otherwise (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
