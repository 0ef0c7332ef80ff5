"""Send text and JSON between ranks as bytes in tensors: nothing is pickled, so nothing received can run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Axis, broadcast, gather_rows
from shardwise.device import CPU, backend_of, device_uuid, on_host
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.host import read

SHORT = 512  # bytes of a row, enough for the JSON that is gathered in a step


def everybody() -> Axis:
    """Returns an axis of all ranks of the default process group; of one rank if there is none."""
    if not dist.is_initialized():
        return Axis.alone("world")
    world = dist.get_world_size()
    return Axis("world", world, dist.get_rank(), dist.group.WORLD, tuple(range(world)))


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Returns [each rank's `value`, in rank order] on all ranks, through JSON. Collective.

    A first all-gather sends rows of `SHORT` bytes: the text's length (8 bytes) and its beginning. If a text is longer a
    second one sends them whole. Raises `TypeError` for a value that JSON cannot hold.
    """
    text = json.dumps(value).encode()
    data = len(text).to_bytes(8, "little") + text
    rows = _gathered(data[:SHORT], SHORT, axis, device)
    sizes = [int.from_bytes(row[:8], "little") for row in rows]
    if max(sizes) > SHORT - 8:
        rows = _gathered(data, 8 + max(sizes), axis, device)
    return [json.loads(row[8 : 8 + size].decode()) for row, size in zip(rows, sizes, strict=True)]


_RAISED: dict[str, type[Exception]] = {"input": InputError, "plan": RefusedPlan}


def of_first(compute: Callable[[], Any], axis: Axis, device: torch.device) -> Any:
    """Returns on all ranks what `compute()` returns on the axis's first rank, through JSON (tuples become lists).

    An error there is raised on all ranks: `RefusedPlan` and `InputError` as they are; any other as it is on the first
    rank and as a `RunError` with its text on the others. Collective.
    """
    message: list[Any] = [None, None, None]
    failure: Exception | None = None
    if axis.index == 0:
        try:
            message[0] = compute()
        except Exception as error:  # raised below, since the other ranks wait for the broadcast
            failure = error
            kind = next((name for name, alike in _RAISED.items() if isinstance(error, alike)), "run")
            told = str(error) if kind != "run" else f"rank {axis.ranks[0]}: {type(error).__name__}: {error}"
            message[1:] = [kind, told]
    value, kind, text = json.loads(_sent(json.dumps(message).encode(), axis, device))
    if kind is None:
        return value
    raise failure if failure is not None else {**_RAISED, "run": RunError}[kind](text)


def _sent(data: bytes, axis: Axis, device: torch.device) -> bytes:
    """Returns `data` of the axis's first rank on all ranks. Collective."""
    if axis.size == 1:
        return data
    # the length first, since the others do not know how much to receive
    size = torch.tensor([len(data)]).to(device)
    broadcast(size, axis, 0, "control")
    (count,) = read(size, "texts")
    row = torch.frombuffer(bytearray(data.ljust(count, b"\0")[:count]), dtype=torch.uint8).to(device)
    broadcast(row, axis, 0, "control")
    return bytes(read(row, "texts"))


def _gathered(data: bytes, size: int, axis: Axis, device: torch.device) -> list[bytes]:
    """Returns every rank's `data`, padded with zeros to `size` bytes. Collective."""
    row = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    return [bytes(row_bytes) for row_bytes in read(gather_rows(row.to(device, non_blocking=True), axis), "texts")]


def refuse_shared_devices(device: torch.device) -> None:
    """Raises `InputError` on all ranks if two of them use the same accelerator and the backend (NCCL) forbids that."""
    world = dist.group.WORLD
    if on_host(device) or backend_of(world, device) in (None, "gloo") or backend_of(world, CPU) is None:
        return
    at: dict[str, int] = {}
    # ranks with different NCCL_HOSTID may share a device
    mine = [device_uuid(device), os.environ.get("NCCL_HOSTID", "")]
    for rank, (uuid, host) in enumerate(gather_json(mine, everybody(), CPU)):
        if uuid is not None and (first := at.setdefault(f"{uuid} {host}", rank)) != rank:
            raise InputError(
                f"ranks {first} and {rank} have one accelerator, over which they cannot send each other anything: "
                "start as many ranks on each host as it has accelerators. `shardwise train` and `shardwise run` may "
                "start more (--nproc): those meet through the host's memory"
            )
