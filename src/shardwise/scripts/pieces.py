"""Weights of which ranks hold pieces: whole in a script's graphs, and given other memory by a model's forward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.errors import InputError
from shardwise.parallel.full import FullShard
from shardwise.part.pairs import as_pairs


class OfPieces(torch.autograd.Function):
    """A whole weight; each rank takes its piece of what comes back."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, values: torch.Tensor, weights: Any) -> torch.Tensor:
        ctx.piece, ctx.weights = piece, weakref.ref(weights)  # a script keeps its last loss, and not its run
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return ctx.weights().cut(ctx.piece, gradient), None, None


def assign(trained: tuple[FullShard, int] | None, of_unit: Any, param: DTensor, value: torch.Tensor) -> None:
    """`param.data = value` in a forward, of a unit of zero=3 that does not run: its storage is another one from here
    on, as in one process.

    trained     its technique, and its number there; None of what is frozen
    of_unit     FSDP's record of the parameter
    """
    value = value.detach()
    value = as_pairs(value) if value.is_complex() and not param.is_complex() else value
    if (value.shape, value.dtype, value.device) != (param.shape, param.dtype, param.device):
        raise InputError(
            f"param.data = a tensor of {tuple(value.shape)}, {value.dtype} on {value.device}, where the weight is "
            f"{tuple(param.shape)}, {param.dtype} on {param.device}: the plan holds its pieces as they were"
        )
    if isinstance(value, DTensor):
        local = value.redistribute(param.device_mesh, param.placements).to_local().contiguous()
    else:
        local = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None).to_local().clone()
    param._local_tensor = local
    _take_up(of_unit)
    if trained is not None:
        technique, index = trained
        technique.slots[index].master.data = technique.piece(index, param.detach())


def _take_up(of_unit: Any) -> None:
    """Let FSDP take up a shard's other memory, also while the script has it under another name (pruning)."""
    within, leaf = of_unit._module_info.module._parameters, of_unit._module_info.param_name
    stands, within[leaf] = leaf in within, of_unit.sharded_param
    of_unit.reset_sharded_param()
    if not stands:
        del within[leaf]
