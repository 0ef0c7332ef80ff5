"""Check that weights, gradients and masks fit a rank's device, before any of them is made."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Container
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from shardwise.comm import gather_json
from shardwise.device import CPU, host_memory, memory_bytes, on_host
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.layout.offload import weights_on_host
from shardwise.mesh import Mesh
from shardwise.part.positions import Positions
from shardwise.precision import Precision
from shardwise.ranks import local_size

MANY = 2**12  # positions from which a tensor over all pairs of them is large
MASKS = "Say is_causal=True where it is causal, give none where all are read, and (B, 1, 1, S) where it hides padding"


def check_room(module: nn.Module, plan: Plan, mesh: Mesh, precision: Precision, absent: Container[str]) -> None:
    """Raises `InputError` if weights and gradients alone exceed the memory of the device, or of the host under offload.

    A lower bound: optimizer state and activations come on top. tp, ep and zero=3 are taken to divide weights evenly.
    `absent`: names of the weights of other pipeline stages.
    """
    home = CPU if weights_on_host(plan.offload) else mesh.device
    total = memory_bytes(home)
    # the amount of memory is unknown (no /proc), so nothing is refused
    if total is None:
        return
    over = plan.tp * plan.ep * (mesh.shard.size if plan.sharded.weights else 1)
    params = [param for name, param in module.named_parameters() if name not in absent]
    weights = sum(param.numel() * precision.dtype_of(param).itemsize for param in params) // over
    grads = sum(param.numel() * precision.dtype_of(param).itemsize for param in params if param.requires_grad) // over
    # An accelerator is one rank's own; the memory of a host is shared by all ranks on it.
    ranks = 1 if not on_host(home) else local_size(os.environ) or mesh.world.size
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


def check_host(needed: int, plan: Plan, mesh: Mesh) -> None:
    """Raises `RefusedPlan` if the ranks of a host would keep more in its memory than is free there. Collective.

    needed  bytes that this rank is about to allocate
    """
    rows = gather_json((socket.gethostname(), needed, host_memory()[1]), mesh.world, mesh.device)
    # ranks of one host share its memory, so their needs add up
    for host in dict.fromkeys(name for name, _, _ in rows):
        sizes, free = zip(*((size, free) for name, size, free in rows if name == host), strict=True)
        # a rank may be limited to less than its host has (a control group): the least counts
        left = min((size for size in free if size is not None), default=None)
        if left is not None and sum(sizes) > left:
            disk = "optimizer:disk|parameters" if weights_on_host(plan.offload) else "optimizer:disk"
            raise RefusedPlan(
                f"offload={plan.offload}: {len(sizes)} rank(s) of {host} would keep {_gib(sum(sizes))} more in its "
                f"memory, of which {_gib(left)} are free (of the host, or of the control group that limits them): use "
                f"offload={disk}, or more hosts"
            )


def check_masks(positions: Positions, device: torch.device, ranks: int) -> None:
    """Raises `InputError` if an attention mask over all pairs of positions exceeds the memory of the device.

    ranks  of the world, taken to be all on this host unless a launcher says otherwise; each holds the whole mask
    """
    shape, size = positions.mask
    total = memory_bytes(device)
    here = 1 if not on_host(device) else local_size(os.environ) or ranks
    if total is None or size * here <= total:
        return
    raise InputError(
        f"attention is given a mask {shape}, {_gib(size)} on each of {here} rank(s) here, and there are {_gib(total)}: "
        f"a mask with an element for each pair of positions does not shrink with their number of ranks. {MASKS}"
    )


def of_pairs(batch: Any, error: BaseException) -> str:
    """Returns advice if a failed allocation was for all pairs of a batch's positions; "" otherwise."""
    asked = re.search(r"allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)", str(error))
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    longest = max((size for tensor in tensors for size in tensor.shape[1:]), default=0)
    # no such text (an accelerator's error differs), or samples too short for a large mask
    if asked is None or longest < MANY:
        return ""
    size = float(asked[1]) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(asked[2])
    if size < longest**2:  # less than a byte for each pair
        return ""
    return (
        f". That is a mask, or scores, of all pairs of {longest:,} positions, which no number of ranks makes smaller. "
        f"{MASKS}; masks of transformers are made in blocks where cp or cp_ulysses cut"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host is out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
