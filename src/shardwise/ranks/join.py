"""`join` opens the process group of ranks that a launcher started, or of this process alone.

torchrun, srun, OpenMPI's and MPICH's mpirun, PALS and mpi4py are recognised (`launchers`, `mpi`); ranks without a
master address agree on one (`meet`).
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

from shardwise.guard import points
from shardwise.guard.diagnose import Deadlines
from shardwise.ranks import attempts
from shardwise.ranks.allocation import keep_freed_memory
from shardwise.ranks.launchers import LaunchedPlace
from shardwise.ranks.lost import greet
from shardwise.ranks.meet import MEET_S, await_listener, meet
from shardwise.ranks.mpi import here
from shardwise.ranks.reach import talk_between_hosts
from shardwise.ranks.scheduling import take_turns
from shardwise.ranks.watching import be_watched


def join(
    timeout_s: float | None = None, *, meet_s: float = MEET_S, deadlines: Deadlines | None = None
) -> tuple[int, int]:
    """Opens the default process group unless there is one; returns (rank, world size).

    The group uses gloo for CPU tensors and, if there is a CUDA device, NCCL for CUDA tensors. Without a launcher this
    process is the only rank.

    timeout_s   timeout of collectives in seconds; None: torch's own
    meet_s      seconds that ranks wait for each other at the start
    deadlines   seconds in which a rank must do something, by phase; None: a watcher process of each host ends only
                ranks that can never go on

    Raises `InputError` for an environment that is partial or contradicts itself, `RunError` that names the ranks that
    did not come.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        _open_group(timeout_s, meet_s)
    take_turns()
    if dist.get_world_size() > 1:  # a process alone may be a notebook or a test: leave its settings
        keep_freed_memory()
        be_watched(deadlines)
        greet()
    return dist.get_rank(), dist.get_world_size()


def _open_group(timeout_s: float | None, meet_s: float) -> None:
    """Opens the default process group: of one process, over torchrun's own store, or over one that `meet` makes."""
    import torch.distributed as dist

    place = here()
    options: dict[str, Any] = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    if place is None:
        _be_alone(options)
    elif place.launcher == "torchrun" and attempts.has_agent():  # the agent holds the store, and sets OMP_NUM_THREADS
        local_rank = place.rank if place.local_rank is None else place.local_rank
        until = time.monotonic() + meet_s
        await_listener(place, until)
        agent = attempts.agent_store(place.rank, place.world_size)
        store = attempts.fresh(agent, place.rank, place.world_size, meet_s)
        # check now that hosts reach each other, since gloo may wait for hours
        if place.master is not None:
            talk_between_hosts(store, place.rank, place.world_size, local_rank, place.master[0], until)
        options |= {"rank": place.rank, "world_size": place.world_size, "store": store}
        dist.init_process_group(_backend(local_rank), **options)
    else:
        _meet(place, options, meet_s)


def _meet(place: LaunchedPlace, options: dict[str, Any], meet_s: float) -> None:
    """Opens the process group of ranks whose launcher has no store, over the one that `meet` makes.

    options   further arguments of `init_process_group`; `meet_s`: seconds that ranks wait for each other
    """
    import torch
    import torch.distributed as dist

    met = meet(place, meet_s)
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(met.threads)  # each rank would otherwise take all CPUs
    # ranks of one host need no network: gloo stays on the loopback
    if place.one_host:
        _stay_home()
    else:
        until = time.monotonic() + meet_s
        talk_between_hosts(met.store, met.rank, place.world_size, met.local_rank, met.first_host, until)
    store = dist.PrefixStore("group", met.store)
    options |= {"store": store, "rank": met.rank, "world_size": place.world_size}
    dist.init_process_group(_backend(met.local_rank), **options)


def _be_alone(options: dict[str, Any]) -> None:
    """Opens a group of one rank, over a store in this process's memory."""
    import torch.distributed as dist

    _stay_home()
    dist.init_process_group(_backend(0), store=dist.HashStore(), rank=0, world_size=1, **options)


def _stay_home() -> None:
    """Makes gloo listen on loopback, unless the user chose an interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def _backend(local_rank: int) -> str:
    """Takes the accelerator of this local rank, if there is one; returns the text of gloo and its backend."""
    from shardwise.device import group_backend, take

    take(local_rank)
    return group_backend(None)


def leave(code: int) -> None:
    """Ends this process with the exit code `code`, after flushing its output. Never returns.

    gloo's threads can abort a regular interpreter exit, which a launcher would report as a failure, so this uses
    `os._exit`. If MPI runs in this process, the exit is a regular one, since MPI must be finalised.
    """
    dist, record = sys.modules.get("torch.distributed"), points.record()
    if record is not None:
        record.ended(code == 0)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if dist is not None and dist.is_available() and dist.is_initialized() and "mpi4py.MPI" not in sys.modules:
        os._exit(code)
    sys.exit(code)
