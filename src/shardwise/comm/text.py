"""Text between ranks, as bytes in tensors: nothing is pickled, so nothing received can run."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Axis, gather_rows
from shardwise.host import read

SHORT = 512  # bytes of a row, enough for what a step tells


def everybody() -> Axis:
    """All ranks of the running process group (one, where none runs)."""
    if not dist.is_initialized():
        return Axis.alone("world")
    world = dist.get_world_size()
    return Axis("world", world, dist.get_rank(), dist.group.WORLD, tuple(range(world)))


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Every rank's value, in rank order, on all ranks. What JSON cannot hold raises `TypeError`.

    A row holds a text's length (8 bytes) and its beginning, so that short texts need one collective; where one is
    longer, longer rows follow.
    """
    text = json.dumps(value).encode()
    data = len(text).to_bytes(8, "little") + text
    rows = _gathered(data[:SHORT], SHORT, axis, device)
    sizes = [int.from_bytes(row[:8], "little") for row in rows]
    if max(sizes) > SHORT - 8:
        rows = _gathered(data, 8 + max(sizes), axis, device)
    return [json.loads(row[8 : 8 + size].decode()) for row, size in zip(rows, sizes, strict=True)]


def _gathered(data: bytes, size: int, axis: Axis, device: torch.device) -> list[bytes]:
    """Every rank's bytes, filled up to one size."""
    row = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    return [bytes(told) for told in read(gather_rows(row.to(device, non_blocking=True), axis), "texts")]
