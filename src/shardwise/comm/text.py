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

SHORT = 512  # bytes of a row, enough for what a step tells


def everybody() -> Axis:
    """Returns an axis of all ranks of the running process group (one rank, where none runs)."""
    if not dist.is_initialized():
        return Axis.alone("world")
    world = dist.get_world_size()
    return Axis("world", world, dist.get_rank(), dist.group.WORLD, tuple(range(world)))


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Returns every rank's value, in rank order, on all ranks. Collective. `TypeError` for what JSON cannot hold.

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


_RAISED: dict[str, type[Exception]] = {"input": InputError, "plan": RefusedPlan}


def of_first(compute: Callable[[], Any], axis: Axis, device: torch.device) -> Any:
    """Returns on all ranks what `compute` returns on the axis's first, as JSON keeps it (tuples become lists).

    Collective, for what every rank would come to alike. What the first raises is raised on all: a refusal and wrong
    input as they are, anything else on the others as a `RunError` that tells of it.
    """
    message: list[Any] = [None, None, None]
    failure: Exception | None = None
    if axis.index == 0:
        try:
            message[0] = compute()
        except Exception as error:  # the others would wait for it
            failure = error
            kind = next((name for name, alike in _RAISED.items() if isinstance(error, alike)), "run")
            told = str(error) if kind != "run" else f"rank {axis.ranks[0]}: {type(error).__name__}: {error}"
            message[1:] = [kind, told]
    value, kind, text = json.loads(_sent(json.dumps(message).encode(), axis, device))
    if kind is None:
        return value
    raise failure if failure is not None else {**_RAISED, "run": RunError}[kind](text)


def _sent(data: bytes, axis: Axis, device: torch.device) -> bytes:
    """Returns the bytes of the axis's first rank, on all ranks."""
    if axis.size == 1:
        return data
    # the length first: others do not know how much to receive
    size = torch.tensor([len(data)]).to(device)
    broadcast(size, axis, 0, "control")
    (count,) = read(size, "texts")
    row = torch.frombuffer(bytearray(data.ljust(count, b"\0")[:count]), dtype=torch.uint8).to(device)
    broadcast(row, axis, 0, "control")
    return bytes(read(row, "texts"))


def _gathered(data: bytes, size: int, axis: Axis, device: torch.device) -> list[bytes]:
    """Returns every rank's bytes, filled up to one size."""
    row = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    return [bytes(row_bytes) for row_bytes in read(gather_rows(row.to(device, non_blocking=True), axis), "texts")]


def refuse_shared_devices(device: torch.device) -> None:
    """Raises `InputError` on all ranks where two have one accelerator, and a backend that refuses it later."""
    world = dist.group.WORLD
    if on_host(device) or backend_of(world, device) in (None, "gloo") or backend_of(world, CPU) is None:
        return
    at: dict[str, int] = {}
    # ranks that NCCL takes for hosts of their own may share a device
    mine = [device_uuid(device), os.environ.get("NCCL_HOSTID", "")]
    for rank, (uuid, host) in enumerate(gather_json(mine, everybody(), CPU)):
        if uuid is not None and (first := at.setdefault(f"{uuid} {host}", rank)) != rank:
            raise InputError(
                f"ranks {first} and {rank} have one accelerator, over which they cannot send each other anything: "
                "start as many ranks on each host as it has accelerators. `shardwise train` and `shardwise run` may "
                "start more (--nproc): those meet through the host's memory"
            )
