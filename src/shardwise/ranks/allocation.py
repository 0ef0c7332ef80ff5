"""Let ranks on a CPU keep memory that they free (malloc settings), since to ask for it again is slow; or give it back.

glibc hands freed memory back to the system from 128 KiB on, so every step of a training loop asks for the same pages
again, and each first touch is a fault: on virtual machines an expensive one. With two ranks, a step of six linear
layers took 12 to 22 ms and 120 to 190 faults; with memory kept, 9 to 16 ms and 5 to 8, and no share of the time was the
system's (mallopt(3), PyTorch's performance guide recommends other allocators for the same reason).
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 32 * 2**20  # of what may come from the heap, which glibc allows
AT_FIRST = 128 * 2**10  # glibc's own thresholds, until the first large block is freed
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have malloc keep what this rank frees, where ranks compute on CPUs under glibc; returns whether it will.

    What somebody chose by glibc's own variables is left alone. The process group must be open.
    """
    from shardwise.device import group_on_host

    return group_on_host() and _set_thresholds(LARGEST, 2**31 - 1)


def give_back_at_once() -> bool:
    """Have malloc return each large block to the system when it is freed; returns whether it does (glibc alone).

    For ranks that move what they hold to a disk. Of blocks that come and go on the heap few fit where another was: two
    ranks with 0.35 GB in use held 1.6 GB, and 0.6 GB so. What somebody chose by glibc's own variables is left alone.
    """
    chosen = _set_thresholds(AT_FIRST, AT_FIRST)
    give_back_freed()
    return chosen


def _set_thresholds(largest: int, trim: int) -> bool:
    """Set malloc's thresholds: bytes from which a block is mapped by itself, free bytes at the heap's end that are
    returned to the system. Returns whether both were set: not under another C library, or where variables set them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in CHOSEN):  # another C library, or somebody's choice
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, largest)) and bool(mallopt(M_TRIM_THRESHOLD, trim))


def give_back_freed() -> None:
    """Have malloc return free memory between used blocks to the system, which it keeps otherwise (glibc alone)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
