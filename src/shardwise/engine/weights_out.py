"""Whole weights out of a running plan, as tensors or a file (training/loop, scripts/weight_access); a rank's bytes."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import torch

from shardwise.comm import barrier
from shardwise.device import peak_bytes
from shardwise.engine.whole import full_buffers, full_parameters
from shardwise.memory.live import storage_bytes
from shardwise.step.state import RankState
from shardwise.tiers.activations import memory_of


def state_dict(state: RankState, *, rank_0_only: bool = False) -> dict[str, torch.Tensor]:
    """Returns whole parameters and persistent buffers on the CPU, under the module's own names. Collective.

    With `rank_0_only` the other ranks keep none of it and return an empty dict.
    """
    keep = state.mesh.rank == 0 or not rank_0_only
    whole = {}
    for name, tensor in full_parameters(state):  # collective, one parameter at a time
        if keep:
            whole[name] = tensor.cpu().clone()
    for name, buffer in full_buffers(state):
        if keep:
            whole[name] = buffer.detach().cpu().clone()
    if not keep:
        return {}
    # A tied weight has several names in a state dict, and one among the parameters.
    by_identity = {id(param): name for name, param in state.module.named_parameters()}
    by_identity |= {id(buffer): name for name, buffer in state.module.named_buffers()}
    weights = {}
    for name, value in state.module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            own_name = by_identity.get(id(value))
            # a module that a script's forward has made since is no part of the plan, and whole
            weights[name] = whole[own_name] if own_name in whole else value.detach().cpu().clone()
    return weights


def trained_parameters(state: RankState, *, rank_0_only: bool = False) -> dict[str, torch.Tensor]:
    """Returns the whole parameters that are trained, by name, on the CPU; frozen ones are not gathered. Collective.

    With `rank_0_only` the other ranks keep none of them and return an empty dict.
    """
    keep = state.mesh.rank == 0 or not rank_0_only
    trained = islice(full_parameters(state), len(state.all_names))  # which come before the frozen ones
    return {name: tensor.cpu().clone() for name, tensor in trained if keep}


def save_weights(state: RankState, path: str | Path, spare: str | Path | None = None) -> Path:
    """Write whole weights and buffers as one safetensors file, by rank 0, and publish it whole. Collective.

    Its metadata has the step.

    spare   where they go if `path` cannot be written; the notices tell so
    Returns where they are (on rank 0).
    """
    weights, written = state_dict(state, rank_0_only=True), Path(path)
    if state.mesh.rank == 0:
        # safetensors refuses tensors that share memory, as tied weights do.
        unshared = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
        try:
            _write(unshared, written, state.steps_done)
        except Exception as error:  # what a full disk raises here is the library's own
            if spare is None:
                raise
            partial = Path(f"{path}.partial")
            if partial.is_file():  # half of the weights help nobody, and take the space that is left
                partial.unlink()
            written = Path(spare)
            written.parent.mkdir(parents=True, exist_ok=True)
            _write(unshared, written, state.steps_done)
            state.notices.append(f"{path} could not be written ({error}): the weights are in {written}")
    barrier(state.mesh.world)  # no rank goes on to read a file that is not there yet
    return written


def _write(weights: dict[str, torch.Tensor], path: Path, step: int) -> None:
    from safetensors.torch import save_file

    partial = Path(f"{path}.partial")
    save_file(weights, str(partial), metadata={"format": "pt", "step": str(step)})
    _sort_metadata(partial)
    partial.replace(path)  # in one move: nobody reads half of a file


def _sort_metadata(path: Path) -> None:
    """Sort the metadata in a safetensors header, which come in any order: equal weights are then equal files."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(text) == length:  # else it was written otherwise, and stays
            file.seek(8)
            file.write(text)


def memory(state: RankState) -> dict[str, int | None]:
    """Returns bytes that this rank holds now: parameters (masters too), gradients, optimizer state; peak on a GPU.

    What lies in a tier is no part of these, and beside them: "host", "disk" (for activations the most so far).
    """

    def here(tensor: torch.Tensor) -> bool:
        rests = state.tier is not None and state.tier.rests(tensor)
        return not rests and (state.shards is None or not state.shards.holds(memory_of(tensor)))

    masters = [slot.master for slot in state.technique.slots]
    masters += list(state.owners.masters.values()) if state.owners is not None else []
    parameters = [param for param in (*state.module.parameters(), *masters) if here(param)]
    gradients = [p.grad for p in (*state.module.parameters(), *masters)] + state.technique.gradient_buffers()
    states = state.optimizer.state.values()  # of weights, and what an optimizer keeps under names of its own
    tensors = [v for s in states for v in (s.values() if isinstance(s, dict) else (s,)) if isinstance(v, torch.Tensor)]
    tiers: Counter[str] = Counter()
    for tier in (state.tier, state.activations, state.shards):
        tiers.update(tier.held_bytes() if tier is not None else {})
    return {
        "parameters": storage_bytes(parameters),
        "gradients": storage_bytes(gradients),
        "optimizer": storage_bytes(filter(here, tensors)),
        "peak": peak_bytes(state.device),
        **tiers,
    }
