"""Find this rank by mpi4py, where the script has it running, or where the environment gives no size."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from shardwise.errors import InputError
from shardwise.ranks.launchers import LaunchedPlace, find, rank_without_size


def here() -> LaunchedPlace | None:
    """Returns this process's place by mpi4py and the environment; None where it was started alone.

    Raises `InputError` where the two differ, and as `find` does.

    A rank that shardwise itself started (`launch`, `RankPool`) has its place too, while its group is up.
    """
    own = _started_here()
    # before mpi4py, which tells of the launcher's ranks and not of ours
    if own is not None:
        return own
    world = world_communicator()
    if world is None:
        return find(os.environ)
    # PMIx alone names no number of ranks: mpi4py has it from the library
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
        return place  # a process that its launcher gave no MPI: alone in a world of its own
    raise InputError(
        f"mpi4py says rank {rank} of {size}, but the environment sets {place.names[0]}={place.rank} and "
        f"{place.names[1]}={place.world_size}: mpi4py runs on another MPI than the launcher's; install the one that "
        "belongs to it (pip install --no-binary mpi4py mpi4py), or do not import mpi4py"
    )


def _started_here() -> LaunchedPlace | None:
    """Returns the place of a rank of `launch` or `RankPool`, whose group is up and needed no address; else None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or os.environ.get("MASTER_ADDR") or not os.environ.get("LOCAL_WORLD_SIZE"):
        return None
    if not dist.is_available() or not dist.is_initialized():
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    # variables that were inherited from another start do not tell of this group
    if (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) != (str(rank), str(size)):
        return None
    return LaunchedPlace("shardwise", rank, size, local_rank=rank, local_size=size, one_host=True)


def world_communicator() -> Any | None:
    """Returns mpi4py's COMM_WORLD, where MPI is running in this process (or must be asked); else None."""
    if "mpi4py.MPI" not in sys.modules:
        if not rank_without_size(os.environ) or importlib.util.find_spec("mpi4py") is None:
            return None
        importlib.import_module("mpi4py.MPI")
    mpi = sys.modules["mpi4py.MPI"]
    return mpi.COMM_WORLD if mpi.Is_initialized() and not mpi.Is_finalized() else None
