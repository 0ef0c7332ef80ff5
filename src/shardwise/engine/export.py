"""Whole weights out of an engine, and what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardwise.comm import barrier
from shardwise.device import peak_bytes
from shardwise.memory.live import storage_bytes

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


def state_dict(engine: Engine, *, rank_0_only: bool = False) -> dict[str, torch.Tensor]:
    """Whole parameters and persistent buffers on the CPU, under the module's own names. Collective.

    With `rank_0_only` the other ranks keep none of it and return an empty dict.
    """
    keep = engine.rank == 0 or not rank_0_only
    whole = {}
    for name, tensor in engine.full_parameters():  # collective, one parameter at a time
        if keep:
            whole[name] = tensor.cpu().clone()
    if not keep:
        return {}
    by_identity = {id(param): name for name, param in engine.module.named_parameters()}
    state = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            known = by_identity.get(id(value))
            state[name] = whole[known] if known is not None else value.detach().cpu().clone()
    return state


def save_weights(engine: Engine, path: str | Path) -> None:
    """Whole weights and buffers as one safetensors file, written by rank 0 and published whole. Collective."""
    state = state_dict(engine, rank_0_only=True)
    if engine.rank == 0:
        from safetensors.torch import save_file

        unshared = {name: tensor.clone().contiguous() for name, tensor in state.items()}
        partial = Path(f"{path}.partial")
        save_file(unshared, str(partial), metadata={"format": "pt"})
        partial.replace(path)
    barrier(engine.mesh.world)


def memory(engine: Engine) -> dict[str, int | None]:
    """Bytes held by this rank now: parameters (masters too), gradients, optimizer state; peak on a GPU."""
    masters = [slot.master for slot in engine.technique.slots]
    masters += list(engine.owners.masters.values()) if engine.owners is not None else []
    parameters = [*engine.module.parameters(), *masters]
    gradients = [p.grad for p in parameters] + engine.technique.gradient_buffers()
    state = [v for s in engine.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return {
        "parameters": storage_bytes(parameters),
        "gradients": storage_bytes(gradients),
        "optimizer": storage_bytes(state),
        "peak": peak_bytes(engine.device),
    }
