"""Text between ranks, as bytes in tensors: nothing is pickled, so nothing received can run."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Axis, gather_rows


def everybody() -> Axis:
    """All ranks of the running process group (one, where none runs)."""
    if not dist.is_initialized():
        return Axis.alone("world")
    world = dist.get_world_size()
    return Axis("world", world, dist.get_rank(), dist.group.WORLD, tuple(range(world)))


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Every rank's value, in rank order, on all ranks. What JSON cannot hold raises `TypeError`."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = gather_rows(torch.tensor([float(data.numel())], dtype=torch.float64, device=device), axis)
    longest = int(sizes.max())
    row = torch.zeros(longest, dtype=torch.uint8, device=device)
    row[: data.numel()] = data
    table = gather_rows(row, axis).cpu()
    return [
        json.loads(bytes(table[rank, : int(size)].tolist()).decode())
        for rank, size in enumerate(sizes.view(-1).tolist())
    ]
