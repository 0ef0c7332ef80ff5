"""What FSDP2's units hold of weights, for a script's own code: memory in a parameter's place, weights in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

from shardwise.parallel.fsdp import groups_of


def held_by_units(module: torch.nn.Module) -> list[Any]:
    """Returns what FSDP2 knows of each parameter of its units."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    return [held for unit in units for group in groups_of(unit) for held in group.fsdp_params]


def reset(held: Any) -> None:
    """Let FSDP take up a shard's other memory, also while the script has it under another name (pruning)."""
    within, leaf = held._module_info.module._parameters, held._module_info.param_name
    stands, within[leaf] = leaf in within, held.sharded_param
    held.reset_sharded_param()
    if not stands:
        del within[leaf]


@contextmanager
def written_back(unit: FSDPModule) -> Iterator[None]:
    """Context, in which a unit's weights are gathered: what is written into them comes to this rank's pieces, at the
    end, or before the unit's own forward inside, after which its weights are given back.
    """
    groups = groups_of(unit)
    gathered = [(one, one._unsharded_param.data) for group in groups for one in group.fsdp_params]

    @torch.no_grad()
    def take(*_: Any) -> None:
        for one, memory in gathered:
            now, into = one._unsharded_param.detach(), one.sharded_param
            if now.data_ptr() != memory.data_ptr() and memory.untyped_storage().size():
                memory.copy_(now)  # `p.data = x` has put another in its place
            one._unsharded_param.data = memory
            if not now.untyped_storage().size():
                continue  # given back
            piece = distribute_tensor(now, into.device_mesh, into.placements, src_data_rank=None).to_local()
            if not torch.equal(piece, into._local_tensor.to(piece.dtype)):
                into._local_tensor.copy_(piece)

    before = unit.register_forward_pre_hook(take, prepend=True)
    try:
        yield
        take()
    finally:
        before.remove()


class Beside(torch.autograd.Function):
    """A weight's values, in graphs that come to the gathered weight as the forward's do."""

    @staticmethod
    def forward(ctx: Any, gathered: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return gradient, None
