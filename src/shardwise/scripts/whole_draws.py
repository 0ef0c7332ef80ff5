"""Draws into weights that FSDP2 shards (zero=3): what one process draws for the whole ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._pytree import tree_map_only

from shardwise.errors import RefusedPlan
from shardwise.scripts.pieces import Pieces


def draw_whole(known: weakref.ref[Pieces]) -> None:
    """Let torch draw for FSDP's tensors what one process draws for the whole ones. For the process."""

    def draw(operation: Any, args: tuple, kwargs: dict) -> Any:
        given, pieces = args[0], known()
        if not isinstance(given, DTensor) or pieces is None:
            raise RefusedPlan(f"{operation} beside sharded weights: draw into a tensor made like one of them")
        cut = [Replicate() if place.is_partial() else place for place in given.placements]
        pieces.meet("a draw for sharded weights")
        pieces.technique.written = True
        drawn = operation(given.full_tensor(), *args[1:], **kwargs)

        def piece(whole: torch.Tensor) -> torch.Tensor:
            return distribute_tensor(pieces._same(whole), given.device_mesh, cut, src_data_rank=None)

        drawn = tree_map_only(torch.Tensor, piece, drawn)
        if not operation._schema.is_mutable:
            return drawn
        given._local_tensor.copy_(drawn._local_tensor)
        return given

    dispatcher = DTensor._op_dispatcher
    for operation in dispatcher._random_ops:
        if operation._schema.arguments and operation._schema.arguments[0].name in ("self", "input"):
            dispatcher._custom_op_handlers[operation] = draw
