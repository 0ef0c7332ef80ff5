"""Whether a rank's device can hold what the plan puts there, before any of it is made."""

from __future__ import annotations

import os
from collections.abc import Container

import torch
from torch import nn

from shardwise.device import memory_bytes, on_host
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.mesh import Mesh
from shardwise.part.positions import Positions
from shardwise.precision import Precision
from shardwise.ranks import local_size


def check_room(module: nn.Module, plan: Plan, mesh: Mesh, precision: Precision, absent: Container[str]) -> None:
    """Raise `InputError` where weights and their gradients alone are more than the device has.

    A lower bound: optimizer state and activations come on top. Cuts of tp, ep and zero=3 are taken as even.
    """
    total = memory_bytes(mesh.device)
    if total is None:
        return
    over = plan.tp * plan.ep * (mesh.shard.size if plan.zero == 3 else 1)
    held = [(name, param) for name, param in module.named_parameters() if name not in absent]
    weights = sum(param.numel() * precision.held(param).itemsize for _, param in held) // over
    grads = sum(param.numel() * precision.held(param).itemsize for _, param in held if param.requires_grad) // over
    ranks = 1 if not on_host(mesh.device) else local_size(os.environ) or mesh.world.size
    if (weights + grads) * ranks <= total:
        return
    beside = f", and {ranks} ranks share this host" if ranks > 1 else ""
    elements = sum(param.numel() for param in module.parameters())
    raise InputError(
        f"the model is too large for this machine: {elements:,} parameters are {_gib(weights)} of weights and "
        f"{_gib(grads)} of gradients on each rank under plan {plan}, optimizer state not counted{beside}; it has "
        f"{_gib(total)}. Shard it over more machines (dp_shard with zero=3, tp), or take a smaller model; `shardwise "
        "plan` says what fits"
    )


def check_masks(positions: Positions, device: torch.device, ranks: int) -> None:
    """Raise `InputError` where a mask over all pairs of positions, whole on every rank, is more than the device has.

    ranks  of the world, all on this host where no launcher says otherwise
    """
    shape, size = positions.mask
    total = memory_bytes(device)
    here = 1 if not on_host(device) else local_size(os.environ) or ranks
    if total is None or size * here <= total:
        return
    raise InputError(
        f"attention is given a mask {shape}, {_gib(size)} on each of {here} rank(s) here, and there are {_gib(total)}: "
        "a mask with an element for each pair of positions does not shrink with their number of ranks. Say "
        "is_causal=True where it is causal, give none where all are read, and (B, 1, 1, S) where it hides padding"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator, of a device or of the host, had no more to give."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
