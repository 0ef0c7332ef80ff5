"""`join`: take this process's place in a run that somebody else started (torchrun), or be a run of one."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from shardwise.errors import InputError

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(timeout_s: float | None = None) -> tuple[int, int]:
    """Have a process group and return (rank, world size).

    An initialised group is kept. Otherwise RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT decide, as torchrun sets
    them: gloo for CPU tensors, and NCCL for CUDA tensors where there is a CUDA device. With none of them set this
    process is the only rank. Some but not all of them means a broken launcher, and is refused.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    missing = [name for name in _NAMES if not os.environ.get(name)]
    if missing and len(missing) < len(_NAMES):
        present = ", ".join(name for name in _NAMES if name not in missing)
        raise InputError(
            f"the environment sets {present} but not {', '.join(missing)}; set all of {', '.join(_NAMES)} "
            "(torchrun does) to join a run, or none of them to run as one process"
        )
    options: dict[str, Any] = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    if missing:
        _be_alone(options)
    else:
        rank, world_size = _place()
        dist.init_process_group(_backend(rank), init_method="env://", rank=rank, world_size=world_size, **options)
    return dist.get_rank(), dist.get_world_size()


def _be_alone(options: dict[str, Any]) -> None:
    """A group of one rank, for which no other process needs to find a store, a file or a port."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(_backend(0), store=dist.HashStore(), rank=0, world_size=1, **options)


def _place() -> tuple[int, int]:
    """RANK and WORLD_SIZE as numbers that make sense together."""
    numbers = []
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = os.environ[name]
        if not text.isdecimal():
            raise InputError(f"the environment variable {name} is '{text}', not a whole number")
        numbers.append(int(text))
    rank, world_size = numbers[:2]
    if rank >= world_size:
        raise InputError(f"the environment sets RANK={rank}, which a WORLD_SIZE of {world_size} does not have")
    return rank, world_size


def _backend(rank: int) -> str:
    """gloo, and NCCL beside it for CUDA tensors; each rank takes the CUDA device of its local rank."""
    import torch

    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or rank) % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"
