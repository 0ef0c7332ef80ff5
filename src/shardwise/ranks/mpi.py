"""Finds this process's rank through mpi4py if MPI runs in it, or if the environment gives no world size."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from shardwise.errors import InputError
from shardwise.ranks.launchers import LaunchedPlace, find, rank_without_size


def here() -> LaunchedPlace | None:
    """Returns this process's place from mpi4py and the environment; None if it was started alone.

    A rank that shardwise itself started (`launch`, `RankPool`) gets its place too, while its group exists. Raises
    `InputError` if mpi4py and the environment disagree, and as `find` does.
    """
    own = _started_here()
    # before mpi4py, whose ranks are those of a launcher of the caller
    if own is not None:
        return own
    world = world_communicator()
    if world is None:
        return find(os.environ)
    # PMIx alone gives no world size in the environment; mpi4py gets it from the MPI library
    place = None if rank_without_size(os.environ) else find(os.environ)
    rank, size = world.Get_rank(), world.Get_size()
    if place is None:
        return (
            LaunchedPlace("mpi4py", rank, size, names=("the rank in COMM_WORLD", "size of COMM_WORLD"))
            if size > 1
            else None
        )
    if (rank, size) == (place.rank, place.world_size):
        return place
    if size == 1 and not place.mpi:
        return place  # the launcher starts no MPI ranks, so mpi4py sees a world of this process alone
    raise InputError(
        f"mpi4py says rank {rank} of {size}, but the environment sets {place.names[0]}={place.rank} and "
        f"{place.names[1]}={place.world_size}: mpi4py runs on another MPI than the launcher's; install the one that "
        "belongs to it (pip install --no-binary mpi4py mpi4py), or do not import mpi4py"
    )


def _started_here() -> LaunchedPlace | None:
    """Returns the place of a rank that `launch` or `RankPool` started and whose group is open; else None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or os.environ.get("MASTER_ADDR") or not os.environ.get("LOCAL_WORLD_SIZE"):
        return None
    if not dist.is_available() or not dist.is_initialized():
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    # variables that were inherited from another launcher differ from this group
    if (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) != (str(rank), str(size)):
        return None
    return LaunchedPlace("shardwise", rank, size, local_rank=rank, local_size=size, one_host=True)


def world_communicator() -> Any | None:
    """Returns mpi4py's COMM_WORLD if MPI runs in this process, else None.

    mpi4py is imported here only if the environment gives a rank without a world size.
    """
    if "mpi4py.MPI" not in sys.modules:
        if not rank_without_size(os.environ) or importlib.util.find_spec("mpi4py") is None:
            return None
        importlib.import_module("mpi4py.MPI")
    mpi = sys.modules["mpi4py.MPI"]
    return mpi.COMM_WORLD if mpi.Is_initialized() and not mpi.Is_finalized() else None
