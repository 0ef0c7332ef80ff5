"""Sets the scheduling policy of ranks that share CPU cores, so that waking threads do not preempt others.

A blocking collective of gloo passes through four threads, each woken by the one before. Under Linux's default policy
a thread that wakes may take the core from one that it should wait for, or wait for its time slice of 3 to 4 ms:
between two ranks on two cores, a small all-reduce took 0.15 ms in one half of the cases and 4 ms in the other. Under
SCHED_BATCH, which any user may ask for, threads that wake do not preempt: 0.06 ms, nine times in ten below 0.09
(sched(7)).
"""

from __future__ import annotations

import os


def take_turns() -> None:
    """Sets SCHED_BATCH for this rank's threads and those they start, if the group's collectives run on CPUs (Linux).

    A policy other than the default one (real time, idle) is kept. The process group must be open.
    """
    import torch.distributed as dist

    from shardwise.device import group_on_host

    if not hasattr(os, "SCHED_BATCH") or dist.get_world_size() == 1 or not group_on_host():
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except (ProcessLookupError, PermissionError):  # it has ended; a container may forbid the call
            continue
